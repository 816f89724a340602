"""Add-ons on every host beyond the three main ones, against the oracle."""

import pytest
import torch
from hosts import PRESENT, HostPair, host_model, rotary_width
from other_hosts import CONFIGS, ENCODERS, NO_CACHE, width
from other_hosts import Pair as OtherPair
from other_hosts import text as other_text
from pairs import ADD_ONS, LENGTH, assert_same, in_pieces, logits
from test_add_ons import LONG, NOW, ROUNDED
from tiny import tiny_ids, tiny_model

import hf_posenc
from hf_posenc import patch_model, unpatch_model


def added(host: str, note: str) -> HostPair:
    name, options = ADD_ONS[note]
    return HostPair(host, name, options, note=note)


ON_ROPE_HOSTS = [
    pytest.param(host, note, marks=() if note == NOW[i % 3] else pytest.mark.extended, id=f"{host}-{note}")
    for i, host in enumerate(PRESENT)
    for note in ADD_ONS
]


@pytest.mark.parametrize(("host", "note"), ON_ROPE_HOSTS)
def test_rope_hosts_equal_the_oracle(host: str, note: str) -> None:
    pair, ids = added(host, note), tiny_ids(LONG)
    try:
        model = pair.patched()
    except hf_posenc.UnsupportedError as error:  # 5.4.0 has no rope type for a layer type that could hold it
        assert host == "gemma3_text" and "no rope type" in str(error)
        return
    assert_same(logits(model, ids), pair.reference(ids), ROUNDED)
    assert_same(in_pieces(model, ids, (25, 10, 1, 1, 40, 1, 66)), logits(model, ids))


OTHERS = [
    pytest.param(host, note, marks=() if note == "yarn-both" else pytest.mark.extended)
    for host in CONFIGS
    if host not in ENCODERS
    for note in ADD_ONS
]


@pytest.mark.parametrize(("host", "note"), OTHERS)
def test_other_hosts_equal_the_oracle(host: str, note: str) -> None:
    """And what a rotary Falcon or GPT-J has of its own is never taken for the same."""
    pair, ids = OtherPair(host, *ADD_ONS[note]), other_text(LONG)
    model = pair.patched()
    assert_same(logits(model, ids), pair.reference(ids), ROUNDED)
    if host not in NO_CACHE:
        assert_same(in_pieces(model, ids, (25, 10, 1, 1, 107)), logits(model, ids))
    if pair.options.get("logn"):
        assert model.config.hf_posenc["native"] is False
    assert width(host) % 2 == 0


@pytest.mark.parametrize("host", ["bert", "roberta"])
def test_encoders_take_whole_wavelengths(host: str) -> None:
    pair, ids = OtherPair(host, "ntk", {"factor": 3, "resonance": True}), other_text(LONG)
    assert_same(logits(pair.patched(), ids), pair.reference(ids), ROUNDED)


@pytest.mark.parametrize("host", [host for host in ("deepseek_v2", "deepseek_v3") if host in PRESENT])
def test_deepseek_keeps_its_softmax_scale(host: str) -> None:
    """Its YaRN with whole wavelengths is its YaRN with the frequencies rounded, and all else as it was."""
    own = {"factor": 40.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": LENGTH}
    parameters = {**host_model(host).config.rope_parameters, "mscale": 0.7, "mscale_all_dim": 1.0}
    ids = tiny_ids(LONG)
    stock = host_model(host, rope_parameters={**parameters, "rope_type": "yarn", **own})
    scale = stock.model.layers[0].self_attn.scaling
    model = patch_model(stock, "yarn", resonance=True, **own)
    assert model.model.layers[0].self_attn.scaling == scale
    found = logits(model, ids)
    unpatch_model(model)
    rotary = stock.model.rotary_emb
    rotary.inv_freq = 2 * torch.pi / (2 * torch.pi / rotary.inv_freq).round()
    assert len(rotary.inv_freq) == rotary_width(host) // 2
    assert_same(found, logits(stock, ids), ROUNDED)


def test_the_hosts_own_rotation_stays_in_use() -> None:
    """With log-n scaling on a RoPE host its rotary module turns; only the queries are touched after it."""
    model = patch_model(tiny_model("llama"), "yarn", factor=4, logn=True)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    plain = patch_model(tiny_model("llama"), "yarn", factor=4)
    positions, x = torch.arange(LONG)[None], torch.zeros(1)
    for a, b in zip(model.model.rotary_emb(x, positions), plain.model.rotary_emb(x, positions)):
        assert torch.equal(a, b)
