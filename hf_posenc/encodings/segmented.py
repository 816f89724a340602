"""Rotary encodings whose frequencies follow the length, made causal by segments: dynamic_ntk, dynamic_yarn, longrope.

The query at position t turns itself and every key it sees with the frequencies of t's own segment. The output at t
is then a function of the tokens up to t alone: the same with a cache as without, whatever the batch or the chunks.
Segments end at L, 2L, 4L, … (longrope: short below L, long from L on); below L the model is the plain one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import OptionError
from . import frequencies
from .base import Geometry, above, at_least
from .rotary import Frequencies, Rotation

Schedule = Literal["segments", "whole"]


@dataclass(frozen=True, kw_only=True)
class Segmented(Rotation):
    """A rotation whose frequencies depend on the segment of the query.

    `schedule="whole"` is the host library's own type, for checkpoints trained with it: one set of frequencies for a
    whole call, chosen by its longest row. Cached and uncached calls then differ, and a row depends on its batch.
    """

    causal_only: ClassVar[bool] = True

    schedule: Schedule = "segments"

    @property
    def turns_late(self) -> bool:
        return self.schedule == "segments"

    def check(self) -> None:
        super().check()
        plain = type(self).segment_inv_freq is Segmented.segment_inv_freq
        ok = not self.resonance or (plain and self.schedule == "segments")
        self.require(ok, "resonance", "it with schedule='segments', to a class that overrides `segment_formula`")

    @property
    def borders(self) -> tuple[int, ...]:
        """The first position (tokens) of each segment from 1 on: L, 2L, 4L, …"""
        return tuple(self.length << k for k in range(40) if self.length << k < 2**62)

    def segment(self, positions: Tensor) -> Tensor:
        """The segment number of each position (tokens), same shape: 0 below L, k from the k-th border on."""
        borders = torch.tensor(self.borders, device=positions.device)
        return torch.bucketize(positions.contiguous(), borders, right=True)

    def segment_of(self, position: int) -> int:
        """`segment` of one position, for a step with a cache, where each call on tensors counts."""
        return bisect_right(self.borders, position)

    def segment_formula(self, dim: int, segment: int) -> Frequencies:
        """Frequencies (d/2,) and cos/sin factor of one segment."""
        raise NotImplementedError

    def segment_inv_freq(self, dim: int, segment: int) -> Frequencies:
        """The `segment_formula` with the add-ons."""
        return self.rounded(*self.segment_formula(dim, segment))

    def formula(self, dim: int) -> Frequencies:
        """That of segment 0."""
        return self.segment_formula(dim, 0)

    def plain_inv_freq(self, dim: int) -> Frequencies:
        """Those of plain RoPE, which keys are cached with."""
        return frequencies.rope(dim, self.theta), 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(Segmented):
    """NTK scaling that follows the length: in a segment ending at n, theta' = theta·(s·n/L - (s-1))^(d/(d-2)).

    emozilla 2023; YaRN (2309.00071), 3.3. Plain RoPE below L.
    """

    name: ClassVar[str] = "dynamic_ntk"
    factor: float = 1.0

    def check(self) -> None:
        super().check()
        self.require(at_least(self.factor, 1), "factor", "a finite number >= 1")

    def segment_formula(self, dim: int, segment: int) -> Frequencies:
        if segment == 0:
            return frequencies.rope(dim, self.theta), 1.0
        scale = frequencies.dynamic_scale(self.factor, 2.0**segment)
        return frequencies.rope(dim, frequencies.ntk_theta(dim, self.theta, scale)), 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicYarn(Segmented):
    """YaRN with s = n/L of the segment that ends at n; plain RoPE below L; there is no factor to choose.

    Peng et al. 2023 (2309.00071), 3.3 "dynamic scaling", made causal by segments.
    """

    name: ClassVar[str] = "dynamic_yarn"
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    def check(self) -> None:
        super().check()
        self.require(above(self.beta_slow, 0), "beta_slow", "a number of rotations above 0")
        self.require(
            above(self.beta_fast, self.beta_slow), "beta_fast", f"more rotations than beta_slow={self.beta_slow}"
        )
        self.require(self.schedule == "segments", "schedule", "'segments': Transformers has no whole-call dynamic YaRN")

    def segment_formula(self, dim: int, segment: int) -> Frequencies:
        if segment == 0:
            return frequencies.rope(dim, self.theta), 1.0
        factor = 2.0**segment
        inv_freq = frequencies.by_parts(
            dim, self.theta, factor, self.length, self.beta_fast, self.beta_slow, self.truncate
        )
        return inv_freq, frequencies.yarn_temperature(factor)


@dataclass(frozen=True, kw_only=True)
class LongRope(Segmented):
    """LongRoPE: omega_i / lambda_i, `short_factor` for t < L, `long_factor` from L on (Ding et al. 2024, 2402.13753).

    cos and sin × sqrt(1 + ln s / ln L) in both, s = `factor`, or × `attention_factor` where that is given.
    """

    name: ClassVar[str] = "longrope"
    factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float | None = None

    def check(self) -> None:
        super().check()
        self.require(at_least(self.factor, 1), "factor", "target length / pretrained length, a finite number >= 1")
        self.require(above(self.attention_factor, 0), "attention_factor", "the factor on cos and sin, above 0")
        for option in ("short_factor", "long_factor"):
            values = getattr(self, option)
            self.require(all(above(v, 0) for v in values), option, "a list of finite numbers above 0")

    def resolve(self, geometry: Geometry) -> LongRope:
        for option in ("short_factor", "long_factor"):
            given, needed = len(getattr(self, option)), geometry.rotary_dim // 2
            if given != needed:
                raise OptionError(
                    f"longrope: {option} has {given} numbers; this host needs {needed}, one a pair of channels"
                )
        return super().resolve(geometry)

    @property
    def borders(self) -> tuple[int, ...]:
        return (self.length,)

    def segment_formula(self, dim: int, segment: int) -> Frequencies:
        rescale = self.long_factor if segment else self.short_factor
        a = self.attention_factor
        a = frequencies.longrope_temperature(self.factor, self.length) if a is None else a
        return frequencies.longrope(dim, self.theta, rescale), float(a)

    def reach(self) -> int | None:
        length = self.original_max_position_embeddings
        return None if length is None else int(length * self.factor)
