"""Every encoding on every RoPE decoder through its life: in, out, copied, saved, cast, trained, in eager attention."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import snapshots
import torch
from hosts import PRESENT, HostPair, host_model, host_pairs
from pairs import LENGTH, ROTATIONS, assert_same, generate, in_pieces, logits
from tiny import tiny_ids
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import get_encoding, patch_model, unpatch_model
from hf_posenc.patching import find_backbone
from hf_posenc.positions import DescribeCall

LONG = 80
FAR = 32_768


@host_pairs(4)
def test_unpatch_restores_bit_for_bit(pair: HostPair) -> None:
    model, ids = pair.stock(), tiny_ids(LONG)
    before, was = logits(model, ids), snapshots.of_model(model)
    pair.put_into(model)
    logits(model, ids)
    generate(model, tiny_ids(20), 3)
    unpatch_model(model)
    assert torch.equal(logits(model, ids), before)
    assert snapshots.of_model(model) == was


@host_pairs(1)
def test_copies(pair: HostPair) -> None:
    """A copy, and one from a pickle, has the patch, and can be unpatched alone."""
    stock, model, ids = pair.stock(), pair.patched(), tiny_ids(LONG)
    want, plain = logits(model, ids), logits(stock, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), want) and get_encoding(twin) == get_encoding(model)
        unpatch_model(twin)
        assert torch.equal(logits(twin, ids), plain)
        assert twin.config.to_dict() == stock.config.to_dict() and list(twin.state_dict()) == list(stock.state_dict())
        assert torch.equal(logits(model, ids), want)


@host_pairs(1)
def test_other_models_are_untouched(pair: HostPair) -> None:
    """Two of one family that even share the config object."""
    model, ids = pair.stock(), tiny_ids(LONG)
    sharing = type(model)(model.config).eval()
    want, was = logits(sharing, ids), snapshots.of_model(sharing)
    pair.put_into(model)
    logits(model, ids)
    assert torch.equal(logits(sharing, ids), want) and snapshots.of_model(sharing) == was


@host_pairs(1)
def test_saved_and_loaded(pair: HostPair, tmp_path: Path) -> None:
    model, ids = pair.patched(), tiny_ids(LONG)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path, **attention(model))
    assert torch.equal(logits(loaded, ids), want) and get_encoding(loaded) == get_encoding(model)
    if pair.native:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, **attention(model))
        assert torch.equal(logits(plain, ids), want) and get_encoding(plain) == get_encoding(model)
    unpatch_model(loaded)
    assert torch.equal(logits(loaded, ids), logits(pair.stock(), ids))


@pytest.mark.skipif("deepseek_v3" not in PRESENT, reason="no DeepSeek-V3")
def test_deepseeks_softmax_scale_survives_the_disk(tmp_path: Path) -> None:
    """Also for a plain load: the shares of the temperature stay in the config beside the new factor."""
    yarn = {"factor": 40.0, "original_max_position_embeddings": LENGTH}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0, **yarn}
    model, ids = host_model("deepseek_v3", rope_parameters=rope), tiny_ids(LONG)
    patch_model(model, "yarn", **{**yarn, "factor": 80.0})
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    for load in (hf_posenc.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path)
        assert torch.equal(logits(loaded, ids), want)
        assert loaded.model.layers[0].self_attn.scaling == model.model.layers[0].self_attn.scaling


def attention(model: Any) -> dict[str, str]:
    return {"attn_implementation": model.config._attn_implementation.removeprefix("posenc_")}


def per_pair(pair: HostPair, model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (n, pairs) that a call at `positions` turns its queries with."""
    patch, backbone = find_backbone(model)
    early_cos, early_sin = (table[0].double() for table in patch.tables(backbone, positions))  # type: ignore[union-attr]
    if not pair.dynamic:
        return early_cos, early_sin
    turned = torch.complex(early_cos, early_sin)
    hook = next(h for h in backbone._forward_pre_hooks.values() if isinstance(h, DescribeCall))
    for i, t in enumerate(positions[0]):
        for turn in hook.describe({"input_ids": t.reshape(1, 1), "position_ids": t.reshape(1, 1)}).turns:
            assert turn.tables is not None
            late = torch.complex(*(table[0, 0].double() for table in turn.tables.between(0, 1, t.device)))
            turned[i] *= late[: turned.shape[1]]
    return turned.real, turned.imag


@host_pairs(4, *ROTATIONS)
def test_phases_stay_exact_in_half_precision(pair: HostPair) -> None:
    """Those of a cast model and of one in float32; the oracle's test has those."""
    positions = torch.tensor([[0, 1, LENGTH, 777, FAR - 1]])
    want = torch.complex(*per_pair(pair, pair.patched(), positions))
    found = torch.complex(*per_pair(pair, pair.patched().to(torch.bfloat16), positions))
    assert (found - want).abs().max() < 1e-5


@host_pairs(1)
def test_half_precision_is_close(pair: HostPair) -> None:
    """At far positions where the encoding has no end; rounded frequencies would give a share near 1."""
    ids = tiny_ids(2 * LENGTH + 5)
    start = 0 if pair.name == "learned" else FAR - 100
    positions = torch.arange(start, start + ids.shape[1])[None]
    exact = logits(pair.patched(), ids, position_ids=positions)
    rough = logits(pair.patched().to(torch.bfloat16), ids, position_ids=positions)
    assert (rough - exact).pow(2).mean().sqrt() < 0.35 * exact.pow(2).mean().sqrt()


@host_pairs(1)
def test_meta_and_back(pair: HostPair) -> None:
    """Frequencies come back by themselves; other buffers of a host, such as Gemma's scale, are its own matter."""
    model, ids = pair.patched(), tiny_ids(LONG)
    rotary = find_backbone(model)[1].rotary_emb
    before = [buffer.clone() for buffer in rotary.buffers()]
    rotary.to("meta").to_empty(device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(rotary.buffers(), before))
    assert logits(model, ids).isfinite().all()


def gradients(model: Any, checkpointing: bool) -> dict[str, Tensor]:
    """Of two forwards, at different positions and lengths, before one backward."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    first, second = tiny_ids(50), tiny_ids(41, seed=1)
    mask = (torch.arange(41) >= 9).long()[None]
    losses = [
        model(input_ids=first, labels=first, use_cache=False).loss,
        model(input_ids=second, labels=second, attention_mask=mask, use_cache=False).loss,
    ]
    (losses[0] + losses[1]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


NO_DROPOUT = {"hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0}


@host_pairs(1)
def test_gradients_with_and_without_checkpointing(pair: HostPair) -> None:
    known = pair.stock().config.to_dict()
    still = {key: value for key, value in NO_DROPOUT.items() if key in known}
    plain, checkpointed = (gradients(pair.patched(**still), on) for on in (False, True))
    assert checkpointed.keys() == plain.keys() and len(plain) > 10
    largest = max(float(g.abs().max()) for g in plain.values())
    for name, grad in plain.items():
        assert grad.isfinite().all()
        torch.testing.assert_close(checkpointed[name], grad, rtol=1e-4, atol=1e-5 * largest)


@host_pairs(2)
def test_eager_equals_sdpa(pair: HostPair) -> None:
    """Chosen before the patch, and after it; with padding and with a cache; some hosts are eager anyway."""
    ids, mask = tiny_ids(LONG), (torch.arange(LONG) >= 21).long()[None]
    model = pair.patched()
    want, padded = logits(model, ids), logits(model, ids, attention_mask=mask)[:, 21:]
    before, after = pair.stock(), pair.patched()
    before.set_attn_implementation("eager")
    pair.put_into(before)
    after.set_attn_implementation("eager")
    for eager in (before, after):
        assert_same(logits(eager, ids), want)
        assert_same(logits(eager, ids, attention_mask=mask)[:, 21:], padded)
        assert_same(in_pieces(eager, ids, (30, 40, 1, 1, 8)), want)
    assert after(ids[:, :40], output_attentions=True, use_cache=False).attentions[0].shape == (1, 4, 40, 40)


@pytest.mark.skipif("gemma2" not in PRESENT, reason="no gemma2")
def test_a_capped_bias_is_refused() -> None:
    """FlexAttention caps what stands in Q and K; a bias that is carried there would be capped with it."""
    model = host_model("gemma2")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(hf_posenc.PosencError, match="soft-cap"):
        patch_model(model, "alibi")
