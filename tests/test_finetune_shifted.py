"""Attention within shifted groups: the mask that its definition says, no look ahead, and only while training."""

from pathlib import Path

import pytest
import torch
from pairs import assert_same, difference
from refusals import assert_refused
from tiny import tiny_ids, tiny_model
from tuning import YARN, save_base, tune

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.finetuning.shifted import grouped, shifted

N, SIZE = 24, 8


@pytest.mark.parametrize("heads", [1, 4, 5])
@pytest.mark.parametrize("n", [SIZE, N])
def test_it_is_attention_under_the_mask_of_the_definition(heads: int, n: int) -> None:
    query, key, value = torch.randn(3, 2, heads, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = torch.arange(n)
    masks = []
    for head in range(heads):
        group = (at + (SIZE // 2 if head >= heads - heads // 2 else 0)) // SIZE
        masks.append((group[:, None] == group) & (at[:, None] >= at))
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~torch.stack(masks), -torch.inf)
    torch.testing.assert_close(shifted(query, key, value, SIZE, 0.3), scores.softmax(-1) @ value)


def test_in_a_model_nothing_looks_ahead_and_evaluation_is_full() -> None:
    model, ids = patch_model(tiny_model("llama"), "yarn", factor=4), tiny_ids(N)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        with grouped(model, SIZE):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, full), "in eval mode"
            want = model.train()(input_ids=ids, use_cache=False).logits
            other = ids.clone()
            other[0, 13] = (other[0, 13] + 1) % 90
            moved = model(input_ids=other, use_cache=False).logits
        assert difference(want, full) > 1e-3
        assert_same(moved[:, :13], want[:, :13], 1e-6)
        assert difference(moved[:, 16:20], want[:, 16:20]) > 1e-4, "the shifted heads carry it over the border"
        assert torch.equal(model.eval()(input_ids=ids, use_cache=False).logits, full)


def test_a_run_with_groups(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    checkpointing = {"gradient_checkpointing": True}
    result = tune(base, tmp_path / "out", **YARN, shifted_group=16, training=checkpointing)
    plain = tune(base, tmp_path / "plain", **YARN)
    assert result.losses[1] != pytest.approx(plain.losses[1], abs=1e-4)
    assert result.model.config._attn_implementation == "sdpa"
    assert hf_posenc.get_encoding(hf_posenc.from_pretrained(tmp_path / "out")).name == "yarn"


def test_what_it_does_not_fit(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    for size in (7, 20):
        assert_refused(ValueError, "divides max_length=48", lambda: tune(base, tmp_path, **YARN, shifted_group=size))  # noqa: B023
    packed = {"data": {"mode": "packed"}}
    assert_refused(ValueError, "mode='concat'", lambda: tune(base, tmp_path, **YARN, shifted_group=16, **packed))
    for name in ("alibi", "nope", "dynamic_yarn"):
        assert_refused(
            NotImplementedError,
            f"shifted_group with {name}",
            lambda: tune(base, tmp_path, encoding=name, shifted_group=16),  # noqa: B023
        )
