"""FSDP2 over patched models, in as many processes as torchrun has started: `sharded.py all`, or a list of pairs."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from pairs import PAIRS, TRAINED, Pair, assert_same, logits
from tiny import tiny_ids
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import ModuleList

from hf_posenc import unpatch_model
from hf_posenc.errors import StateError

OWN = ("learned", *TRAINED)  # what is trained and new


def shard(model: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = next(module for module in model.modules() if isinstance(module, ModuleList))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def prepared(pair: Pair, order: str) -> Any:
    """A patched model that is sharded; None where the patch is refused, as it must be for a table of its own."""
    model = pair.stock()
    if order == "patched first":
        pair.put_into(model)
        shard(model)
        return model
    shard(model)
    try:
        pair.put_into(model)
    except StateError as error:
        assert pair.name in OWN and "patch the model first" in str(error), error
        return None
    assert pair.name not in OWN, "each process would train a table of its own"
    return model


def check(pair: Pair) -> None:
    """Each process has rows of its own; together they are one process with all of them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = [tiny_ids(60, seed=i) for i in range(size)]
    want = gradients(pair.patched().train(), torch.cat(rows))
    for order in ("patched first", "sharded first"):
        model = prepared(pair, order)
        if model is None:
            continue
        found = gradients(model.train(), rows[rank])
        assert found.keys() == want.keys(), (pair, order)
        for name, grad in want.items():
            beside = [other for key, other in want.items() if key.rpartition(".")[0] == name.rpartition(".")[0]]
            largest = max(float(other.abs().max()) for other in beside)  # FIRE's bias has none: softmax ignores it
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * largest, msg=f"{pair} {order} {name}")
        assert_same(logits(model.eval(), rows[rank]), logits(pair.patched(), rows[rank]), 1e-6)
        unpatch_model(model)
        assert_same(logits(model, rows[rank][:, :24]), logits(pair.stock(), rows[rank][:, :24]), 1e-6)


def main(chosen: str) -> None:
    for pair in PAIRS:
        if chosen == "all" or str(pair) in chosen.split(","):
            check(pair)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
    print("equal")
