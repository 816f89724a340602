"""What `speed.py` measures: pairs of one patched and one stock model that do comparable work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models import (
    Sizes,
    Step,
    bloom,
    decode,
    gpt2,
    llama,
    long_dynamic_yarn,
    long_yarn,
    mpt,
    patched,
    prefill,
    yarn_parameters,
)


@dataclass(frozen=True)
class Case:
    """`measured` over `stock`, with the goals for the ratios; `same` where both compute one function."""

    name: str
    measured: str
    stock: str
    build: tuple[Callable[[Sizes], Step], Callable[[Sizes], Step]]
    time_goal: float | None = None
    memory_goal: float | None = None
    same: bool = False
    decode: bool = False


def yarn_stock(sizes: Sizes) -> Step:
    trained = sizes.tokens // 4
    return prefill(llama(sizes, yarn_parameters(trained, 4.0), trained), sizes)


def yarn_patched(sizes: Sizes) -> Step:
    return prefill(patched(llama(sizes, trained=sizes.tokens // 4), "yarn", factor=4), sizes)


CASES: tuple[Case, ...] = (
    Case(
        "yarn on Llama",
        "patch_model(llama, 'yarn', factor=4)",
        "the same rope_parameters in the config, no patch",
        (yarn_patched, yarn_stock),
        time_goal=1.02,
        memory_goal=1.02,
        same=True,
    ),
    Case(
        "alibi on Llama",
        "patch_model(llama, 'alibi')",
        "stock Llama, sdpa",
        (lambda s: prefill(patched(llama(s), "alibi"), s), lambda s: prefill(llama(s), s)),
        time_goal=1.1,
        memory_goal=1.2,
    ),
    Case(
        "alibi on BLOOM",
        "patch_model(bloom, 'alibi')",
        "stock BLOOM, whose own encoding that is",
        (lambda s: prefill(patched(bloom(s), "alibi"), s), lambda s: prefill(bloom(s), s)),
        time_goal=0.4,
        memory_goal=0.3,
        same=True,
    ),
    Case(
        "alibi on MPT",
        "patch_model(mpt, 'alibi')",
        "stock MPT, whose own encoding that is",
        (lambda s: prefill(patched(mpt(s), "alibi"), s), lambda s: prefill(mpt(s), s)),
        time_goal=0.4,
        memory_goal=0.3,
        same=True,
    ),
    Case(
        "rope on GPT-2",
        "patch_model(gpt2, 'rope')",
        "stock GPT-2, sdpa",
        (lambda s: prefill(patched(gpt2(s), "rope"), s), lambda s: prefill(gpt2(s), s)),
        time_goal=1.05,
    ),
    Case(
        "rope on GPT-2, decode",
        "patch_model(gpt2, 'rope')",
        "stock GPT-2, sdpa",
        (lambda s: decode(patched(gpt2(s), "rope"), s), lambda s: decode(gpt2(s), s)),
        time_goal=1.05,
        decode=True,
    ),
    Case(
        "alibi on Llama, decode",
        "patch_model(llama, 'alibi')",
        "stock Llama, sdpa",
        (lambda s: decode(patched(llama(s), "alibi"), s), lambda s: decode(llama(s), s)),
        time_goal=1.05,
        decode=True,
    ),
    Case(
        "dynamic_yarn on Llama",
        "patch_model(llama, 'dynamic_yarn') at 8 x the trained length",
        "static YaRN, factor 8, in the config",
        (lambda s: prefill(long_dynamic_yarn(s), s), lambda s: prefill(long_yarn(s), s)),
        time_goal=1.15,
    ),
    Case(
        "dynamic_yarn within L",
        "patch_model(llama, 'dynamic_yarn') at its trained length",
        "stock Llama, sdpa",
        (
            lambda s: prefill(patched(llama(s, trained=s.tokens), "dynamic_yarn"), s),
            lambda s: prefill(llama(s, trained=s.tokens), s),
        ),
        time_goal=1.02,
        same=True,
    ),
    Case(
        "dynamic_yarn on Llama, decode",
        "patch_model(llama, 'dynamic_yarn') at 8 x the trained length",
        "static YaRN, factor 8, in the config",
        (lambda s: decode(long_dynamic_yarn(s), s), lambda s: decode(long_yarn(s), s)),
        time_goal=1.05,
        decode=True,
    ),
)
