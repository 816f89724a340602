"""Every encoding on every RoPE decoder: the logits go to where an oracle that shares no code says, and only there."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hosts import NOT_HELD, PRESENT, WINDOW, HostPair, host_model, host_pair, host_pairs
from pairs import ENCODINGS, LENGTH, ROTATIONS, assert_same, difference, in_pieces, logits
from tiny import tiny_ids

import hf_posenc
from hf_posenc import list_architectures, patch_model, support, unpatch_model

LONG = 144


def held(hosts: Iterable[str], names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of these that this release of Transformers can hold."""
    return [pair for pair in product(hosts, names) if pair not in NOT_HELD]


every_host = pytest.mark.parametrize("host", PRESENT)


def test_every_host_is_supported() -> None:
    assert set(PRESENT) <= set(list_architectures())
    assert all(support(host, name) for host in PRESENT for name in ENCODINGS)


@host_pairs(len(ENCODINGS))
def test_logits_equal_the_oracle(pair: HostPair) -> None:
    ids = tiny_ids(LONG)
    assert_same(logits(pair.patched(), ids), pair.reference(ids))


@pytest.mark.extended
@pytest.mark.parametrize(("host", "name"), held(PRESENT, [name for name in ENCODINGS if name != "nope"]))
def test_other_options_equal_the_oracle(host: str, name: str) -> None:
    pair, ids = host_pair(host, name, second=True), tiny_ids(LONG)
    assert_same(logits(pair.patched(), ids), pair.reference(ids))


# what a config of these architectures may also say
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": False, "num_attention_heads": 6}),
    ("deepseek_v2", {"q_lora_rank": 12}),
    ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma3_text", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("glm", {"partial_rotary_factor": 1.0}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    ("mistral", {"sliding_window": None}),
    ("olmo2", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    ("phi", {"qk_layernorm": False, "partial_rotary_factor": 1.0}),
    ("phi3", {"partial_rotary_factor": 0.5, "hidden_size": 64}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": None}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False, "partial_rotary_factor": 0.5}),
]


OF_VARIANTS = [
    (host, config, name)
    for host, config in VARIANTS
    for host, name in held([host] if host in PRESENT else [], ["rope", "yarn", "dynamic_ntk", "alibi", "sinusoidal"])
]


@pytest.mark.parametrize(("host", "config", "name"), OF_VARIANTS, ids=lambda v: str(v)[:12])
def test_other_configs_equal_the_oracle(host: str, config: dict[str, Any], name: str) -> None:
    options = {"factor": 4} if name in ("yarn", "dynamic_ntk") else {}
    pair, ids = HostPair(host, name, options, config), tiny_ids(LONG)
    model = pair.patched()
    assert_same(logits(model, ids), pair.reference(ids))
    assert_same(in_pieces(model, ids, (25, 10, 1, 1, 40, 1, 66)), logits(model, ids))


SKIPPING = [*range(10), *range(17, 30), *range(31, 45), 60, *range(70, 81), *range(110, 140)]


@host_pairs(2)
def test_positions_that_skip(pair: HostPair) -> None:
    ids, positions = tiny_ids(len(SKIPPING)), torch.tensor([SKIPPING])
    out = logits(pair.patched(), ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert_same(out, pair.reference(ids, positions=SKIPPING))


@host_pairs(4)
def test_logits_move(pair: HostPair) -> None:
    ids = tiny_ids(LENGTH)
    moved = difference(logits(pair.patched(), ids), logits(pair.stock(), ids))
    if pair.dynamic and pair.name != "longrope":
        assert moved < 1e-5, "below the trained length a dynamic encoding is the plain model"
        beyond = tiny_ids(3 * LENGTH)
        moved = difference(logits(pair.patched(), beyond), logits(pair.stock(), beyond))
    assert moved > 1e-3


@every_host
def test_the_native_encoding_changes_nothing(host: str) -> None:
    model, ids = host_model(host), tiny_ids(LONG)
    before = logits(model, ids)
    assert torch.equal(logits(patch_model(model, "rope"), ids), before)


STOCK: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": LENGTH},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
}


def configured(host: str, kind: str, **parameters: Any) -> Any:
    """A stock model whose config names that type itself; a head width of None is not understood by all types."""
    own = host_model(host).config
    local = own.rope_parameters.get("full_attention")
    new = {**(local or own.rope_parameters), "rope_type": kind, **parameters}
    wide = {} if getattr(own, "head_dim", 0) is not None else {"head_dim": own.hidden_size // own.num_attention_heads}
    return host_model(host, rope_parameters={**own.rope_parameters, "full_attention": new} if local else new, **wide)


# Phi-3's config takes no type but longrope: there the oracle's test holds
HELD = [(host, kind) for host in PRESENT for kind in STOCK if host != "phi3" and (host, kind) not in NOT_HELD]


@pytest.mark.parametrize(("host", "kind"), HELD)
def test_native_types_are_stock(host: str, kind: str) -> None:
    """Bit for bit what Transformers itself makes of that config, and a model that has it is left as it is."""
    stock, ids = configured(host, kind, **STOCK[kind]), tiny_ids(LONG)
    want = logits(stock, ids)
    model = patch_model(host_model(host), kind, **STOCK[kind])
    assert torch.equal(logits(model, ids), want)
    again = patch_model(stock, kind, **{"original_max_position_embeddings": LENGTH, **STOCK[kind]})
    assert torch.equal(logits(again, ids), want)
    assert torch.equal(logits(unpatch_model(again), ids), want)


def test_phi3_has_longrope_of_its_own() -> None:
    pair = host_pair("phi3", "longrope")
    lists = {key: pair.options[key] for key in ("short_factor", "long_factor", "factor")}
    stock = configured("phi3", "longrope", original_max_position_embeddings=LENGTH, **lists)
    options = {"original_max_position_embeddings": LENGTH, **lists}
    for n in (LENGTH, LONG):
        model = patch_model(stock, "longrope", schedule="whole", **options)
        patched = logits(model, tiny_ids(n))
        assert torch.equal(patched, logits(unpatch_model(model), tiny_ids(n)))
    for n in (LENGTH, LONG):  # by segments, over the host's own lists taken out
        want = pair.reference(tiny_ids(n))
        model = patch_model(stock, "longrope", **options)
        assert_same(logits(model, tiny_ids(n)), want)
        assert_same(in_pieces(model, tiny_ids(n), (20, n - 20)), want)
        unpatch_model(model)


def test_phi3_takes_no_other_type() -> None:
    with pytest.raises(hf_posenc.PosencError, match="segments"):
        patch_model(host_model("phi3"), "dynamic_ntk", factor=2, schedule="whole")
    model = patch_model(host_model("phi3"), "yarn", factor=4)
    assert model.config.rope_parameters["rope_type"] == "longrope"


@pytest.mark.skipif("gpt_oss" not in PRESENT, reason="no gpt_oss")
def test_gpt_oss_as_it_is_shipped() -> None:
    """YaRN of its own, with a ramp that is not rounded; and it verifies as the model's own."""
    own = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    length = {"original_max_position_embeddings": 4096}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, **own, **length}
    stock, ids = host_model("gpt_oss", rope_parameters=rope, head_dim=64, max_position_embeddings=131072), tiny_ids(99)
    want = logits(stock, ids)
    model = patch_model(stock, "yarn", **own, **length)
    assert torch.equal(logits(model, ids), want)
    report = hf_posenc.verify(model, progress=False)
    assert report.passed and "own encoding" in report.table(), report.table()


# --- layers that are not like the others -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROTATIONS if ("gemma3_text", name) not in NOT_HELD])
def test_gemma3_turns_only_its_global_layers(name: str) -> None:
    """The tables of local layers are the host's own, bit for bit."""
    pair = host_pair("gemma3_text", name)
    model, stock = pair.patched(), pair.stock()
    positions, x = torch.arange(LONG)[None], torch.zeros(1)
    found, want = (m.model.rotary_emb(x, positions, "sliding_attention") for m in (model, stock))
    assert all(torch.equal(a, b) for a, b in zip(found, want))
    assert model.config.rope_parameters["sliding_attention"] == stock.config.rope_parameters["sliding_attention"]


def test_gemma3_without_a_global_layer() -> None:
    model = host_model("gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with pytest.raises(hf_posenc.PosencError, match="full_attention"):
        patch_model(model, "yarn", factor=4)
    ids = tiny_ids(LONG)
    assert difference(logits(patch_model(model, "alibi"), ids), logits(unpatch_model(model), ids)) > 1e-3


def test_a_model_that_looks_both_ways() -> None:
    """As an embedding model made of Gemma 3 does: only what acts inside the attention function is refused."""
    model = host_model("gemma3_text", use_bidirectional_attention=True)
    for name in ("alibi", "dynamic_yarn"):
        with pytest.raises(hf_posenc.PosencError, match="use_bidirectional_attention=True"):
            patch_model(model, name)
    was = logits(model, tiny_ids(40))
    assert difference(logits(patch_model(model, "linear", factor=4), tiny_ids(40)), was) > 1e-3


@pytest.mark.parametrize("name", ["dynamic_yarn", "yarn", "alibi"])
def test_smollm3_layers_without_rotation_stay_so(name: str) -> None:
    """Such layers give what the stock ones give; a model that has no other is refused."""
    pair, ids = host_pair("smollm3", name), tiny_ids(LONG)
    bare = {"no_rope_layers": [0, 0, 1]}
    stock, model = pair.stock(**bare), pair.put_into(pair.stock(**bare))
    with torch.no_grad():
        want, found = (m(ids, use_cache=False, output_hidden_states=True).hidden_states for m in (stock, model))
    assert torch.equal(found[2], want[2]) and difference(found[3], want[3]) > 1e-2
    with pytest.raises(hf_posenc.PosencError, match="none"):
        patch_model(host_model("smollm3", no_rope_layers=[0, 0, 0]), pair.name, **pair.options)


@pytest.mark.parametrize("name", ["alibi", "dynamic_yarn", "nope"])
@pytest.mark.parametrize("host", [host for host in ("mistral", "starcoder2") if host in PRESENT])
def test_a_local_mask_stays_local(host: str, name: str) -> None:
    """Two layers reach 2 × (window - 1) tokens back and no further."""
    model, ids = host_pair(host, name).patched(), tiny_ids(LONG)
    changed = ids.clone()
    changed[0, : LONG - 1 - 2 * (WINDOW - 1)] = 5
    assert torch.equal(logits(model, ids)[:, -1], logits(model, changed)[:, -1])


# --- DeepSeek's softmax scale ----------------------------------------------------------------------------------------

MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.0}
YARN = {"factor": 40.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": LENGTH}


@pytest.mark.parametrize("host", [host for host in ("deepseek_v2", "deepseek_v3") if host in PRESENT])
def test_the_softmax_scale_follows(host: str) -> None:
    stock, ids = configured(host, "yarn", **YARN, **MSCALE), tiny_ids(LONG)
    scale, want = stock.model.layers[0].self_attn.scaling, logits(stock, ids)
    plain = host_model(host)
    assert scale != plain.model.layers[0].self_attn.scaling or host == "deepseek_v2"
    assert torch.equal(logits(patch_model(stock, "yarn", **YARN), ids), want), "its own"
    unpatch_model(stock)
    for name in ("linear", "dynamic_yarn", "alibi", "nope"):
        pair = host_pair(host, name)
        options = {"original_max_position_embeddings": LENGTH} if name in ROTATIONS else {}
        patch_model(stock, name, **{**pair.options, **options})
        assert_same(logits(stock, ids), pair.reference(ids))
        unpatch_model(stock)
        assert stock.model.layers[0].self_attn.scaling == scale
    twice = configured(host, "yarn", **{**YARN, "factor": 80.0}, **MSCALE)
    assert torch.equal(logits(patch_model(stock, "yarn", **{**YARN, "factor": 80.0}), ids), logits(twice, ids))
