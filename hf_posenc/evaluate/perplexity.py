"""Per-token negative log-likelihood of a long text, in memory that grows with n and never with n x vocabulary.

Two protocols: one forward over the whole text (`token_nll`), or windows that move over it (`windowed_nll`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import OptionError, OptionTypeError, ReachError, UnsupportedError
from hf_posenc.evaluate.windows import windows
from hf_posenc.modules import evaluating

__all__ = [
    "check_reach",
    "finishing",
    "is_unpatched",
    "negative_log_likelihood",
    "ppl",
    "ppl_tail",
    "table_reach",
    "token_nll",
    "windowed_nll",
]

CHUNK_BYTES = 1 << 25
"""Size of one block of fp32 logits, in bytes (32 MiB): the head's weights are read once for all rows of a block."""
CACHED_BYTES = 1 << 22
"""Size of the part of a block that logsumexp takes at a time (4 MiB): its exponentials stay in a core's cache."""


def table_reach(model: nn.Module) -> int | None:
    """Number of positions in the model's own learned table, or None where it has no such table.

    Asked before the forward of an unpatched model: past its end a table fails with a bare index error on the CPU, and
    on a GPU with an assert that takes the whole process's context with it.
    """
    words = getattr(model, "get_input_embeddings", lambda: None)()
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and module is not words and (leaf == "wpe" or "position" in leaf):
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def is_unpatched(model: nn.Module) -> bool:
    """Whether the model's own positions are in effect; true of every architecture that has no patch."""
    from hf_posenc import get_encoding

    try:
        return get_encoding(model) is None
    except UnsupportedError:
        return True


def check_reach(model: nn.Module, length: int) -> None:
    """Raise `ReachError` when an unpatched `model` has a learned table of fewer than `length` positions."""
    reach = table_reach(model)
    if reach is not None and length > reach and is_unpatched(model):
        raise ReachError(
            f"{length} tokens, but the model's own position table ends at {reach}; patch it with 'learned' and a "
            "resize rule, or with an encoding that has no table (rope, alibi, sinusoidal, nope)"
        )


def _hidden_states(model: Any, input_ids: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """The head, its whole input in one forward, (rows, n, width), and the model's own logits of the last position.

    The whole model is called, so that every hook and keyword of the host is in play; a pre-hook on the head keeps its
    input and lets only the last position through. So logits of size n x vocabulary never exist, and the host need not
    know `logits_to_keep`.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    seen: list[Tensor] = []

    def keep_last(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(keep_last)
    try:
        last = model(input_ids=input_ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape[:2] != input_ids.shape:
        raise UnsupportedError(f"{type(model).__name__} does not send each position through its head exactly once")
    return head, seen[0], last


def finishing(config: Any) -> Callable[[Tensor], Tensor]:
    """What the host does to its logits after the head: Cohere multiplies, Granite divides, Gemma 2 soft-caps."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def finish(logits: Tensor) -> Tensor:
        logits = logits * scale if scale != 1.0 else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    return finish


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """logsumexp(logits) - logits[target], logits (n, V) float32, targets (n,): nats, (n,).

    Not torch's cross_entropy, whose float32 on the CPU is too low by 8e-6 nats in the mean at V = 49152: a thousandth
    of a perplexity of 130.
    """
    rows = max(1, CACHED_BYTES // (4 * logits.shape[-1])) if logits.device.type == "cpu" else len(logits)
    total = torch.cat([part.logsumexp(-1) for part in logits.split(rows)])
    return total - logits.gather(-1, targets[:, None])[:, 0]


def _last_nll(model: Any, ids: Tensor, new: Sequence[int], chunk_bytes: int) -> list[Tensor]:
    """Nats of the last `new[row]` tokens of each row of `ids`, (rows, n), from one forward: each (new[row],), CPU."""
    head, hidden, own = _hidden_states(model, ids)
    finish = finishing(model.config)
    last = finish(head(hidden[:, -1:]))
    if not torch.allclose(last.float(), own.float().to(last.device), rtol=1e-3, atol=1e-3, equal_nan=True):
        raise UnsupportedError(f"{type(model).__name__} alters its logits after the head in a way not known here")
    targets = ids.to(last.device)
    step = max(1, chunk_bytes // (4 * last.shape[-1]))
    length = ids.shape[1]

    def block(row: int, start: int) -> Tensor:
        stop = min(start + step, length - 1)
        logits = finish(head(hidden[row : row + 1, start:stop]))[0].float()
        return negative_log_likelihood(logits, targets[row, start + 1 : stop + 1]).cpu()

    return [
        torch.cat([block(row, start) for start in range(length - 1 - count, length - 1, step)])
        for row, count in enumerate(new)
    ]


def _one_text(input_ids: Tensor) -> Tensor:
    if not isinstance(input_ids, Tensor):
        raise OptionTypeError(f"input_ids must be a tensor of token ids, not {type(input_ids).__name__}")
    if input_ids.numel() != input_ids.shape[-1] or input_ids.numel() < 2:
        raise OptionError(f"input_ids must be one text of at least 2 tokens, not of shape {tuple(input_ids.shape)}")
    return input_ids.reshape(-1)


@torch.inference_mode()
def token_nll(model: Any, input_ids: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Negative log-likelihood of tokens 2 ... n given all tokens before each: nats, fp32, (n - 1,), on the CPU.

    nll_t = -log softmax(logits_{t-1})[x_t], from one forward. The log-softmax is taken in fp32 over blocks of positions
    whose logits fill at most `chunk_bytes`. The model's own logits of the last position are compared with those made
    here: a host that treats its logits in an unknown way after the head raises `UnsupportedError` rather than give a
    wrong figure.

    Args:
        model: a causal language model of Transformers.
        input_ids: the tokens of one text, (n,) or (1, n), n >= 2.
        chunk_bytes: bytes of fp32 logits that may exist at a time.
    """
    ids = _one_text(input_ids)
    with evaluating(model):
        return _last_nll(model, ids[None].to(model.device), [len(ids) - 1], chunk_bytes)[0]


@torch.inference_mode()
def windowed_nll(
    model: Any,
    input_ids: Tensor,
    *,
    window: int,
    stride: int | None = None,
    batch_size: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Negative log-likelihood of tokens 2 ... n, each given those before it in its window: nats, fp32, (n - 1,), CPU.

    Every token is scored exactly once, in the windows of `windows(n, window, stride)`: after the first window, with at
    least `window` - `stride` tokens before it. exp of the plain mean is the perplexity weighted by tokens.

    Args:
        model: a causal language model of Transformers.
        input_ids: the tokens of one text, (n,) or (1, n), n >= 2.
        window: tokens of one forward, at least 2.
        stride: tokens by which the window moves, 1 to `window` - 1; by default `window` - 1, the fewest forwards.
        batch_size: windows of one forward.
        chunk_bytes: bytes of fp32 logits that may exist at a time.

    Raises:
        OptionError: a window, stride or batch size that is not allowed.
    """
    ids = _one_text(input_ids)
    plan = windows(len(ids), window, stride)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size must be a whole number of windows, at least 1; got {batch_size!r}")
    found: list[Tensor] = []
    with evaluating(model):
        for at in range(0, len(plan), batch_size):
            batch = plan[at : at + batch_size]
            rows = torch.stack([ids[w.begin : w.end] for w in batch]).to(model.device)
            found += _last_nll(model, rows, [w.new for w in batch], chunk_bytes)
    return torch.cat(found)


def ppl(nll: Tensor) -> float:
    """exp of the mean of `nll` (nats, any shape), summed in fp64; inf where the exponential overflows."""
    return float(torch.exp(nll.double().mean()))


def ppl_tail(nll: Tensor, tail: int) -> float:
    """Perplexity of the last `tail` scored tokens of one text, 1 <= tail <= len(nll)."""
    if not 1 <= tail <= len(nll):
        raise OptionError(f"tail must be from 1 to the number of scored tokens, {len(nll)}; got {tail}")
    return ppl(nll[-tail:])
