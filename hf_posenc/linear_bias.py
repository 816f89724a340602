"""How a linear bias reaches the kernel: which ways there are, which one a call takes, and what layers share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .errors import unknown

Way = Literal["kernel", "columns", "dense"]
_forced: Way | None = None


@contextmanager
def bias_way(way: Way | None) -> Iterator[None]:
    """Force the way of every linear bias within a `with` block, in all threads; None leaves the choice to each call.

    "kernel": the CPU's flash kernel is given m_h·j, one row for all queries, beside its causal flag. "columns":
    appended to Q and K. "dense": a tensor of heads × queries × keys, the reference. The first is taken where the kernel
    knows it and the call is plainly causal, and else gives way to the second; a step of one query adds its one row in
    any case.
    Raises `UnknownNameError` for another word.
    """
    global _forced
    if way is not None and way not in get_args(Way):
        raise unknown("way of a bias", way, get_args(Way))
    before, _forced = _forced, way
    try:
        yield
    finally:
        _forced = before


def forced() -> Way | None:
    """The way that is forced, or None."""
    return _forced


class Once:
    """What the layers of one call would each make alike: made by the first of them, and gone with the call."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, Any]] = {}

    def make(self, key: Any, beside: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, once for `key` and the very object `beside`, which it depends on."""
        found = self.made.get(key)
        if found is None or found[0] is not beside:
            found = self.made[key] = (beside, make())
        return found[1]


def suits_kernel(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether the CPU's flash kernel can be asked directly: one width, plainly causal, no dropout."""
    return (
        forced() in (None, "kernel")
        and not torch.compiler.is_compiling()  # which takes what torch has a public name for
        and base == "sdpa"
        and mask is None
        and query.device.type == "cpu"
        and query.shape[3] == value.shape[3]
        and 1 < query.shape[2] <= key.shape[2]
        and kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
        and not kwargs.get("dropout")
        and kwargs.get("softcap") is None
        and kernel_adds_rows(query.dtype)
    )


def through_kernel(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Causal attention with a bias (batch or 1, heads, 1, n) alike for all queries; returns (batch, n, heads, d).

    The kernel reads one row of numbers for every block of queries, in float32 at least whatever the dtype of the rest,
    and skips what the causal flag hides: neither a mask of n × n nor a wider Q, K or V.
    """
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key[:, :, :n], value[:, :, :n]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    bias = bias.to(torch.promote_types(query.dtype, torch.float32))
    rows = bias[..., :n].expand(query.shape[0], -1, n, -1)
    return _flash()(query, key, value, 0.0, True, attn_mask=rows, scale=scaling)[0].transpose(1, 2)


def _flash() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@cache
def kernel_adds_rows(dtype: torch.dtype) -> bool:
    """Whether this release's kernel takes a mask beside its causal flag, and means it: tried once, on a small call."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        given = [torch.randn(1, 2, 5, 8, generator=generator).to(dtype) for _ in range(4)]
        bias = torch.randn(1, 2, 1, 5, generator=generator)
        hidden = torch.full((5, 5), -torch.inf).triu(1)
        query, key, value, grad = given
        exact = [x.double().requires_grad_() for x in given[:3]]
        scores = exact[0] @ exact[1].transpose(2, 3) * 0.5 + bias + hidden
        wanted = (torch.softmax(scores, dim=-1) @ exact[2]).transpose(1, 2)
        try:
            rough = [x.requires_grad_() for x in (query, key, value)]
            found = through_kernel(rough[0], rough[1], rough[2], bias, 0.5)
            found.backward(grad.transpose(1, 2))
        except (AttributeError, RuntimeError, TypeError):  # it is not part of torch's public interface
            return False
        wanted.backward(grad.transpose(1, 2).double())
        pairs: list[Any] = [(found, wanted), *((ours.grad, theirs.grad) for ours, theirs in zip(rough, exact))]
        limit = 1e-4 if torch.finfo(dtype).bits > 16 else 0.1
        return all(one is not None and bool((one.double() - other).abs().max() < limit) for one, other in pairs)
