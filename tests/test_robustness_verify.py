"""What `verify` finds, and what it leaves alone; edits made to the config of a patched model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import snapshots
import torch
from pairs import LENGTH, logits
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_posenc import Verification, from_pretrained, patch_model, unpatch_model, verify
from hf_posenc.errors import UnsupportedError
from hf_posenc.modules import AddVectors

BLOOM = {"original_max_position_embeddings": LENGTH}


def checked(model: Any, save: bool | None = False) -> Verification:
    return verify(model, progress=False, save=save)


def result(report: Verification, name: str) -> bool | None:
    return next(row.passed for row in report.rows if row.name == name)


@pytest.mark.parametrize("host, name", [("llama", "alibi"), ("llama", "dynamic_yarn"), ("gpt2", "alibi")])
def test_verify_after_another_attention_was_chosen(host: str, name: str) -> None:
    model = patch_model(tiny_model(host), name)
    model.set_attn_implementation("eager")
    report = checked(model)
    assert report.passed, report.table()


@pytest.mark.parametrize("host, name", [("llama", "sinusoidal"), ("bloom", "sinusoidal"), ("llama", "learned")])
def test_verify_of_a_model_that_lost_the_hook_of_its_vectors(host: str, name: str) -> None:
    model: Any = patch_model(tiny_model(host), name)
    layer = model.model.layers[0] if host == "llama" else model.transformer.h[0]
    keys = [key for key, hook in layer._forward_pre_hooks.items() if isinstance(hook, AddVectors)]
    assert len(keys) == 1
    del layer._forward_pre_hooks[keys[0]], layer._forward_pre_hooks_with_kwargs[keys[0]]
    report = checked(model)
    assert not report.passed and result(report, "in effect") is False
    assert result(report, "positions act") is False
    assert not any(isinstance(hook, AddVectors) for hook in layer._forward_pre_hooks.values()), "verify mends nothing"


def test_verify_of_a_model_whose_layers_were_set_back() -> None:
    model: Any = patch_model(tiny_model("gpt2"), "rope")
    assert checked(model).passed
    for block in model.transformer.h:
        block.attn.__class__ = GPT2Attention
    report = checked(model)
    assert not report.passed
    assert result(report, "in effect") is False and result(report, "positions act") is False


def test_verify_of_a_native_checkpoint_loaded_without_the_package(tmp_path: Path) -> None:
    """Transformers serves it, and nothing was checked: that is not a pass."""
    patch_model(tiny_model("llama"), "yarn", factor=4).save_pretrained(tmp_path)
    report = checked(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert [row.passed for row in report.rows] == [None] and not report.passed
    assert checked(from_pretrained(tmp_path)).passed


@pytest.mark.parametrize("name", ["alibi", "nope"])
def test_verify_says_what_it_did_not_do(name: str) -> None:
    model = patch_model(tiny_model("llama"), name)
    report = checked(model, save=False)
    row = report.rows[-1]
    assert row.name == "save → load" and row.passed is None and row.detail == "save=False"
    assert "not made" in report.table() and report.passed
    assert result(report, "positions act") is True
    assert checked(model, save=True).rows[-1].passed is True


@pytest.mark.parametrize("save", [False, True], ids=["", "saved"])
def test_verify_of_a_bare_backbone_and_of_labelled_tokens(save: bool) -> None:
    stock = tiny_model("llama")
    report = checked(patch_model(stock.model, "alibi"), save=save)
    assert report.passed, report.table()
    torch.manual_seed(0)
    labelled = AutoModelForTokenClassification.from_config(tiny_model("llama").config).eval()
    report = checked(patch_model(labelled, "yarn", factor=4), save=save)
    assert report.passed, report.table()


def test_verify_of_a_model_with_one_output_a_text() -> None:
    model: Any = AutoModelForSequenceClassification.from_config(tiny_model("llama", pad_token_id=0).config)
    patch_model(model, "alibi").train()
    was = modes(model)
    with pytest.raises(UnsupportedError, match=r"verify\(model\.model\)"):
        checked(model)
    assert modes(model) == was


def test_verify_of_a_bloom_patched_from_inside() -> None:
    """The model around the backbone was never seen by the patch, and drops `position_ids`."""
    model: Any = tiny_model("bloom")
    patch_model(model.transformer, "rope", **BLOOM)
    report = checked(model)
    assert not report.passed and result(report, "positions act") is False
    assert checked(model.transformer).passed


def modes(model: Any) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_verify_leaves_every_mode_as_it_was() -> None:
    model: Any = patch_model(tiny_model("llama"), "alibi").train()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.eval()
    was = modes(model)
    assert checked(model).passed
    assert modes(model) == was and not was["model.layers.0.mlp"] and was["model.layers.1"]


def test_unpatch_keeps_what_was_edited_meanwhile(tmp_path: Path) -> None:
    model: Any = patch_model(tiny_model("llama"), "yarn", factor=4)
    model.resize_token_embeddings(120)
    model.config.pad_token_id = 3
    model.config.use_cache = False
    unpatch_model(model)
    assert (model.config.vocab_size, model.config.pad_token_id, model.config.use_cache) == (120, 3, False)
    stock = tiny_model("llama").config
    assert model.config.rope_parameters == stock.rope_parameters and not hasattr(model.config, "hf_posenc")
    assert model.config.max_position_embeddings == stock.max_position_embeddings
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, tiny_ids(20)), logits(model, tiny_ids(20)))


@pytest.mark.parametrize("host, name", [("llama", "alibi"), ("gpt2", "dynamic_yarn"), ("llama", "yarn")])
def test_unpatch_keeps_the_attention_that_was_chosen(host: str, name: str) -> None:
    model = patch_model(tiny_model(host), name, **({"factor": 4} if name == "yarn" else {}))
    model.set_attn_implementation("eager")
    logits(model, tiny_ids(20))  # ours over that one is chosen here
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
    want = logits(tiny_model(host, attn_implementation="eager"), tiny_ids(20))
    assert torch.equal(logits(model, tiny_ids(20)), want)


@pytest.mark.parametrize("host", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("name", ["alibi", "dynamic_ntk", "rope", "learned", "sinusoidal"])
def test_unpatch_without_edits_leaves_the_config_as_it_was(host: str, name: str) -> None:
    options: dict[str, Any] = {"max_position_embeddings": 80} if name == "learned" else {}
    model = tiny_model(host)
    config, was = model.config, snapshots.of_model(model)
    attributes = copy.deepcopy(vars(config))
    patch_model(model, name, **options, **(BLOOM if host == "bloom" and name in ("rope", "dynamic_ntk") else {}))
    logits(model, tiny_ids(20))
    assert checked(model).passed
    unpatch_model(model)
    assert model.config is config and vars(config) == attributes
    assert snapshots.of_model(model) == was


@pytest.mark.parametrize("layout", ["interleaved", "concat"])
@pytest.mark.parametrize("host", ["llama", "gpt2", "bloom"])
def test_verify_sees_that_a_sinusoid_is_off(host: str, layout: str) -> None:
    """The vectors that a call really adds, against the definition: another base, scale or order of channels shows."""
    model = patch_model(tiny_model(host), "sinusoidal", layout=layout, base=5000.0, scale=0.7)
    assert result(checked(model), "numbers = formula") is True
    backbone = model.transformer if host != "llama" else model.model
    owner: Any = backbone.wpe if host == "gpt2" else None
    if owner is None:
        first = (backbone.layers if host == "llama" else backbone.h)[0]
        owner = next(hook for hook in first._forward_pre_hooks.values() if isinstance(hook, AddVectors)).vectors
    right = owner.encoding
    other = "concat" if layout == "interleaved" else "interleaved"
    for wrong in (right.but(base=5050.0), right.but(scale=0.71), right.but(layout=other)):
        owner.encoding = wrong
        assert result(checked(model), "numbers = formula") is False
