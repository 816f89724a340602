"""Add-ons (whole wavelengths, log-n scaling) and the encodings that they go on: exact on every kind of host."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from other_hosts import ENCODERS, tiny_host
from pairs import ADDED, LENGTH, Pair, assert_same, difference, generate, in_pieces, logits, reference
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import from_pretrained, get_encoding, patch_model, unpatch_model, verify
from hf_posenc.encodings import Rope, Rotation
from hf_posenc.exporting.gguf_file import additions
from hf_posenc.exporting.targets import for_gguf, subject
from hf_posenc.registry import create

LONG = 144
# float32 holds neither 2π/6 nor its angle at position 143 as exactly as RoPE's first frequency, which is 1
ROUNDED = 3e-4
SCALED = [pair for pair in ADDED if pair.options.get("logn")]
NOW = ("yarn-both", "dynamic_yarn-both", "alibi-logn")


def over(pairs: list[Pair]) -> Any:
    """Parametrise over pairs; some of each kind now, all in test-all."""
    return pytest.mark.parametrize(
        "pair", [pytest.param(p, id=str(p), marks=() if p.note in NOW else pytest.mark.extended) for p in pairs]
    )


every_pair, every_scaled = over(ADDED), over(SCALED)


# --- options and records ---------------------------------------------------------------------------------------------


def test_an_add_on_that_is_off_is_not_named() -> None:
    """What was recorded before there were any loads, and is equal."""
    yarn = create("yarn", factor=4)
    assert set(yarn.options()) == {"factor", "beta_fast", "beta_slow", "truncate"}
    assert create("yarn", **yarn.options()) == yarn == create("yarn", factor=4, resonance=False, logn=False)
    on = create("yarn", factor=4, resonance=True, logn=True)
    assert on != yarn and on.options() == {**yarn.options(), "resonance": True, "logn": True}
    assert create("yarn", **on.options()) == on
    assert create("alibi").options() == {"factor": 1.0} and create("nope").options() == {}


def test_every_rotation_takes_both() -> None:
    for row in hf_posenc.list_encodings():
        assert row.seam != "rotation" or row.options[-2:] in (("resonance", "logn"), ("logn", "resonance")), row.name
    for name in ("sinusoidal", "learned"):
        with pytest.raises(hf_posenc.PosencError, match="unknown option"):
            create(name, logn=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dynamic_ntk", {"resonance": True, "schedule": "whole"}, "schedule='segments'"),
        ("alibi", {"original_max_position_embeddings": 32}, "logn=True"),
        ("nope", {"original_max_position_embeddings": 32}, "logn=True"),
        ("rope", {"logn": 1}, "True or False"),
        ("p_rope", {"p": 0}, "nope"),
        ("p_rope", {"p": 1.1}, "at most 1"),
        ("ntk_mixed", {"factor": 2, "exponent": 1.5}, "from 0 to 1"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_posenc.PosencError, match=message):
        create(name, **options)


def test_what_a_host_cannot_have() -> None:
    with pytest.raises(hf_posenc.PosencError, match=r"p_rope: p=0\.1 of 6 pairs"):
        patch_model(tiny_model("gpt2"), "p_rope", p=0.1)
    for name in ("rope", "alibi", "nope"):
        with pytest.raises(hf_posenc.PosencError, match="needs the length"):
            patch_model(tiny_model("bloom"), name, logn=True)
    for host in ENCODERS:
        for name in ("yarn", "alibi"):
            with pytest.raises(hf_posenc.PosencError, match=r"logn goes by the number.*is_decoder"):
                patch_model(tiny_host(host), name, logn=True, **({"factor": 2} if name == "yarn" else {}))
    with pytest.raises(hf_posenc.PosencError, match="reorder_and_upcast_attn"):
        patch_model(tiny_model("gpt2", reorder_and_upcast_attn=True), "rope", logn=True)


def test_a_class_with_frequencies_past_the_add_ons_is_refused() -> None:
    class Own(Rope):
        def inv_freq(self, dim: int) -> Any:
            return Rope(rope_theta=self.theta).inv_freq(dim)

    assert Own().resonance is False
    with pytest.raises(hf_posenc.PosencError, match="overrides `formula`"):
        Own(resonance=True)


# --- what the model gives --------------------------------------------------------------------------------------------


@every_pair
def test_logits_equal_the_oracle(pair: Pair) -> None:
    ids = tiny_ids(LONG)
    want = reference(pair, ids)
    for attention in ("sdpa", "eager") if pair.host != "bloom" else (None,):
        assert_same(logits(pair.patched(attn_implementation=attention), ids), want, ROUNDED)


@every_scaled
def test_up_to_the_trained_length_nothing_is_scaled(pair: Pair) -> None:
    """Bit for bit, and past it the scale is seen."""
    model, plain = pair.patched(), patch_model(pair.stock(), pair.name, **without_logn(pair.options))
    ids = tiny_ids(LONG)
    assert torch.equal(logits(model, ids[:, :LENGTH]), logits(plain, ids[:, :LENGTH]))
    assert difference(logits(model, ids), logits(plain, ids)) > 1e-3


def without_logn(options: dict[str, Any]) -> dict[str, Any]:
    asked = "factor" in options and "beta_fast" not in options  # ALiBi, which asks for L on behalf of logn alone
    gone = {"logn", "original_max_position_embeddings"} if asked or len(options) <= 2 else {"logn"}
    return {key: value for key, value in options.items() if key not in gone}


@every_pair
def test_calls_in_pieces_and_batches(pair: Pair) -> None:
    """Cached = uncached; padded = alone; a document of a pack = the document; positions that skip."""
    model, ids = pair.patched(), tiny_ids(LONG)
    whole = logits(model, ids)
    assert_same(in_pieces(model, ids, (25, 10, 1, 1, 40, 1, 66)), whole)
    short, rows = ids[:, :50], torch.cat((ids[:, :90], ids[:, :90]))
    rows[0, :40], rows[0, 40:] = 3, short
    mask = torch.ones_like(rows)
    mask[0, :40] = 0
    together = logits(model, rows, attention_mask=mask)
    assert_same(together[:1, 40:], logits(model, short))
    assert_same(together[1:], logits(model, ids[:, :90]))
    if pair.host != "bloom":  # which takes no position_ids without a mask
        packed = torch.cat((torch.arange(50), torch.arange(94)))[None]
        joined = torch.cat((short, ids[:, :94]), dim=1)
        assert_same(logits(model, joined, position_ids=packed)[:, 50:], whole[:, :94])
    skipped = torch.cat((torch.arange(40), torch.arange(70, 120)))[None]
    found = logits(model, ids[:, :90], position_ids=skipped, attention_mask=torch.ones(1, 90, dtype=torch.long))
    assert_same(found, reference(pair, ids[:, :90], positions=skipped[0].numpy()), ROUNDED)


@every_scaled
def test_greedy_generation_with_and_without_a_cache(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(LENGTH - 4)
    assert torch.equal(generate(model, ids, 12), generate(model, ids, 12, use_cache=False))


@pytest.mark.parametrize("pair", [p for p in ADDED if p.host == "llama"], ids=str)
def test_gradients(pair: Pair) -> None:
    """Equal with gradient checkpointing, also where another call comes between."""
    ids, found = tiny_ids(60), []
    for checkpointing in (False, True):
        model = pair.patched().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(input_ids=row, labels=row, use_cache=False).loss for row in (ids, ids[:, :20])]
        sum(losses[1:], losses[0]).backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert_same(found[1], found[0], 1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("pair", [p for p in SCALED if p.host == "llama"], ids=str)
def test_flex_attention(pair: Pair) -> None:
    if pair.dynamic:
        with pytest.raises(hf_posenc.PosencError, match="FlexAttention"):
            pair.patched(attn_implementation="flex_attention")
        return
    ids = tiny_ids(60)
    with torch.compiler.set_stance("force_eager"):
        assert_same(logits(pair.patched(attn_implementation="flex_attention"), ids), logits(pair.patched(), ids))


# --- what is left of it ----------------------------------------------------------------------------------------------


@every_pair
def test_taken_out_again(pair: Pair) -> None:
    model, ids = pair.stock(), tiny_ids(LENGTH)
    before, config = logits(model, ids), model.config.to_dict()
    patch_model(model, pair.name, **pair.options)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert torch.equal(logits(unpatch_model(model), ids), before) and model.config.to_dict() == config


@every_pair
def test_saved_and_loaded(pair: Pair, tmp_path: Path) -> None:
    """What scales queries is no native result: a plain reload would lose it, and is refused."""
    model, ids = pair.patched(), tiny_ids(LONG)
    model.save_pretrained(tmp_path)
    native = pair.host == "llama" and not pair.options.get("logn")
    assert model.config.hf_posenc["native"] is native
    again = from_pretrained(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert get_encoding(again) == get_encoding(model)
    if native:
        assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(model, ids), 1e-6)
    unpatched = unpatch_model(again)
    assert torch.equal(logits(unpatched, ids[:, :LENGTH]), logits(pair.stock(), ids[:, :LENGTH]))


@every_pair
def test_verify(pair: Pair) -> None:
    report = verify(pair.patched(), progress=False)
    assert report.passed, report.table()


@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_verify_misses_a_scale_that_is_gone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(tiny_model(host), "yarn", factor=4, logn=True)
    monkeypatch.setattr(Rotation, "query_scale", lambda *_: None)
    report = verify(model, progress=False, save=False)
    assert not report.passed and "what a query is multiplied with" in report.table()


@pytest.mark.parametrize("pair", [p for p in ADDED if p.note in ("yarn-both", "alibi-logn")], ids=str)
def test_exported(pair: Pair, tmp_path: Path) -> None:
    """The modelling file holds the scale; servers that read the config alone say that they cannot have it."""
    model, ids = pair.patched(), tiny_ids(LONG)
    made = hf_posenc.export(model, tmp_path / "out")
    how = {verdict.target: verdict for verdict in made.row}
    assert how["transformers"].how == "code"
    assert how["vllm"].refused and how["gguf"].refused and "logn" in how["vllm"].text
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert_same(logits(again.eval(), ids), logits(model, ids), 1e-6)


@pytest.mark.parametrize(("name", "options"), [("p_rope", {}), ("llama3", {"resonance": True})])
def test_llama_cpp_needs_factors_a_pair(name: str, options: dict[str, Any]) -> None:
    """Those of a still pair are finite."""
    model = patch_model(tiny_model("llama"), name, **options)
    assert "puts back" in for_gguf(subject(model)).text
    encoding: Any = get_encoding(model)
    tensors, values = additions(encoding, "llama", 16)
    plain = Rope(rope_theta=encoding.theta).inv_freq(16)[0].numpy()
    found, scale = encoding.inv_freq(16)
    factors = tensors["rope_freqs.weight"]
    assert values["scaling.attn_factor"] == scale and abs(plain / factors - found.numpy()).max() < 1e-7
    assert factors.max() < 1e25
