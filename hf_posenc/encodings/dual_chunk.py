"""Dual Chunk Attention: positions that start anew in every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .base import Geometry, at_least
from .distance import Distance, View, usual


@dataclass(frozen=True, kw_only=True)
class DualChunk(Distance):
    """Dual Chunk Attention (An et al. 2024, 2402.17463, 3.2): no distance above `chunk_size`, at any length.

    Positions fall into chunks of c = `chunk_size` - `local_size` tokens (3/4 and 1/8 of the trained length L where they
    are left out); keys are turned by j mod c, and queries by i mod c for keys of their own chunk,
    min(i mod c + c, chunk_size) for those of the one before, min(2c - 1, chunk_size) for all earlier ones: the paper's
    chunk is c, its pretraining window chunk_size + 1. Inside the first c tokens it is plain RoPE.

    Queries from position L on are multiplied by a², a = 0.1·`mscale`·ln(n/L) + 1, n the tokens up to the query: the
    temperature of Qwen2.5-1M (2501.15383, 3.1), which its server takes from the whole call. `mscale=0` leaves it out.
    """

    name: ClassVar[str] = "dual_chunk"
    causal_only: ClassVar[bool] = True
    chunk_size: int | None = None
    local_size: int | None = None
    mscale: float = 1.0

    def check(self) -> None:
        super().check()
        self.require(at_least(self.chunk_size, 2), "chunk_size", "a number of tokens >= 2")
        self.require(at_least(self.local_size, 0), "local_size", "a number of tokens >= 0")
        self.require(at_least(self.mscale, 0), "mscale", "a number >= 0")

    def resolve(self, geometry: Geometry) -> Self:
        done = super().resolve(geometry)
        size = max(usual(done.chunk_size, done.length, 0.75), 2)
        local = min(usual(None, done.length, 0.125), size - 1) if done.local_size is None else done.local_size
        done = done.but(chunk_size=size, local_size=local)
        done.require(size <= done.length, "chunk_size", f"at most the trained length, {done.length}")
        done.require(done.chunk > 0, "local_size", f"fewer tokens than chunk_size={size}")
        return done

    @property
    def largest(self) -> int:
        """The greatest distance, of a resolved encoding."""
        assert self.chunk_size is not None, "resolve() first"
        return self.chunk_size

    @property
    def chunk(self) -> int:
        """c of a resolved encoding."""
        assert self.local_size is not None, "resolve() first"
        return self.largest - self.local_size

    def border(self) -> int:
        return self.chunk

    def place(self, positions: Tensor) -> Tensor:
        return positions // self.chunk

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        c, most = self.chunk, self.largest

        def within(positions: Tensor) -> Tensor:
            return positions % c

        return (
            View(within, within, high=1),
            View(lambda i: (i % c + c).clamp(max=most), within, 1, 2),
            View(lambda i: torch.full_like(i, min(2 * c - 1, most)), within, 2),
        )

    def query_factor(self, positions: Tensor) -> Tensor | None:
        beyond = ((positions + 1) / self.length).clamp(min=1)
        return (0.1 * self.mscale * beyond.log() + 1) ** 2
