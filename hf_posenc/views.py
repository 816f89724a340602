"""What a call tells its layers of an encoding that sees some pairs at another distance: tables, and who sees what how.

All of it is worked out once a call, from the positions: the layers only turn queries and keys by it. Ranges of keys
are found per block of queries, over all rows of a batch, and rather too wide than too narrow; which pairs within them
count is then told by the pairs' own positions, row by row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .encodings.distance import Distance, Position, View, zero
from .rotation import HALVES, Pairs, cos_sin

VIEW_BLOCK = 256  # queries: scores of 256 × keys at once, and few keys at a border that are looked at twice
STEEPEST = 4.0  # how far the factors of a decay may go from 1 on the queries of a block: e^4


class Table(NamedTuple):
    """cos and sin (batch or 1, slots, d), and the slot of their first row; nothing before it is turned."""

    cos: Tensor
    sin: Tensor
    first: int = 0


class Part(NamedTuple):
    """The keys that one view may rule for a block of queries: slots from `start` to `end`.

    Up to `sure` it rules all of them, for every query of the block and in every row, and none comes after a query.
    """

    view: int
    start: int
    sure: int
    end: int


class Block(NamedTuple):
    """Queries from `start` to `end` of a call, the parts of the keys that they see, and where their decay is centred.

    `centre`: (batch or 1, 1) a position in tokens, of each row.
    """

    start: int
    end: int
    parts: tuple[Part, ...]
    centre: Tensor | None = None


class Views(NamedTuple):
    """An encoding's views in one call.

    `queries`, `keys`: tables of the call's queries, one a view, and of all keys so far; `key_of`: which of the latter
    each view has, as views may share one, or None where it leaves keys as they wait. `query_places`, `key_places` and
    `bounds`, (low, high) one a view: those pairs are ruled by it whose gap is in between. `past`: keys before the
    call's first query. `factor` (batch or 1, n): what queries are multiplied with. `positions`: of queries and keys,
    for a `decay` (d/2,). `alone`: the call has one query a row, and its keys are turned by what that one sees, and
    multiplied by `fall` (batch or 1, keys, d/2) where there is a decay.
    """

    queries: tuple[Table, ...]
    keys: tuple[Table, ...]
    key_of: tuple[int | None, ...]
    query_places: Tensor
    key_places: Tensor
    bounds: tuple[tuple[float, float], ...]
    blocks: tuple[Block, ...]
    past: int
    pairs: Pairs
    factor: Tensor | None = None
    decay: Tensor | None = None
    positions: tuple[Tensor, Tensor] | None = None
    fall: Tensor | None = None
    alone: bool = False
    both_ways: bool = False


def describe(
    encoding: Distance,
    dim: int,
    queries: Tensor,
    keys: Tensor,
    past: int,
    pairs: Pairs = HALVES,
    both_ways: bool = False,
    stored: Position = zero,
) -> Views:
    """The `Views` of a call with queries at (batch or 1, n) and keys at (batch or 1, past + n), in tokens.

    `stored`: the positions by which the host has turned both before the cache took the keys.
    """
    inv_freq, decay = encoding.inv_freq(dim)[0].to(queries.device), encoding.decay(dim)
    decay = None if decay is None else decay.to(queries.device)
    views = encoding.views(both_ways)
    places, key_places = encoding.place(queries), encoding.place(keys)
    made = Views(
        (), (), (), places, key_places, tuple((v.low, v.high) for v in views), (), past, pairs, both_ways=both_ways
    )
    made = made._replace(factor=encoding.query_factor(queries))
    if queries.shape[1] == 1:
        return for_one_query(made, encoding, views, inv_freq, decay, queries, keys, stored)
    blocks = split(made, queries, decay)
    used = {part.view for block in blocks for part in block.parts}
    functions = dict.fromkeys(view.key for i, view in enumerate(views) if i in used)
    turning = [function for function in functions if bool((function(keys) - stored(keys)).any())]
    turned = [view.query(queries) - stored(queries) if i in used else queries[:, :0] for i, view in enumerate(views)]
    return made._replace(
        queries=tuple(table(inv_freq, positions) for positions in turned),
        keys=tuple(table(inv_freq, function(keys) - stored(keys)) for function in turning),
        key_of=tuple(turning.index(view.key) if view.key in turning else None for view in views),
        blocks=blocks,
        decay=decay,
        positions=None if decay is None else (queries, keys),
    )


def table(inv_freq: Tensor, positions: Tensor, first: int = 0) -> Table:
    """cos and sin of `positions` (batch or 1, slots), which may be fractions."""
    return Table(*cos_sin(inv_freq, 1.0, positions), first)


def for_one_query(
    made: Views,
    encoding: Distance,
    views: tuple[View, ...],
    inv_freq: Tensor,
    decay: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    stored: Position,
) -> Views:
    """The views of a call with one query a row: it is turned as its furthest keys need it, and the others towards it.

    Only differences of angles count, so every key can be turned by the query's angle less the distance that it is seen
    at. Those of the furthest view are then turned as they always are: not at all, where they wait so.
    """
    gap = made.query_places - made.key_places
    furthest = max(i for i, view in enumerate(views) if i == 0 or (view.low > 0 and bool((gap >= view.low).any())))
    view = views[furthest]
    query = view.query(queries)
    angle = query - encoding.distance(queries, keys, made.both_ways, torch.float32)[:, 0] - stored(keys)
    ruled = (gap >= view.low) & (gap < view.high)
    angle = torch.where(ruled, view.key(keys) - stored(keys), angle)  # to the digit, so that none is seen as none
    first = 0
    if not torch.compiler.is_compiling():  # which cannot ask how many keys stay as they are
        first = int((angle == 0).all(0).long().cumprod(0).sum())
    return made._replace(
        queries=(table(inv_freq, query - stored(queries)),),
        keys=(table(inv_freq, angle[:, first:], first),),
        fall=None if decay is None else falls(decay, queries - keys),
        alone=True,
    )


def falls(decay: Tensor, distance: Tensor) -> Tensor:
    """exp(-decay · distance), (…, d/2); a key far ahead of its query, which is hidden, counts as a near one."""
    least = -STEEPEST / float(decay.max())
    return (-decay * distance.clamp(min=2 * least)[..., None]).exp()


def split(views: Views, queries: Tensor, decay: Tensor | None) -> tuple[Block, ...]:
    """The whole call as one block where one view rules all its pairs, else blocks of queries."""
    n = queries.shape[1]
    places, key_places, at = (x.cpu() for x in (views.query_places, views.key_places, queries))
    span = math.inf if decay is None else 2 * STEEPEST / float(decay.max())

    def block(start: int, end: int) -> Block:
        few = at[:, start:end]
        centre = None if decay is None else ((few.amin(1) + few.amax(1)) // 2)[:, None].to(queries.device)
        return Block(start, end, parts(views, places[:, start:end], key_places, start), centre)

    def is_short(start: int, end: int) -> bool:
        few = at[:, start:end]
        return end - start == 1 or bool((few.amax(1) - few.amin(1)).max() <= span)

    whole = block(0, n)
    if len(whole.parts) == 1 and is_short(0, n):
        return (whole,)
    edges = [(start, min(start + VIEW_BLOCK, n)) for start in range(0, n, VIEW_BLOCK)]
    found = []
    while edges:
        start, end = edges.pop(0)
        if is_short(start, end):
            found.append(block(start, end))
        else:
            middle = (start + end) // 2
            edges[:0] = [(start, middle), (middle, end)]
    return tuple(found)


def parts(views: Views, places: Tensor, key_places: Tensor, start: int) -> tuple[Part, ...]:
    """The parts of a block of queries that begins at query `start` of its call."""
    first = views.past + start
    visible = key_places.shape[1] if views.both_ways else first + places.shape[1]
    key_places = key_places[:, :visible]
    most, least = (edge[:, None] - key_places for edge in (places.amax(1), places.amin(1)))
    result = []
    for view, (low, high) in enumerate(views.bounds):
        some = ((most >= low) & (least < high)).any(0).nonzero()
        if len(some):
            begin, end = int(some[0]), int(some[-1]) + 1
            sure = ((least >= low) & (most < high)).all(0)[begin : visible if views.both_ways else first + 1]
            result.append(Part(view, begin, begin + int(sure.long().cumprod(0).sum()), end))
    return tuple(result)
