"""Rotations that change the distance a rotation sees: what they all state; rerope, leaky_rerope, self_extend.

A rotation turns query i and key j by angles of their own, and their score sees the difference i - j. Here that
difference is another one for some pairs. Each encoding states a few **views**: what queries and what keys are turned
by in it, and which pairs of them it rules. All frequencies are those of plain RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from . import frequencies
from .base import Geometry, at_least
from .rotary import Frequencies, Rotation

Position = Callable[[Tensor], Tensor]


class View(NamedTuple):
    """One way of seeing positions: `query` and `key` map positions in tokens to those that are turned by.

    It rules the pairs whose gap, `Distance.place` of the query less that of the key, is in [low, high).
    """

    query: Position
    key: Position
    low: float = -math.inf
    high: float = math.inf


def itself(positions: Tensor) -> Tensor:
    """A position as it is."""
    return positions


def zero(positions: Tensor) -> Tensor:
    """No position: nothing is turned."""
    return torch.zeros_like(positions)


@dataclass(frozen=True, kw_only=True)
class Distance(Rotation):
    """A rotation whose angle depends on the positions of query and key in another way than by their difference."""

    @property
    def turns_late(self) -> bool:
        return True

    def formula(self, dim: int) -> Frequencies:
        return frequencies.rope(dim, self.theta), 1.0

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        """The views, nearest first; every pair is ruled by one. `both_ways`: queries see later keys, too."""
        raise NotImplementedError

    def place(self, positions: Tensor) -> Tensor:
        """What the gaps of pairs are counted in, (…) as `positions`: tokens, unless an encoding says otherwise."""
        return positions

    @property
    def stores_turned(self) -> bool:
        """Whether keys can wait turned: by what the furthest view, that of most keys, turns them by."""
        return self.views()[-1].key is not zero

    def stored(self, positions: Tensor) -> Tensor:
        """The positions by which keys at `positions` are turned while they wait, where a host turns early."""
        return self.views()[-1].key(positions)

    def border(self) -> int | None:
        """How far apart, in tokens, a pair is first seen at another distance than its own; None where none is."""
        return None

    def query_factor(self, positions: Tensor) -> Tensor | None:
        """What queries at `positions` are multiplied with, same shape, or None for nothing."""
        return None

    def decay(self, dim: int) -> Tensor | None:
        """Per pair of channels (d/2,): scores fall by exp(-decay) a token of distance; None where they do not."""
        return None

    def distance(
        self, queries: Tensor, keys: Tensor, both_ways: bool = False, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """The distance that each pair sees, in tokens: (…, n) and (…, keys) → (…, n, keys)."""
        gap = self.place(queries)[..., None] - self.place(keys)[..., None, :]
        seen = torch.zeros(gap.shape, dtype=dtype, device=gap.device)
        for view in self.views(both_ways):
            apart = view.query(queries).to(dtype)[..., None] - view.key(keys).to(dtype)[..., None, :]
            seen = torch.where((gap >= view.low) & (gap < view.high), apart, seen)
        return seen


def usual(value: int | None, length: int, share: float) -> int:
    """An option that was left out: a share of the trained length, at least one token."""
    return max(int(length * share), 1) if value is None else value


@dataclass(frozen=True, kw_only=True)
class Rerope(Distance):
    """ReRoPE: the distance is min(i - j, w) (Su 2023, kexue.fm/archives/9708). No training, no end.

    w = `window`, in tokens, below the trained length L (default: the published 512, or L/4 where that is less). Inside
    the first w tokens it is plain RoPE. Where queries see later keys the distance is cut at -w as well. The published
    code also multiplies queries by max(1, ln n / ln L), which is not a part of this.
    """

    name: ClassVar[str] = "rerope"
    window: int | None = None

    def check(self) -> None:
        super().check()
        self.require(at_least(self.window, 1), "window", "a number of tokens >= 1")

    def resolve(self, geometry: Geometry) -> Self:
        done = super().resolve(geometry)
        done = done.but(window=min(512, usual(None, done.length, 0.25)) if done.window is None else done.window)
        done.require(done.near < done.length, "window", f"fewer tokens than the trained length, {done.length}")
        return done

    @property
    def near(self) -> int:
        """w of a resolved encoding."""
        assert self.window is not None, "resolve() first"
        return self.window

    def border(self) -> int:
        return self.near

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        w = self.near
        near = View(itself, itself, -w + 1 if both_ways else -math.inf, w)
        far = View(lambda i: torch.full_like(i, w), zero, w)
        ahead = View(lambda i: torch.full_like(i, -w), zero, high=-w + 1)
        return (near, far, ahead) if both_ways else (near, far)


@dataclass(frozen=True, kw_only=True)
class LeakyRerope(Rerope):
    """Leaky ReRoPE: distances beyond w grow at the pace 1/k: w + (i - j - w)/k (Su 2023, kexue.fm/archives/9708).

    `window` as in ReRoPE; `k`, at least 1 (published: 16). All distances are trained ones up to (L - w)·k + w tokens.
    """

    name: ClassVar[str] = "leaky_rerope"
    k: float = 16.0

    def check(self) -> None:
        super().check()
        self.require(at_least(self.k, 1), "k", "a finite number >= 1")

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        k, shift = self.k, self.near * (1 - 1 / self.k)
        near, far, *ahead = super().views(both_ways)
        far = far._replace(query=lambda i: i / k + shift, key=lambda j: j / k)
        ahead = [view._replace(query=lambda i: i / k - shift, key=far.key) for view in ahead]
        return (near, far, *ahead)

    def reach(self) -> int | None:
        length, w = self.original_max_position_embeddings, self.window
        return None if length is None or w is None else int((length - w) * self.k) + w


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Distance):
    """SelfExtend: i - j below W, floor(i/G) - floor(j/G) + W - floor(W/G) from there on (Jin et al. 2024, 2401.01325).

    G = `group_size` (default 8), W = `window_size`, the neighbours that are seen exactly, in tokens, below the trained
    length L (default L/4). Made for about (L - W)·G + W tokens; inside the first W it is plain RoPE.
    """

    name: ClassVar[str] = "self_extend"
    causal_only: ClassVar[bool] = True
    group_size: int = 8
    window_size: int | None = None

    def check(self) -> None:
        super().check()
        self.require(at_least(self.group_size, 1), "group_size", "a number of tokens >= 1")
        self.require(at_least(self.window_size, 1), "window_size", "a number of tokens >= 1")

    def resolve(self, geometry: Geometry) -> Self:
        done = super().resolve(geometry)
        done = done.but(window_size=usual(done.window_size, done.length, 0.25))
        done.require(done.near < done.length, "window_size", f"fewer tokens than the trained length, {done.length}")
        return done

    @property
    def near(self) -> int:
        """W of a resolved encoding."""
        assert self.window_size is not None, "resolve() first"
        return self.window_size

    def border(self) -> int:
        return self.near

    def views(self, both_ways: bool = False) -> tuple[View, ...]:
        g, shift = self.group_size, self.near - self.near // self.group_size
        near = View(itself, itself, high=self.near)
        far = View(lambda i: i // g + shift, lambda j: j // g, self.near)
        return near, far

    def reach(self) -> int | None:
        length, w = self.original_max_position_embeddings, self.window_size
        return None if length is None or w is None else (length - w) * self.group_size + w
