"""How a linear bias reaches the kernel: which ways there are, which one a call takes, and what layers share of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .errors import unknown

Way = Literal["kernel", "flash", "columns", "dense"]
FLASH_DEVICES = ("cuda",)  # that flash-attn has kernels for
_forced: Way | None = None


@contextmanager
def bias_way(way: Way | None) -> Iterator[None]:
    """Force the way of every linear bias within a `with` block, in all threads; None leaves the choice to each call.

    "kernel": the CPU's flash kernel is given m_h·j, one row for all queries, beside its causal flag. "flash": the
    package flash-attn, on CUDA in 16 bits, is given the slopes. "columns": appended to Q and K. "dense": a tensor of
    heads × queries × keys, the reference. The first two are taken where the kernel knows it and the call is plainly
    causal, and else give way to the third; a step of one query adds its one row where flash-attn does not take it.
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
    """Whether the CPU's flash kernel can be asked directly."""
    return (
        query.shape[2] > 1  # first what costs a step nothing
        and forced() in (None, "kernel")
        and query.device.type == "cpu"
        and is_bare(base, module, query, key, value, mask, kwargs)
        and kernel_adds_rows(query.dtype)
    )


def suits_flash(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether flash-attn can be asked directly, for a call whose positions go up by one a slot."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and forced() in (None, "flash")
        and query.device.type in FLASH_DEVICES
        and is_bare(base, module, query, key, value, mask, kwargs)
        and flash_adds_slopes(query.dtype, query.device, query.shape[3])
    )


def is_bare(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether attention is plainly causal, of one width, with no dropout and nothing else that a kernel must know."""
    return (
        not torch.compiler.is_compiling()  # which takes what torch has a public name for
        and base == "sdpa"
        and mask is None
        and query.shape[3] == value.shape[3]
        and query.shape[2] <= key.shape[2]
        and kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
        and not kwargs.get("dropout")
        and kwargs.get("softcap") is None
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


def through_flash(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, scaling: float) -> Tensor:
    """Causal attention with -m_h·(i - j) by flash-attn, whose last query sees the last key; (batch, n, heads, d)."""
    # not a statement: Transformers asks for every package that an exported model's file imports, wherever in it
    flash_attn = importlib.import_module("flash_attn")
    given = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = flash_attn.flash_attn_func(*given, softmax_scale=scaling, causal=True, alibi_slopes=slopes.float())
    return out


@cache
def kernel_adds_rows(dtype: torch.dtype) -> bool:
    """Whether this release's kernel takes a mask beside its causal flag, and means it: tried once, on a small call."""

    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, scaling: float) -> Tensor:
        keys = torch.arange(key.shape[2])
        return through_kernel(query, key, value, slopes[None, :, None, None] * keys, scaling)

    return adds_bias(attend, dtype, torch.device("cpu"), 8, 5)


@cache
def flash_adds_slopes(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether flash-attn is installed, takes slopes and heads of this width, and means it: tried on two small calls."""
    return all(adds_bias(through_flash, dtype, device, width, n) for n in (5, 1))


def adds_bias(attend: Callable[..., Tensor], dtype: torch.dtype, device: torch.device, width: int, n: int) -> bool:
    """Whether `attend` gives, for the last n queries of 5, causal attention with a linear bias, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        given = [torch.randn(1, 2, k, width, generator=generator).to(device, dtype) for k in (n, 5, 5, n)]
        slopes, at = torch.tensor([0.5, 0.125], device=device), torch.arange(5, device=device)
        gap = at[5 - n :, None] - at
        bias = (-slopes[:, None, None] * gap).masked_fill(gap < 0, -torch.inf).double()
        query, key, value, grad = given
        exact = [x.double().requires_grad_() for x in given[:3]]
        wanted = torch.softmax(exact[0] @ exact[1].transpose(2, 3) * 0.5 + bias, dim=-1) @ exact[2]
        try:
            rough = [x.requires_grad_() for x in (query, key, value)]
            found = attend(*rough, slopes, 0.5).transpose(1, 2)
            found.backward(grad)
        except (AttributeError, ImportError, RuntimeError, TypeError):  # not installed, or another release's interface
            return False
        wanted.backward(grad.double())
        pairs: list[Any] = [(found, wanted), *((ours.grad, theirs.grad) for ours, theirs in zip(rough, exact))]
        limit = 1e-4 if torch.finfo(dtype).bits > 16 else 0.1
        return all(one is not None and bool((one.double() - other).abs().max() < limit) for one, other in pairs)
