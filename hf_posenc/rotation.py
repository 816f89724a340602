"""Turning Q and K for hosts that have no rotation of their own, and late, by the segment of the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .encodings import Rotation, Segmented


@dataclass(frozen=True)
class Pairs:
    """Which channels of a head turn together, as queries and keys reach the attention function.

    The turned channels begin at `start`, and there are as many as the tables are wide; channel i of them pairs with
    i + d/2, or, `interleaved`, 2i with 2i + 1. The channels outside them are left alone.
    """

    start: int = 0
    interleaved: bool = False


HALVES = Pairs()


class Turn(NamedTuple):
    """The part of a call whose queries share one set of frequencies.

    `slots`: (n,) indices into the call's queries, or None for all of them. `select`: (batch, n) which of those rows
    truly belong, or None for all. `cos`, `sin`: (batch or 1, keys, d) of every key so far; the call's own queries are
    the last of them. `first_key`: the slot of the call's first query among the keys. `pairs`: the channels turned.
    """

    slots: Tensor | None
    select: Tensor | None
    cos: Tensor
    sin: Tensor
    first_key: int
    pairs: Pairs = HALVES


def cos_sin(inv_freq: Tensor, scaling: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Half-split tables of `positions` (batch, n) in tokens: two (batch, n, d) float32, times `scaling`.

    Angles are formed in float32 from exact whole positions, whatever the dtype of the model.
    """
    angles = positions[..., None].float() * inv_freq.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES) -> Tensor:
    """x (batch, heads, n, width) with its `pairs` turned by half-split tables (batch or 1, n, d), d <= width."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    end, half = pairs.start + cos.shape[-1], cos.shape[-1] // 2
    part = x[..., pairs.start : end]
    if pairs.interleaved:
        cos, sin = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    part = (part * cos) + (turned * sin)
    if part.shape == x.shape:
        return part
    return torch.cat((x[..., : pairs.start], part, x[..., end:]), dim=-1)


def early(encoding: Rotation, dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of a call's own positions, for hosts that turn Q and K before the cache takes K."""
    inv_freq, scaling = encoding.inv_freq(dim)
    return cos_sin(inv_freq, scaling, positions)


def turns(
    encoding: Segmented, dim: int, positions: Tensor, key_positions: Tensor, past: int, pairs: Pairs = HALVES
) -> tuple[Turn, ...]:
    """One `Turn` for each segment that the queries at `positions` (batch or 1, n) stand in."""
    segments = encoding.segment(positions)
    present = segments.unique().tolist()
    result = []
    for segment in present:
        cos, sin = cos_sin(*encoding.segment_inv_freq(dim, segment), key_positions)
        slots = select = None
        if len(present) > 1:
            member = segments == segment
            slots = member.any(0).nonzero()[:, 0]
            select = member[:, slots]
            select = None if bool(select.all()) else select
        result.append(Turn(slots, select, cos, sin, past, pairs))
    return tuple(result)
