"""What is laid side by side, a host at a time: the stock model first, and how far each goes in memory or patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from models import Sizes, Step, bloom, gpt2, llama, mpt, patched, yarn_parameters

from hf_posenc.linear_bias import Way, bias_way


@dataclass(frozen=True)
class Side:
    """One model, built for `Sizes.tokens`; `way` of its bias where that is forced.

    `quadratic`: makes a tensor of heads × n × n, so that it is left out where that would not fit or take too long;
    `trains`: whether it has a backward on the CPU.
    """

    name: str
    build: Callable[[Sizes], Any]
    way: Way | None = None
    quadratic: bool = False
    trains: bool = True

    def step(self, work: Callable[[Any, Sizes], Step], sizes: Sizes) -> Step:
        """The work on this model."""
        with bias_way(self.way):
            inner = work(self.build(sizes), sizes)

        def step() -> Any:
            with bias_way(self.way):
                return inner()

        return step


def flex(sizes: Sizes) -> Any:
    """ALiBi over FlexAttention."""
    model = llama(sizes)
    model.set_attn_implementation("flex_attention")
    return patched(model, "alibi")


def segments(sizes: Sizes) -> Any:
    """Four segments: up to an eighth of the work, a quarter, a half, the whole."""
    return patched(llama(sizes, trained=sizes.tokens // 8), "dynamic_yarn")


def yarn(sizes: Sizes) -> Any:
    """Static YaRN by the patch."""
    return patched(llama(sizes, trained=sizes.tokens // 8), "yarn", factor=8)


def yarn_stock(sizes: Sizes) -> Any:
    """The same in the config."""
    trained = sizes.tokens // 8
    return llama(sizes, yarn_parameters(trained, 8.0), trained)


LLAMA = (
    Side("stock", llama),
    Side("no positions, causal kernel", lambda s: patched(llama(s), "nope")),
    Side("yarn in the config", yarn_stock),
    Side("yarn", yarn),
    Side("dynamic_yarn", segments),
    Side("alibi", lambda s: patched(llama(s), "alibi")),
    Side("alibi, columns", lambda s: patched(llama(s), "alibi"), way="columns"),
    Side("alibi, dense mask", lambda s: patched(llama(s), "alibi"), way="dense", quadratic=True),
)
FLEX = Side("alibi, FlexAttention", flex, trains=False)
HOSTS: dict[str, tuple[Side, ...]] = {
    "llama": LLAMA,
    "gpt2": (Side("stock", gpt2), Side("rope", lambda s: patched(gpt2(s), "rope"))),
    "bloom": (Side("stock", bloom, quadratic=True), Side("alibi", lambda s: patched(bloom(s), "alibi"))),
    "mpt": (Side("stock", mpt, quadratic=True), Side("alibi", lambda s: patched(mpt(s), "alibi"))),
}


@contextmanager
def compiled_flex() -> Iterator[None]:
    """FlexAttention compiles each shape anew: with room for all that are measured."""
    import torch

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 64
    try:
        yield
    finally:
        torch._dynamo.config.recompile_limit = limit
