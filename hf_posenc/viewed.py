"""Attention in which some pairs of a query and a key see another distance than others, a block of queries at a time.

Where one view rules a whole call its queries and keys are turned, and the base function is called as ever. Else the
keys of a block are looked at in the few views that rule some of them, and masked where they do not. Two ways of
joining views lead to one softmax: an attention a view, joined by their log-sum-exps, where the kernel tells those; or,
with any base function, one attention in which queries carry all views side by side in their channels and each view's
keys stand in the channels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import UnsupportedError
from .joined import can_join, repeated, shared, summed
from .late import Attended, additive, fitted, is_block_mask
from .rotation import Pairs, rotate
from .views import Block, Part, Table, Views, falls

Forward = Callable[..., Attended]


def viewed(
    base: str,
    forward: Forward,
    views: Views,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    dropout: float = 0.0,
) -> Attended:
    """Attention of unturned queries (batch, heads, n, d) and keys, from the cache too, as `views` says."""
    if is_block_mask(mask):
        raise UnsupportedError(
            "FlexAttention's block mask cannot be cut for an encoding with another distance for some pairs; "
            "model.set_attn_implementation('sdpa')"
        )
    if views.factor is not None:
        query = query * views.factor[:, None, :, None].to(query.dtype)
    if views.alone:
        query = rotate(query, views.queries[0].cos, views.queries[0].sin, views.pairs)
        if base == "sdpa" and can_join(query, key, value, mask, dropout) and views.fall is None:
            joined = join_alone(views.keys[0], views.pairs, query, key, value, mask, scaling)
            if joined is not None:
                return joined, None
        key = turn_slots(key, views.keys[0], views.pairs)
        if views.fall is not None:
            key = sized(key, fitted(views.fall, key.shape[2]), views.pairs)
        return forward(query, key, value, mask, scaling=scaling)
    keys = Keys(views, key)
    if len(views.blocks) == 1 and len(views.blocks[0].parts) == 1:
        [block] = views.blocks
        view = block.parts[0].view
        q, k = turn_block(views, block, view, query), keys.of(block, view)
        return forward(q, k, value, mask, scaling=scaling)
    joins = base == "sdpa" and can_join(query, key, value, mask, dropout)
    if joins:
        value = repeated(value, query.shape[1])
    out, weights = [], []
    for block in views.blocks:
        if joins:
            out.append(join(views, block, query, keys, value, mask, scaling))
            continue
        part, seen = side_by_side(base, forward, views, block, query, keys, value, mask, scaling)
        out.append(part)
        if seen is not None:
            weights.append(seen)
    return torch.cat(out, dim=1), torch.cat(weights, dim=2) if weights else None


class Keys:
    """A layer's keys as the views turn them: each once, however many blocks ask for them."""

    def __init__(self, views: Views, key: Tensor) -> None:
        self.views, self.unturned = views, key
        self.known: dict[int | None, Tensor] = {None: key}
        slots = views.key_places.shape[1]
        self.dropped = max(slots - key.shape[2], 0)  # by a cache that keeps a window of keys

    def of(self, block: Block, view: int, start: int = 0, end: int | None = None) -> Tensor:
        """The keys in the slots from `start` to `end` (of those so far), turned for a view and a block of queries."""
        found = self.views.key_of[view]
        if found not in self.known:
            assert found is not None
            self.known[found] = turn_slots(self.unturned, self.views.keys[found], self.views.pairs)
        turned = self.known[found][:, :, self.cut(start, end)]
        if self.views.decay is None or self.views.positions is None or block.centre is None:
            return turned
        at = self.views.positions[1][:, self.dropped :][:, self.cut(start, end)]
        return sized(turned, fitted(falls(self.views.decay, block.centre - at), turned.shape[2]), self.views.pairs)

    def cut(self, start: int, end: int | None) -> slice:
        """Where slots are among the layer's own."""
        return slice(max(start - self.dropped, 0), None if end is None else max(end - self.dropped, 0))


def turn_slots(key: Tensor, table: Table, pairs: Pairs) -> Tensor:
    """All keys, with those turned that the table tells of: a static cache has more of them, a sliding one fewer."""
    if not table.cos.shape[1]:
        return key
    known = table.first + table.cos.shape[1]
    dropped = max(known - key.shape[2], 0)
    start, end = max(table.first - dropped, 0), known - dropped
    skipped = start + dropped - table.first
    turned = rotate(key[:, :, start:end], table.cos[:, skipped:], table.sin[:, skipped:], pairs)
    pieces = [piece for piece in (key[:, :, :start], turned, key[:, :, end:]) if piece.shape[2]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def turn_block(views: Views, block: Block, view: int, query: Tensor) -> Tensor:
    """A block's queries, turned for a view."""
    at = slice(block.start, block.end)
    table = views.queries[view]
    turned = rotate(query[:, :, at], table.cos[:, at], table.sin[:, at], views.pairs)
    if views.decay is None or views.positions is None or block.centre is None:
        return turned
    return sized(turned, falls(views.decay, views.positions[0][:, at] - block.centre), views.pairs)


def sized(x: Tensor, size: Tensor, pairs: Pairs) -> Tensor:
    """x (batch, heads, slots, width) with its pairs of channels multiplied by `size` (batch or 1, slots, d/2)."""
    both = size.repeat_interleave(2, dim=-1) if pairs.interleaved else torch.cat((size, size), dim=-1)
    end = pairs.start + both.shape[-1]
    part = x[..., pairs.start : end] * both[:, None].to(x.dtype)
    return part if part.shape == x.shape else torch.cat((x[..., : pairs.start], part, x[..., end:]), dim=-1)


def visible(views: Views, block: Block, part: Part, keys: Keys, mask: Tensor | None, start: int) -> Tensor:
    """(batch or 1, 1 or heads, queries, slots) which pairs of a part from slot `start` on count, as booleans."""
    at, slots = slice(block.start, block.end), slice(start, part.end)
    low, high = views.bounds[part.view]
    gap = views.query_places[:, at, None] - views.key_places[:, None, slots]
    seen = ((gap >= low) & (gap < high))[:, None]
    if mask is None and not views.both_ways:
        order = torch.arange(start, part.end, device=gap.device)
        seen = seen & (order <= torch.arange(block.start, block.end, device=gap.device)[:, None] + views.past)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask[:, :, at, keys.cut(start, part.end)]
    return seen


def numbers(seen: Tensor, mask: Tensor | None, block: Block, cut: slice, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a part: the least number where a pair does not count, else the call's own mask."""
    least = torch.finfo(dtype).min
    if mask is None or mask.dtype == torch.bool:
        return additive(seen, dtype)
    return finite(mask[:, :, block.start : block.end, cut], dtype).masked_fill(~seen, least)


def finite(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers, none of them infinite: of keys that are all hidden so, a kernel tells no sum."""
    return additive(mask, dtype).to(dtype).clamp(min=torch.finfo(dtype).min)


def kept(block: Block, keys: Keys) -> Iterator[Part]:
    """The parts of a block, without the keys that the layer's cache has dropped."""
    for part in block.parts:
        if part.end > keys.dropped:
            start = max(part.start, keys.dropped)
            yield part._replace(start=start, sure=max(part.sure, start))


def side_by_side(
    base: str,
    forward: Forward,
    views: Views,
    block: Block,
    query: Tensor,
    keys: Keys,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> Attended:
    """A block's attention by one call of the base function, over keys that stand there once a view that rules some."""
    parts = list(kept(block, keys))
    width, count = query.shape[-1], len(parts)
    q = torch.cat([turn_block(views, block, part.view, query) for part in parts], dim=-1)
    k = torch.cat(
        [
            F.pad(keys.of(block, part.view, part.start, part.end), (i * width, (count - 1 - i) * width))
            for i, part in enumerate(parts)
        ],
        dim=2,
    )
    cuts = [keys.cut(part.start, part.end) for part in parts]
    v = torch.cat([value[:, :, cut] for cut in cuts], dim=2)
    if base == "sdpa":  # a kernel that is told two widths falls back to a slow one
        v = F.pad(v, (0, max(q.shape[-1] - v.shape[-1], 0)))
    seen = [visible(views, block, part, keys, mask, part.start) for part in parts]
    if base == "sdpa" and (mask is None or mask.dtype == torch.bool):
        joint = torch.cat(level(seen), dim=-1)
    else:
        joint = torch.cat(level([numbers(s, mask, block, c, query.dtype) for s, c in zip(seen, cuts)]), dim=-1)
    out, weights = forward(q, k, v, joint, scaling=scaling)
    return out[..., : value.shape[-1]], None if weights is None else gathered(weights, cuts, keys.unturned.shape[2])


def level(masks: list[Tensor]) -> list[Tensor]:
    """Masks of one number of rows and heads."""
    rows, heads = max(m.shape[0] for m in masks), max(m.shape[1] for m in masks)
    return [mask.expand(rows, heads, -1, -1) for mask in masks]


def gathered(weights: Tensor, cuts: list[slice], slots: int) -> Tensor:
    """Weights (batch, heads, queries, keys of all parts) on the slots that the keys stand in."""
    whole, at = weights.new_zeros(*weights.shape[:3], slots), 0
    for cut in cuts:
        width = cut.stop - cut.start
        whole[..., cut] += weights[..., at : at + width]
        at += width
    return whole


# --- an attention a view, joined by their log-sum-exps ---------------------------------------------------------------


def join(
    views: Views,
    block: Block,
    query: Tensor,
    keys: Keys,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """A block's attention (batch, queries, heads, width) from one attention a view, and two where some need no mask."""
    outs, sums = [], []
    for part in kept(block, keys):
        q = turn_block(views, block, part.view, query)
        sure = part.sure if mask is None else part.start
        for start, end in ((part.start, sure), (sure, part.end)):
            if start >= end:
                continue
            cut = keys.cut(start, end)
            added = None
            if end > sure:
                seen = visible(views, block, part, keys, mask, start)
                added = numbers(seen, mask, block, cut, q.dtype)
            k = repeated(keys.of(block, part.view, start, end), q.shape[1])
            v = F.pad(value[:, :, cut], (0, q.shape[-1] - value.shape[-1]))
            out, total = summed(q, k, v, added, scaling)
            outs.append(out)
            sums.append(total)
    return shared(outs, sums)[..., : value.shape[-1]]


def join_alone(
    table: Table, pairs: Pairs, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor | None:
    """One query's attention without a copy of the keys that are not turned; None where that gains nothing."""
    known = table.first + table.cos.shape[1]
    still = table.first - max(known - key.shape[2], 0)
    if still < 1 or still >= key.shape[2] or key.shape[1] != query.shape[1] or value.shape[-1] != query.shape[-1]:
        return None
    turned = turn_slots(key[:, :, still:], Table(table.cos, table.sin), pairs)
    masks = (None, None) if mask is None else finite(mask, query.dtype).tensor_split((still,), dim=-1)
    parts = zip((key[:, :, :still], turned), value.tensor_split((still,), dim=2), masks)
    found = [summed(query, k, v, added, scaling) for k, v, added in parts]
    return shared([out for out, _ in found], [total for _, total in found])
