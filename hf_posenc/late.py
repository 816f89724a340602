"""Attention where each query turns itself and all keys it sees by its own segment's frequencies, and masks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import UnsupportedError
from .rotation import Turn, rotate

QUERY_BLOCK = 1024  # queries a block where a mask must be made, so that it stays thin: 1024 × keys booleans

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
) -> Attended:
    """Attention where each query turns itself and all keys it sees by the frequencies of its own segment.

    query and key come unturned, from the cache too. One block of queries a segment, over the keys turned for it.
    """
    if is_block_mask(mask):
        raise UnsupportedError(
            "an encoding by segments cannot cut FlexAttention's block mask; model.set_attn_implementation('sdpa')"
        )
    n, first = query.shape[2], turns[0].first_key
    if len(turns) == 1:
        q = turn_queries(turns[0], query, slice(first, first + n))
        return forward(q, turn_keys(turns[0], key), value, mask, scaling=scaling)
    out = query.new_zeros(query.shape[0], n, query.shape[1], value.shape[-1])
    weights = None
    for turn in turns:
        assert turn.slots is not None
        k = turn_keys(turn, key)
        square = first == 0 and int(turn.slots[-1]) + 1 == len(turn.slots)
        for slots in pieces(turn.slots, whole=square or mask is not None):
            q = turn_queries(turn, query[:, :, slots], first + slots)
            visible = int(slots[-1]) + 1 + first if mask is None else key.shape[2]
            part = block_mask(base, mask, slots, first, visible, query.dtype)
            block, part_weights = forward(q, k[:, :, :visible], value[:, :, :visible], part, scaling=scaling)
            out = merge(out, block, slots, chosen(turn, slots), dim=1)
            if part_weights is not None:
                if weights is None:
                    weights = part_weights.new_zeros(*part_weights.shape[:2], n, key.shape[2])
                part_weights = F.pad(part_weights, (0, key.shape[2] - part_weights.shape[-1]))
                weights = merge(weights, part_weights, slots, chosen(turn, slots), dim=2)
    return out, weights


def turn_queries(turn: Turn, query: Tensor, at: Any) -> Tensor:
    """The queries that stand at key slots `at`, turned by one segment's tables."""
    return rotate(query, turn.cos[:, at], turn.sin[:, at], turn.pairs)


def turn_keys(turn: Turn, key: Tensor) -> Tensor:
    """All keys turned by one segment's tables."""
    return rotate(key, fitted(turn.cos, key.shape[2]), fitted(turn.sin, key.shape[2]), turn.pairs)


def pieces(slots: Tensor, whole: bool) -> list[Tensor]:
    """The slots of a segment, in blocks where a mask has to be made for them."""
    return [slots] if whole else list(slots.split(QUERY_BLOCK))


def block_mask(
    base: str, mask: Tensor | None, slots: Tensor, first: int, visible: int, dtype: torch.dtype
) -> Tensor | None:
    """The mask of some of a call's queries: cut from the call's own, or made where that is plainly causal."""
    if mask is not None:
        return mask[:, :, slots]
    if base == "sdpa" and len(slots) == visible:
        return None  # a square from the first key on: the kernel's own causal flag
    seen = (torch.arange(visible, device=slots.device) <= (first + slots)[:, None])[None, None]
    return seen if base == "sdpa" else additive(seen, dtype)


def chosen(turn: Turn, slots: Tensor) -> Tensor | None:
    """(batch, n): which rows of a block count; None where all do."""
    if turn.select is None or turn.slots is None:
        return None
    return turn.select[:, torch.isin(turn.slots, slots)]


def merge(whole: Tensor, block: Tensor, slots: Tensor, select: Tensor | None, dim: int) -> Tensor:
    """`whole` with the rows `slots` along `dim` (1 or 2) taken from `block`, in the batch rows of `select`."""
    if select is not None:
        shape = (select.shape[0], select.shape[1], 1, 1) if dim == 1 else (select.shape[0], 1, select.shape[1], 1)
        block = torch.where(select.reshape(shape), block, whole.index_select(dim, slots))
    return whole.index_copy(dim, slots, block)


def fitted(table: Tensor, keys: int) -> Tensor:
    """A table (batch or 1, slots, …) for exactly `keys` slots.

    A static cache hands over its whole buffer, whose unused end is masked; a sliding one only the last keys.
    """
    spare = keys - table.shape[1]
    if spare <= 0:
        return table[:, -keys:]
    return torch.cat((table, table.new_zeros(table.shape[0], spare, *table.shape[2:])), dim=1)


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
