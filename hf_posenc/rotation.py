"""Turning Q and K for hosts that have no rotation of their own, and once more, late, by the segment of the query.

With an encoding by segments every key is turned early by plain RoPE, and so it is cached: that is its place and its
segment's number at once, whatever becomes of the cache. The attention function turns on by the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .encodings import Segmented


@dataclass(frozen=True)
class Pairs:
    """Which channels of a head turn together, as queries and keys reach the attention function.

    The turned channels begin at `start`, and there are as many as the tables are wide; channel i of them pairs with
    i + d/2, or, `interleaved`, 2i with 2i + 1. The channels outside them are left alone.
    """

    start: int = 0
    interleaved: bool = False


HALVES = Pairs()


@dataclass(eq=False)
class Tables:
    """cos and sin of every key of a call, made when a layer first asks for them, and then shared by all layers.

    `inv_freq` (batch or 1, d/2) and `scaling` (batch or 1,) a row, for keys at `positions` (batch or 1, keys). One step
    with a cache asks for those of its own query alone.
    """

    inv_freq: Tensor
    scaling: Tensor
    positions: Tensor
    made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        """For how many keys there are tables."""
        return self.positions.shape[1]

    def between(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (batch or 1, end - start, d), float32, of the keys in these slots."""
        positions, scaling = self.positions[:, start:end].to(device), self.scaling.to(device)[:, None, None]
        cos, sin = cos_sin(self.inv_freq.to(device)[:, None], 1.0, positions)
        return cos * scaling, sin * scaling

    def prepared(self, start: int, end: int, like: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The same as `turn_on` wants them, (batch or 1, 1, end - start, d), in dtype and on the device of `like`."""
        asked = (start, end, like.device, like.dtype)
        found = self.made.get(asked)
        if found is None:
            whole = self.made.get((0, self.keys, like.device, like.dtype))
            if whole is None:
                found = prepared(*self.between(start, end, like.device), like, pairs)
            else:
                found = whole[0][:, :, start:end], whole[1][:, :, start:end]
            self.made[asked] = found
        return found


def prepared(cos: Tensor, sin: Tensor, like: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Half-split tables (batch or 1, n, d) as `turn_on` wants them: (batch or 1, 1, n, d), in dtype of `like`.

    sin with the sign that a channel's partner is added with, both in the order of `pairs`.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos.to(like.dtype), torch.cat((-sin[..., :half], sin[..., half:]), dim=-1).to(like.dtype)
    if pairs.interleaved:
        cos, sin = (table.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2) for table in (cos, sin))
    return cos[:, None], sin[:, None]


def turn_on(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """x (batch, heads, n, width) with its `pairs` turned by tables that were `prepared`, of d <= width channels."""
    width = cos.shape[-1]
    part = x if width == x.shape[-1] else x[..., pairs.start : pairs.start + width]
    if pairs.interleaved:
        partner = part.unflatten(-1, (width // 2, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.cat((part[..., width // 2 :], part[..., : width // 2]), dim=-1)
    part = torch.addcmul(part * cos, partner, sin)
    if width == x.shape[-1]:
        return part
    return torch.cat((x[..., : pairs.start], part, x[..., pairs.start + width :]), dim=-1)


def turn_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """`turn_on` for queries and keys of the same tokens; of a single one as one tensor, which halves the calls."""
    if query.shape[2] > 1:
        return turn_on(query, cos, sin, pairs), turn_on(key, cos, sin, pairs)
    query, key = turn_on(torch.cat((query, key), dim=1), cos, sin, pairs).split((query.shape[1], key.shape[1]), dim=1)
    return query, key


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES) -> Tensor:
    """x (batch, heads, n, width) with its `pairs` turned by half-split tables (batch or 1, n, d), d <= width."""
    return turn_on(x, *prepared(cos, sin, x, pairs), pairs)


class Turn(NamedTuple):
    """The part of a call whose queries turn by one set of frequencies a row, on top of what the cache holds.

    `slots`: (n,) indices into the call's queries, or None for all of them. `select`: (batch, n) which of those rows
    truly belong, or None for all. `tables`: what queries and keys are turned by, or None where they stay as they are.
    `first_key`: the slot of the call's first query among the keys. `pairs`: the channels turned. `segments`: the number
    of each row's segment, or one number for all rows. `end`: behind the last of the slots; `in_order`: whether the
    slots of a call's turns, one after the other, are all of its queries in their order.
    """

    slots: Tensor | None
    select: Tensor | None
    tables: Tables | None
    first_key: int
    pairs: Pairs = HALVES
    segments: tuple[int, ...] = ()
    end: int = 0
    in_order: bool = False


def cos_sin(inv_freq: Tensor, scaling: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Half-split tables of `positions` (batch, n) in tokens: two (batch, n, d) float32, times `scaling`.

    Angles are formed in float32 from exact whole positions, whatever the dtype of the model.
    """
    angles = positions[..., None].float() * inv_freq.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


Difference = tuple[Tensor, float]  # of frequencies, (d/2,); ratio of the factors on cos and sin


def turns(
    differences: Differences, positions: Tensor, key_positions: Tensor, past: int, pairs: Pairs = HALVES
) -> tuple[Turn, ...]:
    """What the queries at `positions` (batch or 1, n) turn by, beyond the plain rotation they come with.

    Nothing where all stand in plain segments; one `Turn` where each row stands in one segment; else one a segment.
    """
    encoding = differences.encoding
    if positions.shape[1] == 1:
        first = last = [encoding.segment_of(position) for position in positions[:, 0].tolist()]
    else:
        segments = encoding.segment(positions)
        first, last = torch.stack((segments.amin(1), segments.amax(1))).tolist()
    if first == last:
        own = tuple(first[:1] if len(set(first)) == 1 else first)
        tables = differences.tables(own, key_positions)
        return () if tables is None else (Turn(None, None, tables, past, pairs, own),)
    result = []
    for segment in segments.unique().tolist():
        member = segments == segment
        slots = member.any(0).nonzero()[:, 0]
        select = member[:, slots]
        tables = differences.tables((segment,), key_positions)
        chosen = None if bool(select.all()) else select
        result.append(Turn(slots, chosen, tables, past, pairs, (segment,), int(slots[-1]) + 1))
    order = torch.cat([turn.slots for turn in result if turn.slots is not None])
    in_order = torch.equal(order, torch.arange(positions.shape[1], device=order.device))
    return tuple(turn._replace(in_order=in_order) for turn in result)


@dataclass(eq=False)
class Differences:
    """From plain RoPE to each segment of an encoding, for heads that turn `dim` channels; each worked out once."""

    encoding: Segmented
    dim: int
    known: dict[int, Difference | None] = field(default_factory=dict)
    single: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, segment: int) -> Difference | None:
        """The difference of frequencies and the ratio of factors; None where there is none."""
        if segment not in self.known:
            inv_freq, factor = self.encoding.segment_inv_freq(self.dim, segment)
            plain, plain_factor = self.encoding.plain_inv_freq(self.dim)
            found = (inv_freq - plain, factor / plain_factor)
            self.known[segment] = None if not found[0].any() and found[1] == 1 else found
        return self.known[segment]

    def tables(self, segments: tuple[int, ...], key_positions: Tensor) -> Tables | None:
        """For rows in these segments, or in the one that is named; None where all are plain."""
        if len(segments) == 1 and segments[0] in self.single:
            return Tables(*self.single[segments[0]], key_positions)
        found = [self.of(segment) for segment in segments]
        if not any(found):
            return None
        made = [(torch.zeros(self.dim // 2), 1.0) if one is None else one for one in found]
        stacked = torch.stack([one for one, _ in made]), torch.tensor([one for _, one in made])
        if len(segments) == 1:
            self.single[segments[0]] = stacked
        return Tables(*stacked, key_positions)
