"""Encodings that add a number to the attention score: alibi."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Encoding, Seam, at_least


def alibi_slopes(num_heads: int) -> Tensor:
    """m_h, shape (num_heads,), float32. Press et al. 2021 (2108.12409), section 3, and its released code.

    n heads, n a power of two: m_h = 2^(-8h/n), h = 1 … n. Otherwise the slopes of the largest power of two below n,
    then every other slope of twice that, from its first: 6 heads: .25 .0625 .015625 .00390625 .5 .125. Not sorted.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-8 * h / (2 * below)) for h in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Alibi(Encoding):
    """-m_h·(i - j) on the score of query i and key j, after the 1/sqrt(d) (Press et al. 2021, 2108.12409).

    `factor` divides the slopes (position interpolation for ALiBi: Al-Khateeb et al. 2023, 2310.13017). No parameters.
    """

    name: ClassVar[str] = "alibi"
    seam: ClassVar[Seam] = "score"
    factor: float = 1.0

    def check(self) -> None:
        self.require(at_least(self.factor, 1), "factor", "target length / pretrained length, a finite number >= 1")

    def slopes(self, num_heads: int) -> Tensor:
        """Slopes a query head, shape (num_heads,), in score units a token."""
        return alibi_slopes(num_heads) / self.factor
