"""What `speed.py` measures: pairs of one patched and one stock model that do comparable work.

Models are random and of middling size, in float32; weights do not matter to time or memory. Every side returns the
logits of the last position, so that pairs which compute the same function can be seen to do so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_posenc

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """The shape of the models and of the work. Heads are 64 wide; Llama's MLP has Llama 2's proportions."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    tokens: int = 4096
    repeats: int = 7
    decode_repeats: int = 60


FULL = Sizes()
QUICK = Sizes(layers=1, width=128, heads=2, vocab=97, tokens=128, repeats=2, decode_repeats=2)


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


def llama(sizes: Sizes, rope: dict[str, Any] | None = None, trained: int = 1024) -> Any:
    """A random Llama of `trained` positions with these `rope_parameters`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 43 // 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=trained,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


def yarn_parameters(trained: int, factor: float) -> dict[str, Any]:
    """What the host library calls YaRN."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": trained,
    }


def bloom(sizes: Sizes) -> Any:
    """A random BLOOM."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=sizes.vocab, hidden_size=sizes.width, n_layer=sizes.layers, n_head=sizes.heads)
    return BloomForCausalLM(config).eval()


def ids(sizes: Sizes, count: int) -> Tensor:
    """Random tokens (1, count)."""
    return torch.randint(0, sizes.vocab, (1, count), generator=torch.Generator().manual_seed(0))


def prefill(model: Any, sizes: Sizes) -> Step:
    """One forward over all tokens, without a cache, which would weigh the same on both sides."""
    tokens = ids(sizes, sizes.tokens)

    def step() -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


def decode(model: Any, sizes: Sizes) -> Step:
    """One token that sees `sizes.tokens` keys, its own the last of them; the cache is cut back after each step."""
    tokens = ids(sizes, sizes.tokens)
    cache = DynamicCache(config=model.config)
    # renamed between releases of Transformers
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    arguments: dict[str, Any] = {name: cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=tokens[:, :-1], **arguments)

    def step() -> Tensor:
        logits: Tensor = model(input_ids=tokens[:, -1:], **arguments).logits
        cache.crop(-1)
        return logits

    return step


def patched(model: Any, encoding: str, **options: Any) -> Any:
    """The model with an encoding of ours."""
    return hf_posenc.patch_model(model, encoding, **options)


def yarn_stock(sizes: Sizes) -> Step:
    trained = sizes.tokens // 4
    return prefill(llama(sizes, yarn_parameters(trained, 4.0), trained), sizes)


def yarn_patched(sizes: Sizes) -> Step:
    return prefill(patched(llama(sizes, trained=sizes.tokens // 4), "yarn", factor=4), sizes)


def long_yarn(sizes: Sizes) -> Any:
    """Static YaRN at eight times the trained length."""
    trained = sizes.tokens // 8
    return llama(sizes, yarn_parameters(trained, 8.0), trained)


def long_dynamic_yarn(sizes: Sizes) -> Any:
    """The same length in segments that end at 1, 2, 4 and 8 times the trained one."""
    return patched(llama(sizes, trained=sizes.tokens // 8), "dynamic_yarn")


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
        time_goal=1.2,
        memory_goal=1.2,
    ),
    Case(
        "alibi on BLOOM",
        "patch_model(bloom, 'alibi')",
        "stock BLOOM, whose own encoding that is",
        (lambda s: prefill(patched(bloom(s), "alibi"), s), lambda s: prefill(bloom(s), s)),
        time_goal=0.5,
        memory_goal=0.35,
        same=True,
    ),
    Case(
        "alibi on Llama, decode",
        "patch_model(llama, 'alibi')",
        "stock Llama, sdpa",
        (lambda s: decode(patched(llama(s), "alibi"), s), lambda s: decode(llama(s), s)),
        decode=True,
    ),
    Case(
        "dynamic_yarn on Llama",
        "patch_model(llama, 'dynamic_yarn') at 8 x the trained length",
        "static YaRN, factor 8, in the config",
        (lambda s: prefill(long_dynamic_yarn(s), s), lambda s: prefill(long_yarn(s), s)),
    ),
    Case(
        "dynamic_yarn on Llama, decode",
        "patch_model(llama, 'dynamic_yarn') at 8 x the trained length",
        "static YaRN, factor 8, in the config",
        (lambda s: decode(long_dynamic_yarn(s), s), lambda s: decode(long_yarn(s), s)),
        decode=True,
    ),
)
