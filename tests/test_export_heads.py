"""A model keeps its head on the way: loaded by the class that its checkpoint names, exported and loaded as that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import other_hosts
import pytest
import torch
from exported import ALONE, alone, here
from other_hosts import tiny_host
from refusals import assert_refused
from tiny import tiny_ids, tiny_model
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import export, get_encoding, patch_model
from hf_posenc.cli import app


def classifier(host: str) -> Any:
    """A tiny classifier of two classes."""
    base = tiny_host("bert") if host == "bert" else tiny_model(host)
    config = base.config
    config.pad_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tiny_ids(20) % 90 + 5).logits


def same(one: Any, other: Any) -> bool:
    return torch.allclose(answer(one), answer(other), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "cls"),
    [
        (lambda: classifier("llama"), LlamaForSequenceClassification),
        (lambda: classifier("bert"), BertForSequenceClassification),
        (lambda: tiny_host("bert"), type(tiny_host("bert"))),
    ],
    ids=["llama classifier", "bert classifier", "bert masked"],
)
def test_the_head_that_a_checkpoint_names(model: Any, cls: type, tmp_path: Path) -> None:
    """By `from_pretrained`, by the command `export`, and by the auto class that the card names."""
    stock = model()
    stock.save_pretrained(tmp_path / "stock")
    loaded = hf_posenc.from_pretrained(tmp_path / "stock")
    assert type(loaded) is cls and same(loaded, stock)
    patched = patch_model(loaded, "alibi")
    patched.save_pretrained(tmp_path / "patched")
    again = hf_posenc.from_pretrained(tmp_path / "patched")
    assert type(again) is cls and same(again, patched)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(tmp_path / "stock"), str(out), "--encoding", "alibi"])
    assert result.exit_code == 0, result.output
    raw = json.loads((out / "config.json").read_text())
    assert raw["architectures"] == [f"Posenc{cls.__name__}"]
    auto = AutoModelForMaskedLM if cls.__name__.endswith("MaskedLM") else AutoModelForSequenceClassification
    for text in (result.stdout, (out / "README.md").read_text()):
        assert f"model = {auto.__name__}.from_pretrained" in text and "CausalLM" not in text
    assert same(auto.from_pretrained(out, trust_remote_code=True), patched)


def test_a_caller_may_ask_for_another_head(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = hf_posenc.from_pretrained(tmp_path, auto_class=AutoModel, encoding="nope")
    assert type(model).__name__ == "LlamaModel"
    raw = json.loads((tmp_path / "config.json").read_text())
    for names in ([], ["NoSuchClass"], ["BertForMaskedLM"], ["LlamaConfig"]):
        (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": names}))
        assert type(hf_posenc.from_pretrained(tmp_path)).__name__ == "LlamaForCausalLM"


def test_no_other_head_goes_to_llamacpp(tmp_path: Path) -> None:
    model = patch_model(classifier("llama"), "yarn", factor=2)
    call = lambda: export(model, tmp_path / "out", "gguf")  # noqa: E731
    assert_refused(NotImplementedError, "language models|AutoModelForSequenceClassification", call)


def test_the_body_alone(tmp_path: Path) -> None:
    """`AutoModel` of an export, where the host library's own has one class more around the backbone, too."""
    for host in ("opt", "bert"):
        model = other_hosts.pair(host, "alibi").patched()
        export(model, tmp_path / host)
        body = AutoModel.from_pretrained(tmp_path / host, trust_remote_code=True).eval()
        ids = tiny_ids(20) % 90 + 5
        with torch.no_grad():
            want = model.base_model(ids).last_hidden_state
            assert torch.equal(body(ids).last_hidden_state, want)


@pytest.mark.parametrize("host", ["gpt2", "openai-gpt", "bert"])
def test_a_table_alone_counts_padding(host: str, tmp_path: Path) -> None:
    """Said on the card and in the verdict; with the positions that they ask for, the stock host is the patched one."""
    stock = tiny_model("gpt2") if host == "gpt2" else tiny_host(host)
    model = patch_model(stock, "learned", resize="interpolate", factor=4)
    made = export(model, tmp_path / f"{host}-config")
    assert "position_ids" in made.verdict.text and any("counts padding" in note for note in made.notes)
    assert "position_ids" in (made.path / "README.md").read_text()
    assert "positions(model, mask)" in ALONE  # which gives them
    found = alone({host: str(made.path)}, tmp_path)
    want = here(model)
    assert (found[f"{host} padded"] - want[" padded"]).abs().max() < 1e-3
    for other in ("opt", "roberta"):
        held = patch_model(tiny_host(other), "learned", resize="interpolate", factor=4)
        assert "position_ids" not in export(held, tmp_path / f"{host}-{other}").verdict.text


def test_the_card_claims_no_more_than_is_known(tmp_path: Path) -> None:
    """Weights may have been trained, merged or resized since they were loaded."""
    tiny_model("gpt2").save_pretrained(tmp_path / "base")
    model = hf_posenc.from_pretrained(tmp_path / "base", encoding="learned", resize="interpolate", factor=2)
    card = (export(model, tmp_path / "out").path / "README.md").read_text()
    assert "Made from `base`." in card and "no weight" not in card
    assert get_encoding(hf_posenc.from_pretrained(tmp_path / "out")) == get_encoding(model)
