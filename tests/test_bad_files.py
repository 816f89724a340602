"""Folders and records that cannot be read or written: a clear error, and nothing half done."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import HOSTS, Pair
from refusals import assert_refused
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import adapters, get_encoding, patch_model
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.marking import unmark


def unmarked(folder: Path) -> Path:
    """The checkpoint as it was written before checkpoints were marked."""
    config = unmark(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def written(pair: Pair, folder: Path, **record: Any) -> Path:
    """A checkpoint of a patched model, with fields of its record changed (None: taken out)."""
    pair.patched().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in record.items():
        config["hf_posenc"].pop(key)
        if value is not None:
            config["hf_posenc"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"version": 99}, "newer|99|pip install"),
        ({"version": "1"}, "hf_posenc"),
        ({"version": None}, "hf_posenc"),
        ({"encoding": None}, "corrupt|encoding"),
        ({"encoding": "tomorrows_rope"}, "tomorrows_rope"),
        ({"encoding": ["yarn"]}, "corrupt|encoding"),
        ({"options": "factor=4"}, "corrupt|options"),
        ({"options": {"factor": -1}}, "factor"),
        ({"options": {"unknown": 1}}, "unknown"),
        ({"native": None}, "corrupt|native"),
        ({"base": {"vocab_size": 3}}, "corrupt|base"),
        ({"base": {"__class__": "x"}}, "corrupt|base"),
    ],
    ids=str,
)
@pytest.mark.parametrize("host", HOSTS)
def test_records(host: str, record: dict[str, Any], words: str, tmp_path: Path) -> None:
    pair = Pair(host, "alibi", {"factor": 4})
    folder = written(pair, tmp_path, **record)
    assert_refused(OSError, words, lambda: hf_posenc.from_pretrained(folder))
    assert_refused(OSError, words, lambda: AutoModelForCausalLM.from_pretrained(folder))
    plain = AutoModelForCausalLM.from_pretrained(unmarked(folder))
    assert_refused(RuntimeError, "patch", lambda: patch_model(plain, "nope"), plain)


@pytest.mark.parametrize("foreign", ["yarn", 3, ["yarn"], {}, {"method": "yarn"}, True], ids=str)
def test_foreign_records(foreign: Any, tmp_path: Path) -> None:
    folder = written(Pair("llama", "alibi"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hf_posenc": foreign}))
    assert_refused(OSError, "hf_posenc|config.json", lambda: hf_posenc.from_pretrained(folder))


def test_a_record_that_is_gone(tmp_path: Path) -> None:
    """What says that there was a patch is still there: the weights are not loaded as if there had been none."""
    folder = written(Pair("llama", "alibi"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["hf_posenc"]
    (folder / "config.json").write_text(json.dumps(config))
    for load in (hf_posenc.from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert_refused(OSError, "marked|record|restore", lambda load=load: load(folder))


def test_folders(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert_refused(OSError, "missing", lambda: hf_posenc.from_pretrained(missing))
    file = tmp_path / "file"
    file.write_text("")
    assert_refused(OSError, "file|folder", lambda: hf_posenc.from_pretrained(file))
    (tmp_path / "empty").mkdir()
    assert_refused(OSError, "empty", lambda: hf_posenc.from_pretrained(tmp_path / "empty"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert_refused(OSError, "broken", lambda: hf_posenc.from_pretrained(broken))
    no_weights = written(Pair("llama", "alibi"), tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    assert_refused(OSError, "no_weights", lambda: hf_posenc.from_pretrained(no_weights))
    cut = written(Pair("llama", "alibi"), tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert_refused(OSError, "cut", lambda: hf_posenc.from_pretrained(cut))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = written(Pair("llama", "alibi"), tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(Pair("llama", "alibi").stock().state_dict(), folder / "pytorch_model.bin")
    assert_refused(OSError, "safetensors", lambda: hf_posenc.from_pretrained(folder))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "alibi")
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (blocked, blocked / "below"):
        assert_refused(OSError, f"{path}|write", lambda p=path: save_pretrained(model, p), model)
    if os.geteuid() != 0:  # root may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        assert_refused(OSError, "locked|write", lambda: save_pretrained(model, locked / "model"), model)


def test_an_adapter_without_its_record(tmp_path: Path) -> None:
    """Where no file says what it was trained with, a guess would be wrong without a word."""
    from peft import LoraConfig, get_peft_model

    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(patch_model(base, "alibi"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "adapter"
    adapters.mark(folder, None)
    assert_refused(OSError, "posenc_config.json|encoding=", lambda: hf_posenc.from_pretrained(folder))
    assert get_encoding(hf_posenc.from_pretrained(folder, encoding="alibi")) == get_encoding(model)
    (folder / "posenc_config.json").write_text("{")
    assert_refused(OSError, "posenc_config.json", lambda: hf_posenc.from_pretrained(folder))
