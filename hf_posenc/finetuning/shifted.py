"""Shifted sparse attention (S², LongLoRA): attention within groups while training, so that its cost grows with n.

Half of the heads see groups that are moved on by half a group, and so carry what one group knows into the next. The
published code rolls the row around, by which its first tokens see its last; here the two ends are half groups instead,
and nothing sees what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.encodings import Rotation
from hf_posenc.errors import OptionError, UnsupportedError
from hf_posenc.evaluate.limits import encoding_of
from hf_posenc.patching import find_backbone

from .settings import FAR, Settings


def within_groups(query: Tensor, key: Tensor, value: Tensor, size: int, scale: float, dropout: float) -> Tensor:
    """Causal attention (batch, heads, n, d) within groups of `size` tokens, n a multiple of it."""
    batch, heads, n, _ = query.shape

    def cut(x: Tensor) -> Tensor:
        return x.reshape(batch, heads, n // size, size, x.shape[-1]).transpose(1, 2).flatten(0, 1)

    out = scaled_dot_product_attention(cut(query), cut(key), cut(value), dropout_p=dropout, is_causal=True, scale=scale)
    return out.unflatten(0, (batch, n // size)).transpose(1, 2).flatten(2, 3)


def shifted(query: Tensor, key: Tensor, value: Tensor, size: int, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal attention in which query i sees key j <= i of its own group: ⌊i/G⌋ = ⌊j/G⌋ in the first half of the heads,
    ⌊(i + G/2)/G⌋ = ⌊(j + G/2)/G⌋ in the other. Shapes (batch, heads, n, d), n a multiple of G = `size`.

    Chen et al. 2023, LongLoRA, 2309.12307, section 3.2.
    """
    heads, n, half = query.shape[1], query.shape[2], size // 2
    first, other = (slice(0, heads - heads // 2), slice(heads - heads // 2, heads))
    plain = within_groups(query[:, first], key[:, first], value[:, first], size, scale, dropout)
    ends = ((0, half, half), (half, n - half, size), (n - half, n, half))
    parts = [
        within_groups(query[:, other, at:to], key[:, other, at:to], value[:, other, at:to], group, scale, dropout)
        for at, to, group in ends
        if to > at
    ]
    return torch.cat((plain, torch.cat(parts, dim=2)), dim=1)


def attention_of(size: int) -> Any:
    """The attention function of groups of `size`, for the host library's registry; outside of training it is sdpa."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if not module.training or query.shape[2] <= size:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is not None or query.shape[2] % size or query.shape[2] != key.shape[2]:
            raise UnsupportedError(f"shifted_group={size}: rows of whole groups without padding, and no cache")
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        out = shifted(query, key, value, size, scale, kwargs.get("dropout", 0.0))
        return out.transpose(1, 2).contiguous(), None

    return attend


def check_groups(model: Any, settings: Settings) -> None:
    """Raise where the groups do not fit the rows, or the model's Q and K are not turned before attention."""
    size, data = settings.shifted_group, settings.data
    if size is None:
        return
    if size % 2 or data.max_length % size or data.mode not in ("concat", *FAR):
        raise OptionError(
            f"shifted_group={size}: give an even number of tokens that divides max_length={data.max_length}, with "
            "mode='concat', 'pose' or 'randomized'"
        )
    patch, backbone = find_backbone(model)
    encoding, used = encoding_of(model), str(backbone.config._attn_implementation)
    rotary = isinstance(encoding, Rotation) or (encoding is None and patch.native == "rope")
    if used != "sdpa" or not rotary or getattr(backbone.config, "sliding_window", None):
        name = encoding.name if encoding is not None else f"{backbone.config.model_type}'s own encoding"
        raise UnsupportedError(
            f"shifted_group with {name} ({used} attention): it takes the place of sdpa in a causal model whose Q and K "
            "are turned before attention (rope, linear, ntk, ntk_by_parts, yarn, llama3), without sliding windows"
        )


@contextmanager
def grouped(model: Any, size: int | None) -> Iterator[None]:
    """Attention within groups of `size` tokens for a block of training; None changes nothing."""
    if size is None:
        yield
        return
    name = f"shifted_sdpa_{size}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention_of(size))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    _, backbone = find_backbone(model)
    before = backbone.config._attn_implementation
    backbone.config._attn_implementation = name
    try:
        yield
    finally:
        backbone.config._attn_implementation = before
