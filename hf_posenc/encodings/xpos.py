"""xPos: a rotation whose scores fall with distance, each pair of channels at a pace of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import above
from .distance import Distance, View, itself


@dataclass(frozen=True, kw_only=True)
class Xpos(Distance):
    """xPos: q·zeta_i^(n/B), k·zeta_i^(-n/B), zeta_i = (2i/d + gamma)/(1 + gamma) (Sun et al. 2022, 2212.10554, 3.2).

    Beside the rotation, a score falls with distance, that of slow pairs of channels least. B = `scale_base`, in
    tokens. For models that are trained with it; its inference by blocks (3.3) is not a part of this.
    """

    name: ClassVar[str] = "xpos"
    needs_length: ClassVar[bool] = False
    causal_only: ClassVar[bool] = True
    scale_base: float = 512.0
    gamma: float = 0.4

    def check(self) -> None:
        super().check()
        self.require(above(self.scale_base, 0), "scale_base", "a number of tokens above 0")
        self.require(above(self.gamma, 0), "gamma", "a number above 0")

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        return (View(itself, itself),)

    def decay(self, dim: int) -> Tensor:
        zeta = (torch.arange(0, dim, 2, dtype=torch.float64) / dim + self.gamma) / (1 + self.gamma)
        return (-zeta.log() / self.scale_base).float()
