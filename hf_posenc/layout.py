"""Which channels of a host's queries and keys turn together, as its own rotation shows.

Positions that all move on by c turn every query and key by R(c) and change nothing else, in whatever layer: the two
are compared with what our own rotation makes of the first ones.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .attention import base_function
from .late import Attended
from .rotation import Pairs, rotate

WATCHING = "posenc_watching"  # as an attention implementation
SHIFT = 5  # tokens; fewer than any pair needs for a whole turn
QueryKey = tuple[Tensor, Tensor]  # queries and keys, as they reach the attention function

_seen: ContextVar[dict[int, QueryKey] | None] = ContextVar("seen", default=None)


def posenc_watching(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Attended:
    """The host's own eager attention, which leaves its queries and keys where `handed` finds them."""
    seen = _seen.get()
    if seen is not None:
        seen[int(module.layer_idx)] = (query, key)  # type: ignore[arg-type]
    return base_function("eager", module)(module, query, key, *args, **kwargs)


def handed(backbone: Any, ids: Tensor, positions: Tensor) -> dict[int, QueryKey]:
    """Queries and keys of each layer, by its index, that reach the attention function of an unpatched backbone."""
    # here and not once: an exported model's file, which holds this code too, would put its own in that place
    AttentionInterface.register(WATCHING, posenc_watching)
    AttentionMaskInterface.register(WATCHING, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config = backbone.config
    seen: dict[int, QueryKey] = {}
    before, token = config._attn_implementation_internal, _seen.set(seen)
    config._attn_implementation_internal = WATCHING
    try:
        backbone(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        config._attn_implementation_internal = before
        _seen.reset(token)
    return seen


def pairs_error(backbone: Any, ids: Tensor, layer: int, pairs: Pairs, step: tuple[Tensor, Tensor]) -> float | None:
    """The largest error of what `rotate` makes of a layer's queries and keys, as a share of the largest; unpatched.

    `step`: cos and sin (1, 1, pairs) of `SHIFT` tokens. None where the layer does not come to the attention interface.
    """
    at = torch.arange(ids.shape[1], device=ids.device)[None]
    here, there = handed(backbone, ids, at).get(layer), handed(backbone, ids, at + SHIFT).get(layer)
    if here is None or there is None:
        return None
    errors = []
    for x, moved in zip(here, there):
        cos, sin = (torch.cat((table, table), dim=-1).to(x.device) for table in step)
        errors.append(float((rotate(x, cos, sin, pairs) - moved).abs().max() / moved.abs().max()))
    return max(errors)
