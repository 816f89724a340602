"""Perplexity as one would write it by hand."""

from typing import Any

import torch
from torch import Tensor, nn


def plain_nll(model: Any, ids: Tensor) -> Tensor:
    """Nats of tokens 2 ... n from all of the model's own logits at once, (n - 1,) fp32."""
    with torch.no_grad():
        logits = model(ids.reshape(1, -1), use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids.flatten()[1:], reduction="none")
