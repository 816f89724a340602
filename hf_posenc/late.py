"""Attention where each query turns itself and all keys it sees by its own segment's frequencies, and masks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from .errors import UnsupportedError
from .joined import repeated, shared, summed
from .rotation import Turn, turn_on

QUERY_BLOCK = 256  # queries a block where a mask must be made: what it hides in the corner is computed for nothing
LOWER_RIGHT = ("cuda",)  # devices with kernels that know a causal triangle in the lower right corner

Attended = tuple[Tensor, Tensor | None]


def turned(
    base: str,
    forward: Callable[..., Attended],
    turns: tuple[Turn, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    keep: Callable[[Turn, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    joins: bool = False,
) -> Attended:
    """Attention where each query turns itself and all keys it sees on to the frequencies of its own segment.

    query and key come turned by plain RoPE, from the cache too. One block of queries a segment, over the keys turned
    for it. `keep`: turns queries and all keys of a call where most keys were turned in the step before. `joins`:
    whether a segment may see the keys before it and its own apart, which needs no mask.
    """
    if is_block_mask(mask):
        raise UnsupportedError(
            "an encoding by segments cannot cut FlexAttention's block mask; model.set_attn_implementation('sdpa')"
        )
    n, first = query.shape[2], turns[0].first_key
    if len(turns) == 1:
        if keep is None:
            query, key = turn_queries(turns[0], query, first), turn_keys(turns[0], key)
        else:
            query, key = keep(turns[0], query, key)
        return forward(query, key, value, mask, scaling=scaling)
    parts: list[tuple[Turn, Tensor, Attended]] = []
    for turn in turns:
        assert turn.slots is not None
        k = turn_keys(turn, key, None if mask is not None else first + turn.end)
        if joins and turn.in_order:
            parts.append((turn, turn.slots, (joined(turn, first, query, k, value, scaling), None)))
            continue
        aligned = mask is None and base == "sdpa" and turn.in_order and query.device.type in LOWER_RIGHT
        for slots in pieces(turn, first, whole=aligned or mask is not None):
            last = turn.end if len(slots) == len(turn.slots) else int(slots[-1]) + 1
            visible = key.shape[2] if mask is not None else first + last
            q = turn_queries(turn, query.index_select(2, slots), first + slots)
            if aligned:
                part: Any = causal_lower_right(len(slots), visible)
            else:
                part = block_mask(base, mask, slots, first, visible, query.dtype)
            block = forward(q, k[:, :, :visible], value[:, :, :visible], part, scaling=scaling)
            parts.append((turn, slots, block))
    weights = [(turn, slots, wide(given, key.shape[2])) for turn, slots, (_, given) in parts if given is not None]
    out = merged([(turn, slots, block) for turn, slots, (block, _) in parts], n, dim=1)
    return out, merged(weights, n, dim=2) if weights else None


def joined(turn: Turn, first: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The attention of a segment's queries, which stand in a row, over keys turned for them; no mask is made."""
    assert turn.slots is not None
    before, heads = first + turn.end - len(turn.slots), query.shape[1]
    q = turn_queries(turn, query[:, :, turn.end - len(turn.slots) : turn.end], before)
    k, v = (repeated(x[:, :, : first + turn.end], heads) for x in (key, value))
    found = [summed(q, k[:, :, before:], v[:, :, before:], None, scaling, causal=True)]
    if before:
        found.append(summed(q, k[:, :, :before], v[:, :, :before], None, scaling))
    return shared([out for out, _ in found], [total for _, total in found])


def turn_queries(turn: Turn, query: Tensor, at: int | Tensor) -> Tensor:
    """The queries that stand at key slots `at`, or from there on, turned on."""
    if turn.tables is None:
        return query
    if isinstance(at, int):
        return turn_on(query, *turn.tables.prepared(at, at + query.shape[2], query, turn.pairs), turn.pairs)
    cos, sin = turn.tables.prepared(0, turn.tables.keys, query, turn.pairs)
    return turn_on(query, cos.index_select(2, at), sin.index_select(2, at), turn.pairs)


def turn_keys(turn: Turn, key: Tensor, count: int | None = None) -> Tensor:
    """All keys, or the first `count`, turned on."""
    key = key if count is None else key[:, :, :count]
    if turn.tables is None:
        return key
    cos, sin = turn.tables.prepared(0, count or turn.tables.keys, key, turn.pairs)
    return turn_on(key, fitted(cos, key.shape[2], 2), fitted(sin, key.shape[2], 2), turn.pairs)


def pieces(turn: Turn, first: int, whole: bool) -> tuple[Tensor, ...]:
    """The slots of a segment, in blocks where a mask has to be made for them that would be large."""
    assert turn.slots is not None
    square = first == 0 and turn.end == len(turn.slots)
    return (turn.slots,) if whole or square else turn.slots.split(QUERY_BLOCK)


def block_mask(
    base: str, mask: Tensor | None, slots: Tensor, first: int, visible: int, dtype: torch.dtype
) -> Tensor | None:
    """The mask of some of a call's queries: cut from the call's own, or made where that is plainly causal."""
    if mask is not None:
        return mask.index_select(2, slots)
    if base == "sdpa" and len(slots) == visible:
        return None  # a square from the first key on: the kernel's own causal flag
    seen = (torch.arange(visible, device=slots.device) <= (first + slots)[:, None])[None, None]
    return seen if base == "sdpa" else additive(seen, dtype)


def wide(weights: Tensor, keys: int) -> Tensor:
    """Attention weights over the first keys, with zeros for the rest."""
    return F.pad(weights, (0, keys - weights.shape[-1]))


def merged(parts: list[tuple[Turn, Tensor, Tensor]], n: int, dim: int) -> Tensor:
    """The results of all blocks, whose queries lie along `dim` (1 or 2), in the order of the call's queries."""
    if all(turn.in_order for turn, _, _ in parts):
        return torch.cat([block for _, _, block in parts], dim=dim)
    first = parts[0][2]
    whole = first.new_zeros(*first.shape[:dim], n, *first.shape[dim + 1 :])
    for turn, slots, block in parts:
        if turn.select is not None and turn.slots is not None:
            select = turn.select[:, torch.isin(turn.slots, slots)]
            shape = (select.shape[0], select.shape[1], 1, 1) if dim == 1 else (select.shape[0], 1, select.shape[1], 1)
            block = torch.where(select.reshape(shape), block, whole.index_select(dim, slots))
        whole = whole.index_copy(dim, slots, block)
    return whole


def fitted(table: Tensor, keys: int, dim: int = 1) -> Tensor:
    """A table with slots along `dim` (1: (batch or 1, slots, …)), for exactly `keys` slots.

    A static cache hands over its whole buffer, whose unused end is masked; a sliding one only the last keys.
    """
    slots = table.shape[dim]
    if slots >= keys:
        return table.narrow(dim, slots - keys, keys)
    spare = table.new_zeros(*table.shape[:dim], keys - slots, *table.shape[dim + 1 :])
    return torch.cat((table, spare), dim=dim)


def is_block_mask(mask: Any) -> bool:
    """Whether this is FlexAttention's kind of mask."""
    return mask is not None and not isinstance(mask, Tensor)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(1, 1, queries, keys) booleans: query r sees the slots up to r; for a call with no mask, and nothing cached."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: visible) as numbers to add to scores; others as they are."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
