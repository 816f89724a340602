"""Under autocast queries and keys come in float32 and values in 16 bits: every path answers as the open one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import DISTANCES, DYNAMIC, PAIRS, Pair, difference, in_pieces, logits
from tiny import tiny_ids
from torch import Tensor

from hf_posenc import verify

LONG = 100


def rms(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).pow(2).mean().sqrt() / want.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.name not in ("learned",) and p.host == "llama"], ids=str)
def test_no_gradient_is_wanted(pair: Pair) -> None:
    """Prefill, padded, pieces with a cache, generate's kind of step; with a gradient and without one."""
    model, ids = pair.patched(), tiny_ids(LONG)
    want, mask = logits(model, ids), torch.ones(1, LONG, dtype=torch.long)
    mask[:, :9] = 0
    padded = logits(model, ids, attention_mask=mask)[:, 9:]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            found = model(input_ids=ids, use_cache=False).logits.detach()
            assert rms(found, want) < 0.1
            assert rms(model(input_ids=ids, attention_mask=mask).logits.detach()[:, 9:], padded) < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        assert rms(in_pieces(model, ids, (40, 50, 1, 9)), want) < 0.1


@pytest.mark.parametrize("name", [DYNAMIC[0], DISTANCES[0], "alibi", "fire"])
def test_verify(name: str) -> None:
    [pair, *_] = [p for p in PAIRS if (p.host, p.name) == ("llama", name)]
    model: Any = pair.patched()
    with torch.autocast("cpu", torch.bfloat16):
        found = {row.name: row.figure for row in verify(model, progress=False, save=False).rows}
    assert found["positions act"] > 0.1
    assert difference(logits(model, tiny_ids(20)), logits(pair.patched(), tiny_ids(20))) == 0
