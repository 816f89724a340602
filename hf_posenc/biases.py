"""Attention with a number added to every score, for biases that are no product of a few columns of Q and K.

Made and used for a block of queries at a time, so that what is held is block × keys × heads and never n × n × heads.
Where positions go up by one a slot, as nearly always, a block is no more than a view of one curve over the distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .encodings import Bias
from .late import Attended, causal_mask, fitted
from .offload import execution_device

if TYPE_CHECKING:
    from .positions import Call

BLOCK = 2**24  # numbers of a block's bias at most, 64 MiB in float32
ROWS = 1024  # queries of a block at most
TUNED_ROWS = 256  # the same where a backward will keep a block's scores
TABLE = 2**20  # distances of a curve at most, beyond which every pair is computed by itself


class CallBias:
    """The bias of one forward call: finds the module that its model owns, and remembers what layers share.

    No module and no tensor in itself, so that nothing moves or saves it. What is remembered is used without gradients
    alone: a layer that is computed again in a backward must build a graph of its own.
    """

    def __init__(self, owner: nn.Module, encoding: Bias, straight: bool) -> None:
        self.owner, self.encoding, self.straight = owner, encoding, straight
        self._kept: dict[Any, Tensor] = {}

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch or 1, heads, n, keys), in at least float32, on the device of the positions."""
        module: Any = self.owner.posenc  # asked for each time: PEFT may have wrapped it since
        device = execution_device(module) if self.encoding.trained else queries.device
        return module(queries.to(device), keys.to(device)).to(queries.device)

    def curve(self, low: int, high: int, device: torch.device) -> Tensor:
        """(heads, high - low + 1): the bias at the distances high … low, the furthest first."""

        def build() -> Tensor:
            at = torch.arange(high, low - 1, -1, device=device)[None]
            return self(at, at.new_zeros(1, 1))[0, :, :, 0]

        return self.once(("curve", low, high, device), build)

    def once(self, name: Any, build: Callable[[], Tensor]) -> Tensor:
        """What `build` gives, for all layers of a call without gradients."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return build()
        if name not in self._kept:
            self._kept[name] = build()
        return self._kept[name]

    @property
    def tuned(self) -> bool:
        """Whether a gradient is wanted of it."""
        module: Any = self.owner.posenc
        return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def bias_of_call(owner: nn.Module, encoding: Bias, call: Call) -> CallBias:
    """The bias of a call of `owner`, the module that has the bias at `posenc`."""
    return CallBias(owner, encoding, encoding.by_distance and is_straight(call))


def is_straight(call: Call) -> bool:
    """Whether the distance of all pairs that can see each other is that of their slots.

    So it is where positions go up by one a slot; and behind padding on the left, whose positions are 0, and before
    some on the right, whose positions stay at the last. Not asked while the compiler traces: it would have to wait.
    """
    keys = call.key_positions
    if torch.compiler.is_compiling() or keys.shape[1] == 0:
        return False
    if bool((keys.diff(dim=1) == 1).all()):
        return True
    first = (keys == 0).sum(dim=1, keepdim=True) - 1
    slots = torch.arange(keys.shape[1], device=keys.device)
    return call.plain and bool((keys == (slots - first).clamp(min=0).minimum(keys[:, -1:])).all())


def with_bias(
    base: str,
    forward: Callable[..., Attended],
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
) -> Attended:
    """Attention over `forward` with `call.bias` on the scores; shapes and return value as in `attention.attend`."""
    bias, n = call.bias, query.shape[2]
    assert bias is not None
    if base == "eager" or n == 1:  # eager makes all scores in the open; and one query has one row
        if mask is None and n > 1 and not call.both_ways:
            mask = causal_mask(n, key.shape[2], query.device)
        rows = bias.once(("rows", key.shape[2], query.device), lambda: whole(call, key.shape[2]))
        if base == "eager":  # whose softmax has no answer to a row of -inf
            added = joined_mask(rows, mask, torch.float32, torch.finfo(torch.float32).min)
        else:
            added = joined_mask(rows, mask, mask_dtype(query, bias.tuned))
        return forward(query, key, value, added, scaling=scaling)
    return in_blocks(forward, call, query, key, value, mask, scaling)


def whole(call: Call, keys: int) -> Tensor:
    """The bias of all queries of a call, (batch or 1, heads, n, keys)."""
    assert call.bias is not None
    return call.bias(call.query_positions, fitted(call.key_positions, keys))


def in_blocks(
    forward: Callable[..., Attended], call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float
) -> Attended:
    """A block of queries at a time; in each they stand in reverse, so that its bias is a view of the curve.

    Row r of block [s, e) is the query e - 1 - r; its distance to the key at slot j falls by one both a row and a key.
    """
    bias, n, keys = call.bias, query.shape[2], key.shape[2]
    assert bias is not None
    causal = mask is None and not call.both_ways
    source = bias_source(call, n, keys, causal, query)

    def attend_block(query: Tensor, key: Tensor, value: Tensor, start: int, stop: int) -> Tensor:
        numbers = source(start, stop, key.shape[2])
        part = None if mask is None else mask[:, :, start:stop].flip(2)
        return forward(query, key, value, joined_mask(numbers, part, numbers.dtype), scaling=scaling)[0]

    rows = block_rows(query, keys, bias, ROWS if not bias.tuned else TUNED_ROWS)
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    again = again and (bias.tuned or mask is not None or not bias.straight)
    parts = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        visible = stop if causal else keys  # with no mask nothing is cached
        given = (query[:, :, start:stop].flip(2), key[:, :, :visible], value[:, :, :visible], start, stop)
        # a backward would keep every block's scores or mask, which together are n × n × heads
        part = checkpoint(attend_block, *given, use_reentrant=False) if again else attend_block(*given)
        parts.append(part.flip(1))
    return torch.cat(parts, dim=1), None


def block_rows(query: Tensor, keys: int, bias: CallBias, most: int) -> int:
    """How many queries a block has."""
    batch, heads, n, _ = query.shape
    rows = BLOCK // (keys * max(heads, 32) * (1 if bias.straight else batch))
    return max(16, min(n, most, rows))


def bias_source(call: Call, n: int, keys: int, causal: bool, query: Tensor) -> Callable[[int, int, int], Tensor]:
    """(start, stop, visible) → the bias of the queries stop - 1 … start with the first `visible` keys.

    (batch or 1, heads, stop - start, visible), in the dtype of a mask. `causal`: later keys are hidden here.
    """
    bias = call.bias
    assert bias is not None
    dtype = mask_dtype(query, bias.tuned)
    total = call.key_positions.shape[1]
    if bias.straight:
        nearest = max(total - keys, 0)  # the slot of the first key: a sliding cache hands over the last ones alone
        high = total - 1 - nearest
        curve = bias.curve(high - n - keys + 2, high, query.device).to(dtype)
        if causal:
            curve = torch.cat(
                (curve[:, : high + 1], curve.new_full((len(curve), n + keys - 2 - high), -torch.inf)), dim=1
            )
        on_cpu = query.device.type == "cpu"

        def view(start: int, stop: int, visible: int) -> Tensor:
            first = n - stop
            part = curve[:, first : first + stop - start + visible - 1].unfold(1, visible, 1)[None]
            return part if on_cpu else part.contiguous()  # kernels elsewhere want aligned rows

        return view
    look = looked_up(call, keys, query.device)

    def made(start: int, stop: int, visible: int) -> Tensor:
        found = look(call.query_positions[:, start:stop].flip(1), visible).to(dtype)
        if not causal:
            return found
        at = torch.arange(stop - 1, start - 1, -1, device=query.device)
        return found.masked_fill(torch.arange(visible, device=query.device) > at[:, None], -torch.inf)

    return made


def looked_up(call: Call, keys: int, device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """(positions of queries, visible) → the bias with the first `visible` keys, wherever they stand.

    Out of a table of the distances where these are not too many and the compiler does not trace; else by the formula.
    """
    bias, places = call.bias, fitted(call.key_positions, keys)
    assert bias is not None
    if not bias.encoding.by_distance or torch.compiler.is_compiling():
        return lambda queries, visible: bias(queries, places[:, :visible])
    low, high = distances_between(call.query_positions, places)
    if high - low >= TABLE:
        return lambda queries, visible: bias(queries, places[:, :visible])
    curve = bias.curve(low, high, device)

    def look(queries: Tensor, visible: int) -> Tensor:
        index = high - (queries[..., None] - places[:, None, :visible])
        return curve[:, index].transpose(0, 1)

    return look


def distances_between(queries: Tensor, keys: Tensor) -> tuple[int, int]:
    """The lowest and the highest of i - j; the device is waited for."""
    least, most, nearest, furthest = torch.stack((*queries.aminmax(), *keys.aminmax())).tolist()
    return least - furthest, most - nearest


def mask_dtype(query: Tensor, tuned: bool) -> torch.dtype:
    """The dtype of a mask of numbers; the CPU's kernel adds one in float32 to 16-bit scores where none is trained."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype == torch.float32:
        return torch.get_autocast_dtype(device)
    return torch.float32 if device == "cpu" and query.dtype.itemsize == 2 and not tuned else query.dtype


def joined_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype, least: float = -torch.inf) -> Tensor:
    """A bias (batch or 1, heads, n, keys) and a mask (batch or 1, heads or 1, n, keys or more) as one to be added.

    What is hidden becomes `least`, and takes no gradient to the bias. Kernels answer a row that is hidden whole, as of
    padding, with zeros only where that is -inf: for the least finite number their backward is wrong by its length.
    """
    bias = bias.to(dtype)
    if mask is None:
        return bias
    mask = mask[..., : bias.shape[-1]]
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return torch.where(hidden, least, bias + mask.to(dtype))
