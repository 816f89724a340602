"""The loss in chunks is the model's own loss, in value and in every gradient, and never holds all logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import HOSTS
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, tiny_ids, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tuning import TEXTS, YARN, save_base, tune

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.evaluate.perplexity import ppl, token_nll
from hf_posenc.finetuning.chunked_loss import ChunkedLoss

ROWS = 7
CHUNK = 4 * VOCAB * ROWS  # bytes of seven rows of logits


class Largest(TorchDispatchMode):
    """The most rows of any tensor whose last dimension is the vocabulary; the model's own weights do not count."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rows, self.weights = 0, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            of_width = isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == VOCAB
            if of_width and tensor.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return out


def labels_of(ids: Tensor) -> Tensor:
    """Labels with holes: a first token, a run in the middle, most of a row."""
    labels = ids.clone()
    labels[0, 10:17] = -100
    labels[1, 5:] = -100
    return labels


def backward(model: Any, ids: Tensor, labels: Tensor, chunked: bool) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    if chunked:
        loss_of = ChunkedLoss(model, CHUNK)
        with loss_of.of(labels) as kept:
            model(input_ids=ids)
            assert kept.total is not None
            loss = kept.total / (labels[:, 1:] != -100).sum()
        loss_of.remove()
    else:
        loss = model(input_ids=ids, labels=labels).loss
    (3 * loss).backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["full", "lora", "lora on the head"])
@pytest.mark.parametrize("host", HOSTS)
def test_value_and_gradients_are_the_models_own(host: str, how: str) -> None:
    model = patch_model(tiny_model(host), "alibi")
    if how != "full":
        names = {"llama": "q_proj", "gpt2": "c_attn", "bloom": "query_key_value"}
        targets = [names[host], *(["lm_head"] if how != "lora" and host == "llama" else [])]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, fan_in_fan_out=host == "gpt2"))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.1)
    model.train()
    ids = torch.cat((tiny_ids(40), tiny_ids(40, seed=1)))
    labels = labels_of(ids)
    want, plain = backward(model, ids, labels, chunked=False)
    got, ours = backward(model, ids, labels, chunked=True)
    assert got == pytest.approx(want, abs=2e-6)
    assert ours.keys() == plain.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_no_tensor_of_all_logits_exists() -> None:
    model = patch_model(tiny_model("llama"), "yarn", factor=4).train()
    model.lm_head.weight.requires_grad_(False)  # whose gradient would be a tensor of that width, too
    model.model.embed_tokens.weight.requires_grad_(False)
    ids = torch.cat((tiny_ids(40), tiny_ids(40, seed=1)))
    with Largest(model) as seen:
        backward(model, ids, ids, chunked=True)
    assert 0 < seen.rows <= ROWS
    with Largest(model) as seen:
        backward(model, ids, ids, chunked=False)
    assert seen.rows >= 2 * 39


def test_nothing_changes_outside_of_the_block() -> None:
    model = tiny_model("llama")
    ids = tiny_ids(20)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        loss_of = ChunkedLoss(model, CHUNK)
        assert torch.equal(model(input_ids=ids).logits, want)
        with loss_of.of(ids) as kept:
            assert model(input_ids=ids).logits.shape == (1, 1, VOCAB) and kept.total is not None
        assert torch.equal(model(input_ids=ids).logits, want)


def test_bfloat16_under_autocast_is_as_near_as_the_plain_loss() -> None:
    model = patch_model(tiny_model("llama"), "yarn", factor=4).train()
    ids = torch.cat((tiny_ids(40), tiny_ids(40, seed=1)))
    exact, want = backward(model, ids, ids, chunked=False)
    with torch.autocast("cpu", torch.bfloat16):
        near, plain = backward(model, ids, ids, chunked=False)
        got, ours = backward(model, ids, ids, chunked=True)
    assert abs(got - exact) <= 2 * abs(near - exact) + 1e-3

    def off(grads: dict[str, Tensor]) -> float:
        return float(sum((grads[name] - want[name]).pow(2).sum() for name in want)) ** 0.5

    assert off(ours) <= 1.5 * off(plain)


def test_rows_without_a_label_give_zero() -> None:
    model = tiny_model("gpt2").train()
    ids = tiny_ids(12)
    loss_of = ChunkedLoss(model, CHUNK)
    with loss_of.of(torch.full_like(ids, -100)) as kept:
        model(input_ids=ids)
        assert kept.total is not None
        kept.total.backward()
        assert float(kept.total.detach()) == 0


def test_a_run_has_the_plain_trainers_losses(tmp_path: Path) -> None:
    """With accumulated steps of unequal label counts, with checkpointing, and in bf16, which reaches no figure."""
    base = save_base(tmp_path / "base")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    how: dict[str, Any] = {**YARN, "data": {"mode": "packed"}}
    training = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
    ours = tune(base, tmp_path / "ours", **how, training=training)
    plain = tune(base, tmp_path / "plain", **how, training=training, chunked_loss=False)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-5)
    measured = {"lengths": (40, 100), "text": str(tmp_path / "text.txt")}
    half = tune(
        base, tmp_path / "half", **how, training={**training, "bf16": True, "use_cpu": True}, evaluation=measured
    )
    assert half.losses == pytest.approx(plain.losses, abs=0.2) and half.losses != plain.losses
    stock = patch_model(hf_posenc.from_pretrained(base), "yarn", factor=4)
    assert half.evaluations[0].perplexity["40"] == pytest.approx(run_perplexity(stock, tmp_path / "text.txt", 40))
    assert [row.step for row in half.evaluations] == [0, 4] and half.model.dtype == torch.float32


def run_perplexity(model: Any, text: Path, length: int) -> float:
    ids = torch.tensor(list(text.read_bytes()[:length]))
    return ppl(token_nll(model, ids))
