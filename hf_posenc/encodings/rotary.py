"""Rotary encodings with one set of frequencies: rope, linear, ntk, ntk_mixed, ntk_by_parts, yarn, llama3, p_rope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from ..errors import OptionError
from . import frequencies
from .base import Geometry, Seam, above, at_least
from .log_scaled import LogScaled

Frequencies = tuple[Tensor, float]


@dataclass(frozen=True, kw_only=True)
class Rotation(LogScaled):
    """Q and K are turned by position × frequency before their dot product.

    Options every rotation takes: `rope_theta`, the base (default: the host's, or 1e4 on a host without RoPE), and
    `original_max_position_embeddings`, L, the length in tokens the model was pretrained on (default: the config's).
    Add-ons: `logn` (see `LogScaled`), and `resonance`, every wavelength 2π/omega rounded to whole tokens, so that a
    pair meets no angle that it has not met before (Wang et al. 2024, 2403.00071).

    A subclass says its `formula`; what everybody asks for is `inv_freq`, with the add-ons in it.
    """

    seam: ClassVar[Seam] = "rotation"
    needs_length: ClassVar[bool] = True
    default_theta: ClassVar[float] = 10_000.0

    rope_theta: float | None = None
    resonance: bool = False

    @property
    def turns_late(self) -> bool:
        """Whether queries and keys come to the attention function unturned, and are turned in there."""
        return False

    @property
    def inside_attention(self) -> bool:
        return self.turns_late or self.logn

    def check(self) -> None:
        super().check()
        self.require(above(self.rope_theta, 1), "rope_theta", "a base above 1")
        plain = type(self).inv_freq is Rotation.inv_freq
        self.require(plain or not self.resonance, "resonance", "it to a class that overrides `formula`, not `inv_freq`")

    def resolve(self, geometry: Geometry) -> Self:
        if geometry.rotary_dim % 2 or geometry.rotary_dim < 4:
            raise OptionError(
                f"{self.name}: rotations turn pairs of channels, and this host's heads are {geometry.rotary_dim} wide; "
                "an even width of at least 4 is needed"
            )
        theta = self.rope_theta or geometry.rope_theta or self.default_theta
        return self.with_length(geometry, needed=self.needs_length or self.logn).but(rope_theta=theta)

    @property
    def theta(self) -> float:
        """The base of a resolved encoding."""
        assert self.rope_theta is not None, "resolve() first"
        return float(self.rope_theta)

    def formula(self, dim: int) -> Frequencies:
        """Frequencies (d/2,) in radians a token, float32, and the factor on cos and sin; of a resolved encoding."""
        raise NotImplementedError

    def inv_freq(self, dim: int) -> Frequencies:
        """The `formula` with the add-ons: what queries and keys are turned by."""
        return self.rounded(*self.formula(dim))

    def rounded(self, inv_freq: Tensor, scaling: float) -> Frequencies:
        """The same, of whole wavelengths where `resonance` asks for it."""
        return (frequencies.whole_wavelengths(inv_freq) if self.resonance else inv_freq), scaling

    def reach(self) -> int | None:
        """The length in tokens that the options aim at, or None where they aim at none in particular."""
        return None


@dataclass(frozen=True, kw_only=True)
class Rope(Rotation):
    """Plain RoPE: omega_i = theta^(-2i/d) (Su et al. 2021, RoFormer, 2104.09864)."""

    name: ClassVar[str] = "rope"
    needs_length: ClassVar[bool] = False

    def formula(self, dim: int) -> Frequencies:
        return frequencies.rope(dim, self.theta), 1.0


@dataclass(frozen=True, kw_only=True)
class ScaledRotation(Rotation):
    """A rotation stretched by `factor` = target length / pretrained length, at least 1."""

    factor: float

    def check(self) -> None:
        super().check()
        self.require(at_least(self.factor, 1), "factor", "target length / pretrained length, a finite number >= 1")

    def reach(self) -> int | None:
        length = self.original_max_position_embeddings
        return None if length is None else int(length * self.factor)


@dataclass(frozen=True, kw_only=True)
class Linear(ScaledRotation):
    """Position interpolation: omega_i / s (Chen et al. 2023, 2306.15595; kaiokendev 2023)."""

    name: ClassVar[str] = "linear"
    needs_length: ClassVar[bool] = False

    def formula(self, dim: int) -> Frequencies:
        return frequencies.rope(dim, self.theta) / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class Ntk(ScaledRotation):
    """NTK-aware scaling: plain RoPE with theta' = theta·s^(d/(d-2)) (bloc97 2023; YaRN 2309.00071, 3.1)."""

    name: ClassVar[str] = "ntk"
    needs_length: ClassVar[bool] = False

    def scaled_theta(self, dim: int) -> float:
        """theta', a base like any other: s = 4, d = 128, theta = 1e4 gives 40889.9."""
        return frequencies.ntk_theta(dim, self.theta, self.factor)

    def formula(self, dim: int) -> Frequencies:
        return frequencies.rope(dim, self.scaled_theta(dim)), 1.0


@dataclass(frozen=True, kw_only=True)
class NtkMixed(ScaledRotation):
    """NTK with a base of its own for each pair: omega_m·exp(-a·m^b), m = 1 … d/2, a = ln s/(d/2)^b, b = `exponent`.

    The lowest frequency is divided by s exactly, the highest by exp(a). b = 0 is `linear`. Su 2023, kexue.fm/archives/
    9706 (mixed-base positions); b = 0.75 in the author's released code (github.com/bojone/rerope).
    """

    name: ClassVar[str] = "ntk_mixed"
    needs_length: ClassVar[bool] = False
    exponent: float = 0.75

    def check(self) -> None:
        super().check()
        self.require(0 <= self.exponent <= 1, "exponent", "a number from 0 to 1")

    def formula(self, dim: int) -> Frequencies:
        return frequencies.mixed(dim, self.theta, self.factor, self.exponent), 1.0


@dataclass(frozen=True, kw_only=True)
class NtkByParts(ScaledRotation):
    """YaRN's frequencies without its temperature (Peng et al. 2023, 2309.00071, 3.2).

    Pairs that turn more than `beta_fast` times within L are kept, those that turn less than `beta_slow` times are
    interpolated, with a ramp between; `truncate` rounds the ramp's ends outwards to whole pairs.
    """

    name: ClassVar[str] = "ntk_by_parts"
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    def check(self) -> None:
        super().check()
        self.require(above(self.beta_slow, 0), "beta_slow", "a number of rotations above 0")
        self.require(
            above(self.beta_fast, self.beta_slow), "beta_fast", f"more rotations than beta_slow={self.beta_slow}"
        )

    def formula(self, dim: int) -> Frequencies:
        return self.ramped(dim, self.factor), 1.0

    def ramped(self, dim: int, factor: float) -> Tensor:
        """The ramp between kept and interpolated frequencies for some `factor`, shape (d/2,)."""
        return frequencies.by_parts(dim, self.theta, factor, self.length, self.beta_fast, self.beta_slow, self.truncate)


@dataclass(frozen=True, kw_only=True)
class Yarn(NtkByParts):
    """YaRN: frequencies by parts; cos and sin × a = 0.1 ln s + 1, or `attention_factor` (Peng 2023, 2309.00071)."""

    name: ClassVar[str] = "yarn"
    attention_factor: float | None = None

    def check(self) -> None:
        super().check()
        self.require(above(self.attention_factor, 0), "attention_factor", "the factor on cos and sin, above 0")

    def formula(self, dim: int) -> Frequencies:
        a = frequencies.yarn_temperature(self.factor) if self.attention_factor is None else self.attention_factor
        return self.ramped(dim, self.factor), float(a)


@dataclass(frozen=True, kw_only=True)
class Llama3(ScaledRotation):
    """Llama 3.1's wavelength-dependent scaling (The Llama 3 Herd of Models, 2407.21783)."""

    name: ClassVar[str] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def check(self) -> None:
        super().check()
        self.require(above(self.low_freq_factor, 0), "low_freq_factor", "a number above 0")
        self.require(
            above(self.high_freq_factor, self.low_freq_factor),
            "high_freq_factor",
            f"a number above low_freq_factor={self.low_freq_factor}",
        )

    def formula(self, dim: int) -> Frequencies:
        inv_freq = frequencies.llama3(
            dim, self.theta, self.factor, self.length, self.low_freq_factor, self.high_freq_factor
        )
        return inv_freq, 1.0


@dataclass(frozen=True, kw_only=True)
class PRope(Rotation):
    """p-RoPE: only the fastest ⌊p·d/2⌋ pairs turn, the others tell no position (Barbero et al. 2024, 2410.06205, 6).

    A model learns to use the slowest pairs for meaning, which far positions would then blur. p = 1 is RoPE, p = 0 would
    be NoPE; p = 0.75 had the best perplexity there.
    """

    name: ClassVar[str] = "p_rope"
    needs_length: ClassVar[bool] = False
    p: float = 0.75

    def check(self) -> None:
        super().check()
        self.require(0 < self.p <= 1, "p", "the share of pairs that turn, above 0 and at most 1 ('nope' is 0)")

    def resolve(self, geometry: Geometry) -> Self:
        pairs = geometry.rotary_dim // 2
        if self.turning(geometry.rotary_dim) < 1:
            raise OptionError(f"p_rope: p={self.p} of {pairs} pairs is none at all; give {1 / pairs:.3g} or more")
        return super().resolve(geometry)

    def turning(self, dim: int) -> int:
        """⌊p·d/2⌋, the number of pairs that turn."""
        return int(self.p * dim / 2 + 1e-9)  # 0.29 of 100 pairs is 28.999999999999996 in binary

    def formula(self, dim: int) -> Frequencies:
        inv_freq = frequencies.rope(dim, self.theta)
        inv_freq[self.turning(dim) :] = 0
        return inv_freq, 1.0
