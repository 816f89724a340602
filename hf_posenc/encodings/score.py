"""Encodings that add a number to the attention score: alibi."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Geometry, Seam, above, at_least
from .log_scaled import LogScaledAlone

BIAS_MAX = 8.0


def alibi_slopes(num_heads: int, bias_max: float = BIAS_MAX) -> Tensor:
    """m_h, shape (num_heads,), float32. Press et al. 2021 (2108.12409), section 3, and its released code.

    n heads, n a power of two: m_h = 2^(-8h/n), h = 1 … n. Otherwise the slopes of the largest power of two below n,
    then every other slope of twice that, from its first: 6 heads: .25 .0625 .015625 .00390625 .5 .125. Not sorted.
    `bias_max` stands in the place of that 8: the flattest slope is 2^-bias_max.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-bias_max * h / (2 * below)) for h in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Alibi(LogScaledAlone):
    """-m_h·(i - j) on the score of query i and key j, after the 1/sqrt(d) (Press et al. 2021, 2108.12409).

    `factor` divides the slopes (position interpolation for ALiBi: Al-Khateeb et al. 2023, 2310.13017). No parameters.
    On a host that was trained with ALiBi the slopes are that host's own: `alibi_bias_max`, the 8 of m_h = 2^(-8h/n),
    and `scale`, what they are multiplied with (1/sqrt(d) where the host divides the scores after it has added them).
    `logn` (see `LogScaled`) scales the query and not the bias.
    """

    name: ClassVar[str] = "alibi"
    seam: ClassVar[Seam] = "score"
    factor: float = 1.0
    alibi_bias_max: float | None = None
    scale: float | None = None

    def check(self) -> None:
        super().check()
        self.require(at_least(self.factor, 1), "factor", "target length / pretrained length, a finite number >= 1")
        self.require(above(self.alibi_bias_max, 0), "alibi_bias_max", "the exponent of the flattest slope, above 0")
        self.require(above(self.scale, 0), "scale", "what the slopes are multiplied with, a number above 0")

    def resolve(self, geometry: Geometry) -> Alibi:
        bias_max, scale = geometry.alibi_bias_max, geometry.alibi_scale
        return (
            super()
            .resolve(geometry)
            .but(
                alibi_bias_max=bias_max if self.alibi_bias_max is None else self.alibi_bias_max,
                scale=scale if self.scale is None else self.scale,
            )
        )

    def slopes(self, num_heads: int) -> Tensor:
        """Slopes a query head, shape (num_heads,), in score units a token."""
        slopes = alibi_slopes(num_heads, BIAS_MAX if self.alibi_bias_max is None else self.alibi_bias_max)
        return slopes / self.factor * (1.0 if self.scale is None else self.scale)
