"""FlexAttention with a bias on the scores, looked up inside of its kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .biases import TABLE, distances_between, whole
from .errors import UnsupportedError
from .late import Attended, fitted, is_block_mask

if TYPE_CHECKING:
    from .positions import Call


class FlexBias:
    """Stands in for a tensor (batch, heads, n, keys) that is asked for one number at a time, inside of the kernel."""

    def __init__(self, curve: Tensor, furthest: int, queries: Tensor, keys: Tensor) -> None:
        self.values, self.furthest, self.queries, self.keys = curve, furthest, queries, keys

    def __getitem__(self, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, query, key = at
        distance = self.queries[batch, query] - self.keys[batch, key]
        return self.values[head, self.furthest - distance]


def release_takes_bias() -> bool:
    """Whether the host library's FlexAttention adds a bias that is handed to it."""
    return "position_bias" in inspect.signature(ALL_ATTENTION_FUNCTIONS["flex_attention"]).parameters


def no_bias(name: str) -> str:
    """What to say where it does not."""
    return (
        f"this release of Transformers takes no bias in FlexAttention, and {name} needs one; "
        "model.set_attn_implementation('sdpa')"
    )


def flexed(
    forward: Callable[..., Attended], call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float
) -> Attended:
    """FlexAttention with the bias looked up in its kernel; one that is no curve of the distance, as a tensor."""
    bias, keys = call.bias, key.shape[2]
    assert bias is not None
    if not release_takes_bias():
        raise UnsupportedError(no_bias(bias.encoding.name))
    wanted = bias.tuned or (torch.is_grad_enabled() and query.requires_grad)
    if query.device.type == "cpu" and wanted:
        raise UnsupportedError(
            "FlexAttention has no backward on the CPU; train with model.set_attn_implementation('sdpa'), or call the "
            "model under torch.no_grad()"
        )
    if call.both_ways and is_block_mask(mask):
        raise UnsupportedError("a bias on both sides needs a mask of numbers; model.set_attn_implementation('sdpa')")
    places, batch = fitted(call.key_positions, keys), query.shape[0]
    low, high = distances_between(call.query_positions, places) if bias.encoding.by_distance else (0, TABLE)
    if high - low < TABLE:
        at = (x.expand(batch, -1) for x in (call.query_positions, places))
        found: Any = FlexBias(bias.curve(low, high, query.device), high, *at)
    else:
        rows = bias.once(("rows", keys, query.device), lambda: whole(call, keys))
        found = rows.expand(batch, -1, -1, -1)
    return forward(query, key, value, mask, scaling=scaling, position_bias=found)
