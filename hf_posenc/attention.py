"""Attention functions of our own, one over each of the host library's, for what acts on scores or turns keys late.

They are registered beside the stock ones as `posenc_sdpa`, `posenc_eager` and `posenc_flex_attention`, each with the
mask function of its base, and are chosen by `config._attn_implementation` of a patched model alone. The bias is added
here and not in the mask, so that a mask of the caller's own cannot drop it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .biases import is_straight, with_bias
from .errors import StateError, UnsupportedError
from .flex_bias import flexed
from .joined import can_join
from .late import Attended, additive, causal_mask, fitted, is_block_mask, turned
from .linear_bias import Once, forced, is_bare, suits_flash, suits_kernel, through_flash, through_kernel
from .viewed import viewed

if TYPE_CHECKING:
    from .positions import Call

BASES = ("sdpa", "eager", "flex_attention")
DIGITS = 3  # of a distance, in base 256


def own_name(base: str | None) -> str:
    """The name of our attention function over `base`; raises `UnsupportedError` where there is none."""
    base = "eager" if base is None else base
    if base not in BASES:
        raise UnsupportedError(
            f"this encoding acts inside the attention function, and there is none of ours over {base!r}; choose one of "
            f"{', '.join(BASES)}, e.g. model.set_attn_implementation('sdpa')"
        )
    return f"posenc_{base}"


def attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    posenc: Call | None = None,
    **kwargs: Any,
) -> Attended:
    """Attention over `base` with what `posenc` says; the signature and return value of the host library's own.

    query (batch, heads, n, d), key and value (batch, key heads, keys, d); returns (batch, n, heads, d) and weights.
    """
    forward = partial(base_function(base, module), module, dropout=dropout, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "is_cross_attention", False):
        return forward(query, key, value, attention_mask, scaling=scaling)
    if posenc is None:
        raise StateError(
            "a patched attention layer was called without the positions that its model computes; call the whole model, "
            "or unpatch_model() first (where the whole model was called, this architecture does not hand keyword "
            "arguments down to its attention: of encodings that act in there it can have none)"
        )
    if posenc.layers is not None and module.layer_idx not in posenc.layers:
        return forward(query, key, value, attention_mask, scaling=scaling)
    if posenc.query_scale is not None:  # before a bias goes into columns: it is not the query's to scale
        query = (query * posenc.query_scale[:, None, :, None]).to(query.dtype)
    if posenc.turns:
        keep = None if posenc.kept is None else partial(posenc.kept.turned, cast(int, module.layer_idx))
        how: dict[str, Any] = {"dropout": dropout, **kwargs}
        joins = query.device.type == "cpu" and is_bare(base, module, query, key, value, attention_mask, how)
        joins = joins and can_join(query, key, value, attention_mask, dropout)
        return turned(base, forward, posenc.turns, query, key, value, attention_mask, scaling, keep, joins)
    if posenc.views is not None:
        return viewed(base, forward, posenc.views, query, key, value, attention_mask, scaling, dropout)
    if posenc.slopes is not None:
        if is_block_mask(attention_mask) and posenc.both_ways:
            raise UnsupportedError(
                "a bias on both sides needs a mask of numbers; model.set_attn_implementation('sdpa')"
            )
        if base == "eager" or posenc.both_ways or (forced() == "dense" and base == "sdpa"):
            attention_mask = dense_bias(posenc, query, key, attention_mask)
            return forward(query, key, value, attention_mask, scaling=scaling)
        how = {"dropout": dropout, **kwargs}
        if suits_flash(base, module, query, key, value, attention_mask, how) and is_straight_once(posenc, key):
            return through_flash(query, key, value, posenc.slopes, scaling), None
        direct = suits_kernel(base, module, query, key, value, attention_mask, how)
        return biased(forward, posenc, query, key, value, attention_mask, scaling, direct)
    if posenc.bias is not None and base == "flex_attention":
        return flexed(forward, posenc, query, key, value, attention_mask, scaling)
    if posenc.bias is not None:
        return with_bias(base, forward, posenc, query, key, value, attention_mask, scaling)
    return forward(query, key, value, attention_mask, scaling=scaling)


def base_function(base: str, module: nn.Module) -> Callable[..., Attended]:
    """The host library's function; eager is the one beside the host's own attention class, where it has one."""
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        found = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    return eager_attention


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    is_causal: bool = True,
    **kwargs: Any,
) -> Attended:
    """softmax(Q K^T · scaling + mask) V in the open, for hosts that have no such function; softmax in float32."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = causal_mask(query.shape[2], key.shape[2], query.device)
    if attention_mask is not None:
        scores = scores + additive(attention_mask, scores.dtype)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# --- a linear bias, carried in Q and K -------------------------------------------------------------------------------


def biased(
    forward: Callable[..., Attended],
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    direct: bool = False,
) -> Attended:
    """Attention with -m_h·(i - j) on the scores, without a tensor of size heads × n × n.

    Softmax ignores what is constant along a row, so the bias may be m_h·j alone, counted from the last key; and m·j is
    a dot product: a few columns appended to Q and K carry it, and the base function keeps its own kernel and mask.
    `direct`: that one row of numbers goes straight to a kernel that can add it.
    """
    assert call.slopes is not None
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype == torch.float32:
        # the kernel would be handed 16 bits anyway, and a single column rounded to them
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    once, kind = call.once or Once(), (query.dtype, query.device, key.shape[2])
    if direct:
        row = once.make(("row", kind), None, lambda: key_bias(call, key))
        return through_kernel(query, key, value, row, scaling), None
    if query.shape[2] == 1 and not is_block_mask(mask):
        bias = once.make(("step", kind), mask, lambda: bias_in_mask(key_bias(call, key), mask, query.dtype))
        return forward(query, key, value, bias, scaling=scaling)
    width, columns = value.shape[-1], ("columns", kind, scaling)
    query_columns, key_columns = once.make(columns, None, lambda: wide_columns(call, query, key, scaling))
    query = torch.cat((query, query_columns[None, :, None].expand(*query.shape[:3], -1)), dim=-1)
    key = torch.cat((key, key_columns[:, None].expand(*key.shape[:3], -1)), dim=-1)
    # a kernel that is told two widths falls back to a slow one, which makes all scores
    value = F.pad(value, (0, max(query.shape[-1] - width, 0)))
    out, weights = forward(query, key, value, mask, scaling=scaling)
    return out[..., :width], weights


def is_straight_once(call: Call, key: Tensor) -> bool:
    """Whether positions go up by one a slot, over just the keys that a layer has; a call asks once."""
    once = call.once or Once()
    whole = key.shape[2] == call.key_positions.shape[1]
    return whole and bool(once.make("straight", None, lambda: is_straight(call)))


def key_distance(call: Call, key: Tensor) -> Tensor:
    """How far each key lies behind the last one, (batch or 1, keys), in tokens, 0 or less."""
    return fitted(call.key_positions, key.shape[2]) - call.key_positions[:, -1:]


def key_bias(call: Call, key: Tensor) -> Tensor:
    """m_h·j, counted from the last key, (batch or 1, heads, 1, keys) float32: the bias without what rows share."""
    assert call.slopes is not None
    return call.slopes[None, :, None, None] * key_distance(call, key)[:, None, None, :].float()


def wide_columns(call: Call, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """`bias_columns`, padded: the GPU's kernels want widths in eights."""
    assert call.slopes is not None
    columns = bias_columns(call.slopes, key_distance(call, key), scaling, query.dtype)
    spare = 0 if query.device.type == "cpu" else -(query.shape[-1] + columns[0].shape[-1]) % 8
    return F.pad(columns[0], (0, spare)), F.pad(columns[1], (0, spare))


def dense_bias(call: Call, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """-m_h·(i - j) and the mask, (batch or 1, heads, n, keys) float32: for eager, which makes the scores in the open.

    And -m_h·|i - j| where all see all: no product of columns gives that, nor a kernel's causal flag. In float32, so
    that the scores are too: a 16-bit score would keep nothing of a bias of hundreds but its first digits.
    """
    assert call.slopes is not None
    n, keys = query.shape[2], key.shape[2]
    distance = call.query_positions[..., None] - fitted(call.key_positions, keys)[:, None]
    if call.both_ways:
        distance = distance.abs()
    elif mask is None and n > 1:
        mask = causal_mask(n, keys, query.device)
    bias = -call.slopes[None, :, None, None] * distance[:, None].float()
    return bias_in_mask(bias, mask, torch.promote_types(query.dtype, torch.float32))


def bias_in_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A bias (batch or 1, heads, n, keys) joined with the mask of a call, as numbers to add to the scores."""
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        return bias.to(dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min).to(dtype)


def bias_columns(slopes: Tensor, distance: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns (heads, c) for Q and (batch or 1, keys, c) for K whose dot product, × scaling, is slope × distance.

    float32 holds both numbers in one column. A 16-bit dtype does not: the slope is split into a sum of three numbers
    that it holds exactly, the distance into three base-256 digits (16.7 million tokens), and the columns are the
    products of all pairs. A fixed number of digits: to ask how far positions reach would make the device wait.
    """
    slopes = slopes / scaling
    if torch.finfo(dtype).bits > 16:
        return slopes[:, None].to(dtype), distance[..., None].to(dtype)
    slope_parts, rest = [], slopes.float()
    for _ in range(3):
        slope_parts.append(rest.to(dtype))
        rest = rest - slope_parts[-1].float()
    left = -distance.long()
    left = left - left.min()  # positions that skip or restart may lie beyond the last key's
    digits = [left // 256**i % 256 for i in range(DIGITS)]
    # 256^i is shared out as 16^i on either side, which keeps float16 within its range up to 16.7 million tokens
    pairs = [(part, digit, 16.0**i) for i, digit in enumerate(digits) for part in slope_parts]
    query_columns = torch.stack([part * power for part, _, power in pairs], dim=-1)
    key_columns = torch.stack([(-digit * power).to(dtype) for _, digit, power in pairs], dim=-1)
    return query_columns, key_columns


# --- registration ----------------------------------------------------------------------------------------------------


def posenc_sdpa(*args: Any, **kwargs: Any) -> Attended:
    """`attend` over the host library's sdpa."""
    return attend("sdpa", *args, **kwargs)


def posenc_eager(*args: Any, **kwargs: Any) -> Attended:
    """`attend` over the host's own eager attention."""
    return attend("eager", *args, **kwargs)


def posenc_flex_attention(*args: Any, **kwargs: Any) -> Attended:
    """`attend` over the host library's FlexAttention."""
    return attend("flex_attention", *args, **kwargs)


for _function in (posenc_sdpa, posenc_eager, posenc_flex_attention):
    AttentionInterface.register(_function.__name__, _function)
    AttentionMaskInterface.register(
        _function.__name__, ALL_MASK_ATTENTION_FUNCTIONS[_function.__name__.removeprefix("posenc_")]
    )
