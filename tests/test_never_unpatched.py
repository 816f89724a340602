"""An adapter or a config that was made over a patched model does not end up on an unpatched one without a word."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, assert_same, logits
from peft import PeftModel
from peft_methods import METHODS, wrap
from tiny import tiny_ids, tiny_model
from transformers import AutoModel, AutoModelForCausalLM

import hf_posenc
from hf_posenc import get_encoding, patch_model
from hf_posenc.errors import OptionError

SOME = [Pair("llama", "alibi", {"factor": 2}), Pair("llama", "yarn", {"factor": 4}), Pair("gpt2", "rope")]
PATCHED = [*SOME, Pair("bloom", "sinusoidal"), Pair("llama", "dynamic_yarn"), Pair("llama", "nope")]


def saved(pair: Pair, method: str, tmp_path: Path) -> tuple[Any, Path]:
    """A stock base on disk, and an adapter over it when it is patched."""
    pair.stock().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = wrap(patch_model(base, pair.name, **pair.options), method, pair.host)
    hf_posenc.save_pretrained(model, tmp_path / "adapter")
    return model, tmp_path / "adapter"


@pytest.mark.parametrize("method", [*METHODS, "prefix"])
@pytest.mark.parametrize("pair", SOME, ids=str)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_plain_peft_says_which_base_it_needs(pair: Pair, method: str, tmp_path: Path) -> None:
    """It warns with our sentence; this package loads the folder without one, and to the same logits."""
    model, folder = saved(pair, method, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(plain, folder)
    wanted = rf"patched with {pair.name}; .*hf_posenc\.from_pretrained"
    assert [w for w in said if re.search(wanted, str(w.message))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = hf_posenc.from_pretrained(folder)
    assert get_encoding(loaded) == get_encoding(model)
    assert_same(logits(loaded, tiny_ids(60)), logits(model, tiny_ids(60)), 1e-6)


@pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")  # of a base that lies nowhere
def test_the_sentence_goes_with_the_patch(tmp_path: Path) -> None:
    """Saved again into the same folder with another encoding, and with none; a second time it stands there once."""
    for name in ("alibi", "nope", "nope", None):
        model = tiny_model("llama") if name is None else patch_model(tiny_model("llama"), name)
        hf_posenc.save_pretrained(wrap(model, "lora", "llama"), tmp_path)
        raw = json.loads((tmp_path / "adapter_config.json").read_text())
        found = [key for key in raw if key.startswith("made over")]
        assert len(found) == (name is not None) and all(f"with {name};" in key for key in found)


@pytest.mark.parametrize("pair", PATCHED, ids=str)
def test_from_the_config_of_a_patched_model(pair: Pair) -> None:
    """`from_config` makes a model with random weights and the encoding; the config it was given stays as it was."""
    model = pair.patched()
    before = model.config.to_dict()
    again = AutoModelForCausalLM.from_config(model.config).eval()
    again.load_state_dict(model.state_dict())
    assert get_encoding(again) == get_encoding(model) and type(again) is type(model)
    assert torch.equal(logits(again, tiny_ids(60)), logits(model, tiny_ids(60)))
    assert get_encoding(AutoModel.from_config(model.config)) == get_encoding(model)
    assert model.config.to_dict() == before
    stock = AutoModelForCausalLM.from_config(tiny_model(pair.host).config)
    assert get_encoding(stock) is None, "the host's own config class is what it was"


def test_the_loader_given_the_config_of_a_patched_model(tmp_path: Path) -> None:
    """`from_pretrained(stock, config=patched.config)`: the stock weights, patched."""
    pair = SOME[0]
    pair.stock().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=pair.patched().config)
    assert torch.equal(logits(loaded, tiny_ids(60)), logits(pair.patched(), tiny_ids(60)))


def test_an_adapter_is_not_pushed_without_its_encoding(tmp_path: Path) -> None:
    model = wrap(SOME[0].patched(), "lora", "llama")
    with pytest.raises(OptionError, match="upload_folder"):
        hf_posenc.save_pretrained(model, tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()
