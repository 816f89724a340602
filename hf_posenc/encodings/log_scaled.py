"""Log-n scaling, an add-on: far queries are made longer, so that attention over many tokens stays as sharp."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Encoding, Geometry, at_least


@dataclass(frozen=True, kw_only=True)
class LogScaled(Encoding):
    """Base of encodings that know the trained length L, and can scale the query of the n-th token by it.

    `logn=True`: q · max(1, ln n / ln L), n = position + 1 in tokens (Su 2021, kexue.fm/archives/8823; Chiang and Cholak
    2022, 2202.12172). Up to L it is the plain model. It holds for what fades with the number of keys, whatever turns
    them: rotations, ALiBi, no positions. `original_max_position_embeddings`: L (default: the config's).
    """

    original_max_position_embeddings: int | None = None
    logn: bool = False

    @property
    def inside_attention(self) -> bool:
        return self.logn or super().inside_attention

    @property
    def length(self) -> int:
        """L of a resolved encoding, in tokens."""
        assert self.original_max_position_embeddings is not None, "resolve() first"
        return self.original_max_position_embeddings

    def check(self) -> None:
        super().check()
        self.require(
            at_least(self.original_max_position_embeddings, 2),
            "original_max_position_embeddings",
            "a length of at least 2 tokens",
        )

    def with_length(self, geometry: Geometry, needed: bool) -> Self:
        """The same with L from the host; raises `OptionError` where it is `needed` and the host states none."""
        length = self.original_max_position_embeddings or geometry.max_position_embeddings
        if length is None and needed:
            raise OptionError(
                f"{self.name} needs the length the model was pretrained on, and this host's config states none; "
                "give original_max_position_embeddings=…"
            )
        return self.but(original_max_position_embeddings=length)

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """What the queries at `positions` (tokens, any shape) are multiplied with, float32, or None for nothing."""
        if not self.logn:
            return None
        n = positions + 1
        return torch.where(n > self.length, n.clamp(min=1).float().log() / math.log(self.length), 1.0)


@dataclass(frozen=True, kw_only=True)
class LogScaledAlone(LogScaled):
    """Base of those whose own formula has no L: it is asked for, and written down, with `logn` alone."""

    def check(self) -> None:
        super().check()
        self.require(
            self.logn or self.original_max_position_embeddings is None,
            "original_max_position_embeddings",
            "it with logn=True, which alone asks for it",
        )

    def resolve(self, geometry: Geometry) -> Self:
        return self.with_length(geometry, needed=True) if self.logn else self
