"""A cache's keys, turned for the present segment and kept beside it from one step to the next.

The cache holds keys as plain RoPE turns them, and stays the only truth: what is kept here is used for those keys alone
that are, by address and version, the very memory that was turned. A cache that was cropped still is; one that was
reordered, repeated, copied, offloaded or written to is not, and is turned anew (in inference mode torch counts no
writes: who writes into a cache there says so by `drop`). Nothing adds up: whatever happened, a key is at most two turns
away from the one that the model computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from .late import turn_keys, turn_queries
from .rotation import Turn

GROWING = (DynamicLayer, DynamicSlidingWindowLayer)  # new keys come behind the old ones, in new memory
IN_PLACE = (StaticLayer,)  # new keys are written behind the old ones, into one buffer
_KEPT = "_posenc_turned"  # an attribute of a cache


@dataclass
class Kept:
    """One layer's: `seen` the keys that were turned, as they were then, into the first `count` slots of `buffer`.

    Between the start of a call and its layer, `start` and `count` say which slots are still those of the cache.
    """

    buffer: Tensor
    count: int
    start: int = 0
    seen: Tensor | None = None
    version: int = 0


class TurnedKeys:
    """Keys of one cache, turned by the tables of the call before, by the index of their layer."""

    def __init__(self) -> None:
        self.layers: dict[int, Kept] = {}
        self.made_for: tuple[Any, ...] = ()
        self.positions: Tensor | None = None
        self.cache_layers: Sequence[Any] = ()

    def __deepcopy__(self, memo: Any) -> TurnedKeys:
        return TurnedKeys()  # a copied cache has other memory

    def __reduce__(self) -> Any:
        return TurnedKeys, ()

    def begin(self, made_for: tuple[Any, ...], positions: Tensor, past: int) -> None:
        """At the start of a call: forget what cannot serve its `past` keys, and hold on to no key of the cache's."""
        known = self.positions
        same = known is not None and known.shape[0] == positions.shape[0] and known.shape[1] >= past
        if made_for != self.made_for or known is None or not same or not known[:, :past].equal(positions[:, :past]):
            self.layers = {}
        self.made_for, self.positions = made_for, positions
        self.layers = {i: kept for i, kept in self.layers.items() if follow(kept, self.cache_layers[i], past)}

    def turned(self, index: int, turn: Turn, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's queries (batch, heads, n, d) and all of its keys turned, of which only the last n are new."""
        layer, old, n = self.cache_layers[index], self.layers.pop(index, None), query.shape[2]
        kind = type(layer)
        if kind not in (*GROWING, *IN_PLACE) or not share_memory(layer.keys, key):
            # moved about in a step, or made from what is cached and not itself in there
            return turn_queries(turn, query, turn.first_key), turn_keys(turn, key)
        in_place = kind in IN_PLACE
        at = turn.first_key if in_place else key.shape[2] - n
        if old is None or old.count < at or old.buffer.dtype != key.dtype:
            query, kept = turn_queries(turn, query, turn.first_key), Kept(turn_keys(turn, key), at + n)
        else:
            kept = Kept(old.buffer, at + n) if in_place else with_room(old, old.count - at, at + n)
            both = turn_queries(turn, torch.cat((query, key.narrow(2, at, n)), dim=1), turn.first_key)
            query, new = both.split((query.shape[1], key.shape[1]), dim=1)
            kept.buffer.narrow(2, kept.start + at, n).copy_(new)
        kept.seen, kept.version = key, version(key)
        self.layers[index] = kept
        return query, kept.buffer if in_place else kept.buffer.narrow(2, kept.start, kept.count)


def find(cache: Any, past: int) -> TurnedKeys | None:
    """What is kept beside a cache; begun where there is nothing; None where it cannot be kept up to date."""
    cache = getattr(cache, "self_attention_cache", cache)
    if past == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling() or not followed(cache):
        return None
    kept = cache.__dict__.setdefault(_KEPT, TurnedKeys())
    assert isinstance(kept, TurnedKeys)
    kept.cache_layers = cache.layers
    return kept


def drop(cache: Any) -> None:
    """Forget what is kept beside a cache: a call that does not keep it up to date is about to change the cache."""
    getattr(getattr(cache, "self_attention_cache", cache), "__dict__", {}).pop(_KEPT, None)


def followed(cache: Any) -> bool:
    """Whether it is known what a step does to this cache; one that moves its layers between devices is left out."""
    return type(cache) in (DynamicCache, StaticCache) and not getattr(cache, "offloading", False)


def follow(kept: Kept, layer: Any, past: int) -> bool:
    """Whether the keys in `layer` are memory that was turned, unchanged; sets which slots of it they are."""
    seen, now = kept.seen, layer.keys
    kept.seen = None
    if kept.buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False  # it could not be written to
    if seen is None or not isinstance(now, Tensor) or not share_memory(now, seen) or version(now) != kept.version:
        return False
    if now.stride() != seen.stride() or now.shape[:2] != seen.shape[:2] or now.shape[3] != seen.shape[3]:
        return False
    skipped, rest = divmod(int(now.storage_offset()) - int(seen.storage_offset()), seen.stride(2))
    if type(layer) in IN_PLACE:
        return rest == skipped == 0 and now.shape == seen.shape and past <= kept.count
    if rest != 0 or skipped < 0 or skipped + now.shape[2] > seen.shape[2]:
        return False
    kept.start, kept.count = kept.start + skipped, now.shape[2]
    return True


def with_room(kept: Kept, skip: int, count: int) -> Kept:
    """The same but for the first `skip` keys, with room for `count`; a new buffer gets an eighth more than that."""
    start = kept.start + skip
    if start + count <= kept.buffer.shape[2]:
        return Kept(kept.buffer, count, start)
    batch, heads, _, width = kept.buffer.shape
    buffer = kept.buffer.new_empty(batch, heads, count + max(64, count // 8), width)
    live = kept.buffer[:, :, start : kept.start + kept.count]
    buffer[:, :, : live.shape[2]] = live
    return Kept(buffer, count)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that are alive lie in one block of memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def version(keys: Tensor) -> int:
    """How often this memory has been written to; inference mode does not count, and only we write to it there."""
    return 0 if keys.is_inference() else keys._version
