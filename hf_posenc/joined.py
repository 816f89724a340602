"""Attentions over parts of the keys, by the CPU's kernel, joined into one by the log-sum-exps that it tells."""

from __future__ import annotations

import torch
from torch import Tensor


def can_join(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether the CPU's kernel, which tells its log-sum-exp, can do this layer; its backward is not made for parts."""
    if not query.dtype == key.dtype == value.dtype:  # under autocast, which the kernel below the public one knows not
        return False
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return query.device.type == "cpu" and dropout == 0 and not learning and value.shape[-1] <= query.shape[-1]


def repeated(x: Tensor, heads: int) -> Tensor:
    """(batch, key heads, slots, d) with each head as often as there are query heads to it."""
    groups = heads // x.shape[1]
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def summed(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """An attention over some of the keys, (batch, heads, n, d), and the log of the sum of its weights.

    `causal`: each query sees as many keys as stand before the next one, of as many keys as queries.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=added, scale=scaling
    )


def shared(outs: list[Tensor], sums: list[Tensor]) -> Tensor:
    """Attentions over parts of the keys as that over all of them, (batch, n, heads, d)."""
    shares = torch.softmax(torch.stack(sums), dim=0)[..., None].to(outs[0].dtype)
    return torch.stack([out * share for out, share in zip(outs, shares)]).sum(0).transpose(1, 2)
