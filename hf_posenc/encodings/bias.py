"""Encodings that add a curve of the distance to the attention score: t5_bias, kerple, fire, sandwich.

Each has a module that gives its numbers, and owns its parameters where it is trained. A model has one such module,
shared by all of its layers, as T5 shares its own; the numbers are added after the host's scale, 1/sqrt(d) on most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .base import Encoding, Seam, at_least
from .score import alibi_slopes

LEAST = 1e-2  # of a parameter of KERPLE's, as in its released code
MOST_POWER = 2.0  # beyond it the power is no longer a kernel (2205.09921, theorem 1 and table 1)
STEP = 1e-6  # of FIRE's normaliser: no distance is divided by zero
WIDTH = 32  # FIRE's hidden units
MOST_DISTANCE = 2**20  # of T5's last bucket, in tokens
CHUNK = 2**14  # pairs of positions at a time, so that the hidden units of all stay in a CPU's cache: 15 times faster


class ScoreBias(nn.Module):
    """What an encoding adds to the scores, in at least float32 whatever the dtype of the parameters."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions (batch or 1, n) and (batch or 1, keys) in tokens → (batch or 1, heads, n, keys)."""
        return self.curve(queries[..., None] - keys[:, None]).transpose(0, 1)

    def curve(self, distance: Tensor) -> Tensor:
        """The numbers at whole distances i - j, of any shape: (heads, *shape); negative ones lie ahead of a query."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Bias(Encoding):
    """A number a head on the score of query i and key j. Base class: write `module(num_heads, both_ways)`.

    `trained`: whether its module has parameters. `by_distance`: whether i - j alone tells the number, and the absolute
    position of the query is not asked.
    """

    seam: ClassVar[Seam] = "score"
    trained: ClassVar[bool] = True
    by_distance: ClassVar[bool] = True

    def module(self, num_heads: int, both_ways: bool = False) -> ScoreBias:
        """A fresh module, on the CPU in float32, the same each time and without drawing from the global generator.

        `both_ways`: whether queries see later keys, as in an encoder.
        """
        raise NotImplementedError


# --- T5 --------------------------------------------------------------------------------------------------------------


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """The bucket of distances i - j: exact up to half of the buckets, then logarithmic up to `max_distance`.

    Where queries see later keys, these have the second half of the buckets for themselves. Raffel et al. 2019
    (1910.10683), section 2.1, and its released code.
    """
    first = torch.zeros_like(distance)
    if both_ways:
        num_buckets //= 2
        first = (distance < 0).long() * num_buckets
        distance = distance.abs()
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    share = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (share.clamp(min=0) * (num_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


class T5Table(ScoreBias):
    """b_h[bucket(i - j)], weight (num_buckets, heads)."""

    def __init__(self, weight: Tensor, max_distance: int, both_ways: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.max_distance, self.both_ways = max_distance, both_ways

    def curve(self, distance: Tensor) -> Tensor:
        bucket = t5_bucket(distance, len(self.weight), self.max_distance, self.both_ways)
        return at_least_float32(self.weight)[bucket].movedim(-1, 0)


@dataclass(frozen=True, kw_only=True)
class T5Bias(Bias):
    """b_h[bucket(i - j)] on the score, a trained number a bucket and head (Raffel et al. 2019, 1910.10683, 2.1).

    Starts from ALiBi's -m_h·d, d being the nearest distance of each bucket: a tuned model has an order from the first
    step on, and one that does not grow beyond `max_distance`. T5 itself adds it to scores without 1/sqrt(d).
    """

    name: ClassVar[str] = "t5_bias"
    num_buckets: int = 32
    max_distance: int = 128

    def check(self) -> None:
        even = self.num_buckets >= 4 and self.num_buckets % 4 == 0
        self.require(even and self.num_buckets <= 4096, "num_buckets", "a multiple of 4, up to 4096")
        far = self.num_buckets // 2 < self.max_distance <= MOST_DISTANCE
        self.require(far, "max_distance", f"a distance in tokens beyond half of num_buckets, up to {MOST_DISTANCE}")

    def module(self, num_heads: int, both_ways: bool = False) -> T5Table:
        reach = torch.arange(self.max_distance + 1, device="cpu")
        one_way = self.num_buckets // 2 if both_ways else self.num_buckets
        buckets = t5_bucket(reach, one_way, self.max_distance, False)
        nearest = torch.searchsorted(buckets, torch.arange(one_way, device="cpu"))  # buckets rise with the distance
        weight = -nearest[:, None].float() * cpu_slopes(num_heads)
        return T5Table(torch.cat((weight, weight)) if both_ways else weight, self.max_distance, both_ways)


# --- KERPLE ----------------------------------------------------------------------------------------------------------


class KerpleCurve(ScoreBias):
    """-p_h·ln(1 + a_h·|i - j|), or -a_h·|i - j|^p_h; `a` and `p` (heads,), clamped from below in use."""

    def __init__(self, a: Tensor, p: Tensor, power: bool) -> None:
        super().__init__()
        self.a, self.p, self.power = nn.Parameter(a), nn.Parameter(p), power

    def curve(self, distance: Tensor) -> Tensor:
        shape = (-1, *[1] * distance.ndim)
        a = bounded(self.a).reshape(shape)
        p = bounded(self.p, MOST_POWER if self.power else None).reshape(shape)
        far = distance.abs().to(a.dtype)
        if not self.power:
            return -p * (a * far).log1p()
        # 0^p is 0, and its slope in p is 0 too, where autograd would multiply by ln 0
        return torch.where(far > 0, -a * far.clamp(min=1) ** p, torch.zeros_like(a))


@dataclass(frozen=True, kw_only=True)
class Kerple(Bias):
    """A conditionally positive definite kernel of |i - j| on the score (Chi et al. 2022, 2205.09921, equation 3).

    variant "log": -p_h·ln(1 + a_h·|i - j|); "power": -a_h·|i - j|^p_h, 0 < p <= 2. Trained a head: p starts from
    U[0, 2] and a from U[0, 1], as in the released code, drawn with `seed`; both are held at 0.01 at least.
    """

    name: ClassVar[str] = "kerple"
    variant: Literal["log", "power"] = "log"
    seed: int = 0

    def check(self) -> None:
        self.require(0 <= self.seed < 2**31, "seed", "a whole number from 0 to 2^31 - 1")

    def module(self, num_heads: int, both_ways: bool = False) -> KerpleCurve:
        generator = torch.Generator().manual_seed(self.seed)
        p, a = torch.rand(2, num_heads, generator=generator, device="cpu")
        return KerpleCurve(a.clamp(min=LEAST), (2 * p).clamp(min=LEAST), self.variant == "power")


# --- FIRE ------------------------------------------------------------------------------------------------------------


class FireNetwork(ScoreBias):
    """f(psi(|i - j|) / psi(max(T, i, j))), f: 1 → 32 → heads with ReLU, psi(x) = ln(|c·x| + 1), T = |m|·`length`.

    Bare parameters and no `nn.Linear`, which LoRA's "all-linear" would wrap.
    """

    def __init__(self, num_heads: int, length: float, c: float, generator: torch.Generator) -> None:
        super().__init__()

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*shape, generator=generator, device="cpu") - 1) * bound)

        self.hidden_weight, self.hidden_bias = uniform(1.0, WIDTH), uniform(1.0, WIDTH)
        self.weight, self.bias = uniform(WIDTH**-0.5, num_heads, WIDTH), uniform(WIDTH**-0.5, num_heads)
        self.c, self.m = (nn.Parameter(torch.tensor([value], device="cpu")) for value in (c, 1.0))
        self.length = length

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        x = self.ratio(queries[..., None], keys[:, None])
        whole = x.device.type != "cpu" or torch.compiler.is_compiling()
        parts = x.flatten()[None].split(x.numel() if whole else CHUNK, dim=1)
        return torch.cat([self.network(part) for part in parts], dim=1).unflatten(-1, x.shape).transpose(0, 1)

    def network(self, x: Tensor) -> Tensor:
        """f of numbers (1, any), (heads, any)."""
        hidden_weight, hidden_bias, weight, bias = (
            at_least_float32(p)[..., None] for p in (self.hidden_weight, self.hidden_bias, self.weight, self.bias)
        )
        return torch.addmm(bias, weight[..., 0], torch.addmm(hidden_bias, hidden_weight, x).relu())

    def ratio(self, i: Tensor, j: Tensor) -> Tensor:
        """What enters the network: 0 for a token and itself, 1 for the furthest key from a query beyond T."""
        c, m = at_least_float32(self.c), at_least_float32(self.m)
        furthest = torch.maximum((m * self.length).abs(), torch.maximum(i, j).to(c.dtype))
        return (c * (i - j)).abs().log1p() / (c * furthest).abs().log1p().clamp(min=STEP)


@dataclass(frozen=True, kw_only=True)
class Fire(Bias):
    """A small network of the distance as a share of the query's position (Li et al. 2023, 2310.04418, section 3).

    b(i, j) = f(psi(i - j) / psi(max(T, i))), psi(x) = ln(|c·x| + 1), T = |m·initial_length|; f, c and m are trained.
    `c` starts at `initial_c`, m at 1, and f as linear layers usually do, drawn with `seed`. Where queries see later
    keys the normaliser is the larger of both positions: the same for i >= j, and a ratio that stays within 0 and 1.
    """

    name: ClassVar[str] = "fire"
    by_distance: ClassVar[bool] = False
    initial_c: float = 0.1
    initial_length: float = 512.0
    seed: int = 0

    def check(self) -> None:
        self.require(at_least(self.initial_c, 1e-6), "initial_c", "a number of 1e-6 or more")
        self.require(at_least(self.initial_length, 1), "initial_length", "a length in tokens, at least 1")
        self.require(0 <= self.seed < 2**31, "seed", "a whole number from 0 to 2^31 - 1")

    def module(self, num_heads: int, both_ways: bool = False) -> FireNetwork:
        generator = torch.Generator().manual_seed(self.seed)
        return FireNetwork(num_heads, float(self.initial_length), float(self.initial_c), generator)


# --- Sandwich --------------------------------------------------------------------------------------------------------


class SandwichCurve(ScoreBias):
    """The product of two sinusoidal vectors as a function of their distance; no parameters."""

    def __init__(self, num_heads: int, bar_d: int) -> None:
        super().__init__()
        self.num_heads, self.bar_d = num_heads, bar_d

    def curve(self, distance: Tensor) -> Tensor:
        far, total = distance.abs().double(), torch.zeros(distance.shape, dtype=torch.float64, device=distance.device)
        for k in range(1, self.bar_d // 2 + 1):  # one wave at a time: all at once would be 64 times as large
            total = total + (far / 10_000 ** (2 * k / self.bar_d)).cos() - 1
        h = torch.arange(1, self.num_heads + 1, device=distance.device, dtype=torch.float64)
        return (total / (8 * h / self.num_heads).reshape(-1, *[1] * distance.ndim)).float()


@dataclass(frozen=True, kw_only=True)
class Sandwich(Bias):
    """(sum over k = 1 … d/2 of cos((i - j) / 10000^(2k/d)) - d/2) / (8h/H), h = 1 … H, d = `bar_d`; no parameters.

    The position-only part of a dot product of sinusoidal embeddings, with a compression ratio a head (Chi et al. 2022,
    2212.10356, section 5). Softmax ignores the -d/2: it makes a token's number for itself 0.
    """

    name: ClassVar[str] = "sandwich"
    trained: ClassVar[bool] = False
    bar_d: int = 128

    def check(self) -> None:
        self.require(self.bar_d % 2 == 0 and 2 <= self.bar_d <= 4096, "bar_d", "an even width from 2 to 4096")

    def module(self, num_heads: int, both_ways: bool = False) -> SandwichCurve:
        return SandwichCurve(num_heads, self.bar_d)


def at_least_float32(parameter: Tensor) -> Tensor:
    """A parameter that may have been cast to 16 bits, as the formulas compute with it."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def bounded(parameter: Tensor, most: float | None = None) -> Tensor:
    """A parameter held within its bounds, with a gradient of 1 also beyond them: else it could never come back."""
    exact = at_least_float32(parameter)
    return exact + (exact.clamp(LEAST, most) - exact).detach()


def cpu_slopes(num_heads: int) -> Tensor:
    """ALiBi's slopes on the CPU, also where modules are being built on the meta device."""
    with torch.device("cpu"):
        return alibi_slopes(num_heads)
