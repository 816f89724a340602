"""Folders that are odd or broken, and options that are too much."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import snapshots
import torch
from pairs import logits
from tiny import tiny_ids, tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_posenc import PosencError, from_pretrained, get_encoding, patch_model
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.errors import CheckpointError, OptionError, OptionTypeError


def test_one_config_object_for_two_loads(tmp_path: Path) -> None:
    patch_model(tiny_model("llama"), "alibi").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    was = copy.deepcopy(config.to_dict())
    first, second = (from_pretrained(tmp_path, config=config) for _ in range(2))
    assert get_encoding(first) == get_encoding(second) is not None
    assert torch.equal(logits(first, tiny_ids(40)), logits(second, tiny_ids(40)))
    assert config.to_dict() == was


def test_adapter_is_loaded_with_the_class_asked_for(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    patch_model(tiny_model("llama", pad_token_id=0), "yarn", factor=4).save_pretrained(base)
    model = from_pretrained(base, auto_class=AutoModelForSequenceClassification)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    save_pretrained(wrapped, folder)
    again = from_pretrained(folder, auto_class=AutoModelForSequenceClassification)
    assert type(again.base_model.model) is type(model)
    assert get_encoding(again) == get_encoding(model)
    other = from_pretrained(folder, encoding="alibi", auto_class=AutoModelForSequenceClassification)
    assert type(other.base_model.model) is type(model)


def test_saving_removes_a_record_that_no_longer_holds(tmp_path: Path) -> None:
    save_pretrained(patch_model(tiny_model("llama"), "alibi"), tmp_path)
    beside = tmp_path / "posenc_config.json"
    assert json.loads(beside.read_text())["encoding"] == "alibi"
    save_pretrained(tiny_model("llama"), tmp_path)
    assert not beside.exists()
    assert get_encoding(from_pretrained(tmp_path)) is None


def test_options_beside_the_encoding(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    want = get_encoding(patch_model(tiny_model("llama"), "yarn", factor=4))
    loaded = from_pretrained(tmp_path, encoding="yarn", factor=4, dtype=torch.bfloat16)
    assert get_encoding(loaded) == want and loaded.dtype == torch.bfloat16
    assert get_encoding(from_pretrained(tmp_path, encoding="yarn", options={"factor": 4})) == want


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any], model: Any = None) -> Path:
    """A checkpoint whose record has been tampered with."""
    (patch_model(tiny_model("llama"), "alibi") if model is None else model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config["hf_posenc"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CORRUPT: dict[str, dict[str, Any]] = {
    "base of another kind": {"base": {"rope_parameters": 3}},
    "base of another key": {"base": {"hidden_size": 3}},
    "version 0": {"version": 0},
    "version below 0": {"version": -1},
    "an unknown encoding": {"encoding": "yarm"},
    "options of another encoding": {"options": {"resize": "cubic"}},
}


@pytest.mark.parametrize("change", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_record(change: dict[str, Any], tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda record: record.update(change))
    with pytest.raises(CheckpointError):
        from_pretrained(folder)


def test_table_of_other_rows_than_its_record_says(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "learned", max_position_embeddings=64)
    folder = edited(tmp_path, lambda record: record["options"].update(max_position_embeddings=65), model)
    with pytest.raises(CheckpointError, match=r"64.*65"):
        from_pretrained(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"peft_type": "NONE SUCH"}', "{}"])
def test_broken_adapter_config(text: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    save_pretrained(patch_model(tiny_model("llama"), "alibi"), tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        from_pretrained(tmp_path)


LISTS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("longrope", {"factor": 4, "original_max_position_embeddings": 1, **LISTS}),
    *((name, {"factor": factor}) for name in ("linear", "ntk", "yarn", "alibi") for factor in (1e300, 10**400)),
    ("dynamic_ntk", {"factor": 1e300}),
    ("rope", {"rope_theta": 10**400}),
]


@pytest.mark.parametrize("name, options", TOO_MUCH, ids=lambda value: value if isinstance(value, str) else "")
def test_numbers_past_all_use(name: str, options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    was = snapshots.of_model(model)
    with pytest.raises(OptionError) as caught:
        patch_model(model, name, **options)
    assert isinstance(caught.value, ValueError) and len(str(caught.value)) < 1000
    assert snapshots.of_model(model) == was


def test_two_encodings_named_at_once() -> None:
    model = tiny_model("llama")
    with pytest.raises(PosencError, match="encoding"):
        patch_model(model, "yarn", encoding="linear")
    assert get_encoding(model) is None


def test_no_path() -> None:
    with pytest.raises(OptionTypeError, match="None"):
        from_pretrained(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"use_safetensors": False}, {"encoding": "yarn", "factor": 4}])
def test_nothing_is_unpickled_whatever_the_caller_says(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    with pytest.raises(CheckpointError, match="safetensors"):
        from_pretrained(tmp_path, **given)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "alibi")
    with pytest.raises(PosencError, match="safetensors"):
        save_pretrained(model, tmp_path, safe_serialization=False)
    assert not list(tmp_path.iterdir())
