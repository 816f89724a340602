"""The loss of a language model in chunks of positions, so that logits of size n × vocabulary never exist.

At 8192 positions and 49152 tokens the logits alone are 1.5 GiB, and a plain loss holds three to four of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_posenc.errors import UnsupportedError
from hf_posenc.evaluate.perplexity import finishing

from .windows import IGNORED

CHUNK_BYTES = 1 << 25
"""Size of one chunk of fp32 logits, in bytes (32 MiB); three of that size exist at a time."""


class SummedLoss(torch.autograd.Function):
    """Σ_t -log softmax(score(h_t))[y_t] over rows h (n, width) and targets y (n,), fp32, with its gradients.

    The gradients are taken chunk by chunk in the forward pass, while a chunk's logits exist: so the backward pass
    computes nothing twice, and only multiplies what is held, (n, width) and one tensor a trained parameter of the head.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, score: Callable[[Tensor], Tensor], rows: int, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        trained = [hidden, *parameters] if any(ctx.needs_input_grad) else []
        sums = [torch.zeros_like(tensor) for tensor in trained]
        for at in range(0, len(targets), rows):
            part = hidden[at : at + rows].detach().requires_grad_(bool(trained))
            with torch.set_grad_enabled(bool(trained)):
                loss = cross_entropy(score(part).float(), targets[at : at + rows], reduction="sum")
            total += loss.detach()
            if trained:
                found = torch.autograd.grad(loss, [part, *parameters], allow_unused=True)
                sums[0][at : at + rows] = found[0]
                for held, new in zip(sums[1:], found[1:]):
                    held.add_(new) if new is not None else held
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, *others = (held * grads[0].to(held.dtype) for held in ctx.saved_tensors)
        return first, None, None, None, *others


class ChunkedLoss:
    """Two hooks on a model's head: within `of(labels)` its next forward leaves the summed loss in `total`.

    The head is then given the last position only, and the loss is made inside its own forward: what shards or gathers
    its weights (DDP, FSDP2, ZeRO-3) sees nothing unusual. Outside of `of` nothing changes.
    """

    def __init__(self, model: Any, chunk_bytes: int = CHUNK_BYTES) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = inner.get_output_embeddings()
        if head is None:
            raise UnsupportedError(f"{type(inner).__name__} has no language-model head; load it for causal LM")
        self.total: Tensor | None = None
        self._chunk_bytes = chunk_bytes
        self._finish = finishing(inner.config)
        self._labels: Tensor | None = None
        self._hidden: Tensor | None = None
        self._handles = [head.register_forward_pre_hook(self._keep), head.register_forward_hook(self._compute)]

    def remove(self) -> None:
        """Take the hooks out again."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def of(self, labels: Tensor) -> Iterator[ChunkedLoss]:
        """For one forward of the model on rows with these labels (batch, n), not shifted, -100 where none is."""
        self._labels, self.total = labels, None
        try:
            yield self
        finally:
            self._labels = self._hidden = self.total = None

    def _keep(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._labels is None:
            return None
        if self._hidden is not None or args[0].shape[:2] != self._labels.shape:
            raise UnsupportedError("this model does not send each position through its head exactly once")
        self._hidden = args[0]
        return (args[0][:, -1:], *args[1:])

    def _compute(self, head: nn.Module, _args: Any, output: Tensor) -> None:
        if self._labels is None or self._hidden is None:
            return
        targets = self._labels[:, 1:].to(output.device)
        counted = targets != IGNORED
        parameters = [p for p in head.parameters() if p.requires_grad]
        rows = max(1, self._chunk_bytes // (4 * output.shape[-1]))
        hidden = self._hidden[:, :-1]
        hidden = hidden.flatten(0, 1) if bool(counted.all()) else hidden[counted]
        self.total = SummedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, targets[counted], lambda part: self._finish(head.forward(part)), rows, *parameters
        )
