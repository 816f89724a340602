"""Encodings that add a vector to the token's embedding, or nothing at all: sinusoidal, learned, nope."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Encoding, Geometry, Seam, above, at_least
from .log_scaled import LogScaledAlone

Layout = Literal["interleaved", "concat"]
Resize = Literal["interpolate", "cubic", "group", "repeat", "hierarchical"]


def sinusoid(positions: Tensor, dim: int, *, base: float = 10_000.0, layout: Layout = "interleaved") -> Tensor:
    """Sinusoidal vectors of `positions` (any shape, tokens), shape (*positions, dim), float32.

    interleaved: PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos(same) (Vaswani et al. 2017, 1706.03762, 3.5).
    concat: all sines, then all cosines, with p / base^(i/(d/2 - 1)), as tensor2tensor and fairseq have it: their last
    wavelength is exactly 2π·base.
    """
    pairs = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    exponent = 2 * pairs / dim if layout == "interleaved" else pairs / max(dim // 2 - 1, 1)
    angles = positions[..., None].double() * base**-exponent
    both = torch.stack((angles.sin(), angles.cos()), dim=-1 if layout == "interleaved" else -2)
    return both.flatten(-2).float()


def resize_table(table: Tensor, rule: Resize, new_length: int, *, factor: float, alpha: float = 0.4) -> Tensor:
    """A table (L, dim) of trained positions stretched to (new_length, dim), computed in float32.

    interpolate E'(p) = lerp(E, p/s); cubic: Keys' convolution (1981), a = -1/2, at p/s; group E[⌊p/s⌋]; repeat
    E[p mod L]; hierarchical (Su 2020): u_i = (p_i - α p_0)/(1 - α), E'(i·L + j) = α u_i + (1 - α) u_j. All but
    interpolate and cubic (at s > 1) reproduce trained rows exactly; hierarchical and repeat keep the first L in place.
    """
    rows = table.detach().float()
    p = torch.arange(new_length, device=table.device)
    last = len(rows) - 1
    if rule == "repeat":
        new = rows[p % len(rows)]
    elif rule == "group":
        new = rows[(p.double() / factor).floor().long().clamp(max=last)]
    elif rule == "hierarchical":
        base = (rows - alpha * rows[:1]) / (1 - alpha)
        new = alpha * base[p // len(rows)] + (1 - alpha) * base[p % len(rows)]
    else:
        at = p.double() / factor
        whole, t = at.floor().long(), (at - at.floor()).float()[:, None]
        weights = (1 - t, t) if rule == "interpolate" else keys_weights(t)
        offsets = (0, 1) if rule == "interpolate" else (-1, 0, 1, 2)
        new = sum((w * rows[(whole + o).clamp(0, last)] for w, o in zip(weights, offsets)), torch.zeros(()))
    return new.to(table.dtype)


def keys_weights(t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the rows at -1, 0, 1, 2 around a point t in [0, 1): cubic convolution, a = -1/2. Keys 1981, eq. 15."""
    return (
        ((-t + 2) * t - 1) * t / 2,
        ((3 * t - 5) * t * t + 2) / 2,
        ((-3 * t + 4) * t + 1) * t / 2,
        (t - 1) * t * t / 2,
    )


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Encoding):
    """Fixed sines and cosines of the position, times `scale`, added to the embedding (Vaswani et al. 2017, 1706.03762).

    `scale`: a number, or "auto": the root mean square of the host's embeddings over the sinusoid's, which is 1/sqrt(2).
    """

    name: ClassVar[str] = "sinusoidal"
    seam: ClassVar[Seam] = "embedding"
    base: float = 10_000.0
    layout: Layout = "interleaved"
    scale: float | Literal["auto"] = "auto"

    def check(self) -> None:
        self.require(above(self.base, 1), "base", "a number above 1")
        if not isinstance(self.scale, str):
            self.require(above(self.scale, 0), "scale", '"auto" or a number above 0')

    def resolve(self, geometry: Geometry) -> Sinusoidal:
        if geometry.hidden_size % 2:
            raise OptionError(
                f"sinusoidal: sines and cosines come in pairs, and the width {geometry.hidden_size} is odd"
            )
        return self.but(scale=auto_scale(geometry)) if self.scale == "auto" else self

    def vectors(self, positions: Tensor, dim: int) -> Tensor:
        """What is added at `positions` (any shape, tokens): (*positions, dim), float32."""
        assert not isinstance(self.scale, str), "resolve() first"
        return sinusoid(positions, dim, base=self.base, layout=self.layout) * self.scale


def auto_scale(geometry: Geometry) -> float:
    """The factor that gives a sinusoid (rms 1/sqrt 2) the root mean square of the host's embeddings."""
    return geometry.embedding_rms() * math.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class Learned(Encoding):
    """A trained vector a position (Gehring et al. 2017, 1705.03122; GPT-2), three ways:

    the host's own table (no options); the host's table made longer by `resize` and `factor` (see `resize_table`);
    or a fresh one of `max_position_embeddings` rows, which starts from the sinusoid at the embeddings' own scale and
    is to be trained. A table cannot answer for a position past its end.
    """

    name: ClassVar[str] = "learned"
    seam: ClassVar[Seam] = "embedding"
    max_position_embeddings: int | None = None
    resize: Resize | None = None
    factor: float | None = None
    alpha: float | None = None

    def check(self) -> None:
        self.require(at_least(self.max_position_embeddings, 1), "max_position_embeddings", "a length in tokens")
        self.require(at_least(self.factor, 1), "factor", "new length / old length, a finite number >= 1")
        self.require(
            self.alpha is None or (0 < self.alpha < 1 and self.alpha != 0.5),
            "alpha",
            "a number in (0, 1) other than 0.5",
        )
        self.require((self.resize is None) == (self.factor is None), "factor", "`resize` and `factor` together")
        self.require(self.alpha is None or self.resize == "hierarchical", "alpha", "it with resize='hierarchical' only")
        self.require(
            self.resize is None or self.max_position_embeddings is None,
            "max_position_embeddings",
            "either it (a fresh table) or `resize` with `factor` (the host's table, longer)",
        )

    def resized(self, table: Tensor) -> Tensor:
        """The host's table (L, dim) made ⌊L·factor⌋ rows long by the rule of `resize`."""
        assert self.resize is not None and self.factor is not None
        if self.resize == "hierarchical" and self.factor > len(table):
            raise OptionError(
                f"learned: hierarchical positions reach {len(table)}² tokens, factor {len(table)}; got {self.factor}"
            )
        new_length = int(len(table) * self.factor)
        return resize_table(table, self.resize, new_length, factor=self.factor, alpha=self.alpha or 0.4)

    def initial(self, geometry: Geometry) -> Tensor:
        """A fresh table (max_position_embeddings, hidden_size), float32: sinusoids at the embeddings' scale."""
        if self.max_position_embeddings is None:
            raise OptionError(
                "learned: a fresh table needs a length, and this host's config states none; "
                "give max_position_embeddings=…"
            )
        positions = torch.arange(self.max_position_embeddings)
        return sinusoid(positions, geometry.hidden_size) * auto_scale(geometry)


@dataclass(frozen=True, kw_only=True)
class Nope(LogScaledAlone):
    """No positions: a causal model must count from its mask alone (Haviv 2022, 2203.16634; Kazemnejad 2305.19466).

    With `logn` (see `LogScaled`) the length of its queries follows the position, and nothing else does.
    """

    name: ClassVar[str] = "nope"
    seam: ClassVar[Seam] = "none"
