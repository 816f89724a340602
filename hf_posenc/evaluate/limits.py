"""How far a model's positions go: where they end, and where its encoding's options aim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_posenc.encodings import Learned
from hf_posenc.errors import UnsupportedError
from hf_posenc.evaluate.perplexity import table_reach
from hf_posenc.modules import PositionTable
from hf_posenc.patching import get_encoding

UNLIMITED = 2**31 - 1
"""The limit of a model whose positions have no end: RoPE, ALiBi, none."""


def encoding_of(model: Any) -> Any:
    """The encoding in effect, None where there is none or the architecture has no patch."""
    try:
        return get_encoding(model)
    except UnsupportedError:
        return None


def past_aim(model: Any, lengths: Iterable[int]) -> list[str]:
    """A line where lengths lie past what a scaled rotation's options aim at: allowed, and said with the scores."""
    encoding = encoding_of(model)
    aim = encoding.reach() if hasattr(encoding, "reach") else None
    past = ", ".join(str(length) for length in lengths if aim is not None and length > aim)
    return [f"{encoding.name} aims at {aim} tokens: the scores at {past} are past that"] if past else []


def reach(model: nn.Module) -> int | None:
    """The number of tokens that the model's positions can express, or None where they have no end.

    A scaled RoPE aims at a length and goes on past it, only worse: that is to be measured, not refused. Tables end, and
    so does the bias that Transformers builds for MPT.
    """
    encoding = encoding_of(model)
    config: Any = model.config
    if encoding is None:
        return int(config.max_seq_len) if config.model_type == "mpt" else table_reach(model)
    if not isinstance(encoding, Learned):
        return None
    fresh = [len(module.weight) for module in model.modules() if isinstance(module, PositionTable)]
    return fresh[0] if fresh else table_reach(model)
