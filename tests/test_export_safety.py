"""A patched checkpoint that plain Transformers cannot hold is loaded patched or not at all."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import ALONE
from fake_hub import fake_hub
from huggingface_hub.errors import StrictDataclassError
from pairs import Pair, logits
from tiny import tiny_ids, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_posenc
from hf_posenc import demo, get_encoding, patch_model, unpatch_model
from hf_posenc.marking import is_marked, mark, unmark
from hf_posenc.modules import quiet_peft

SOME = [
    Pair("llama", "alibi", {"factor": 2}),
    Pair("llama", "learned", {"max_position_embeddings": 64}),
    Pair("gpt2", "rope", {"rope_theta": 500}),
    Pair("bloom", "sinusoidal"),
    Pair("llama", "dynamic_ntk", {"factor": 2}),
]
some_pairs = pytest.mark.parametrize("pair", SOME, ids=str)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@some_pairs
def test_the_config_in_memory_is_the_hosts_own(pair: Pair, tmp_path: Path) -> None:
    """Type, name, values, copies and pickles; and after unpatching it is the very object that it was."""
    stock = pair.stock()
    before, host = stock.config, type(stock.config)
    model = patch_model(stock, pair.name, **pair.options)
    config = model.config
    assert isinstance(config, host) and type(config).__name__ == host.__name__ and config.model_type == pair.host
    assert config.to_dict()["model_type"] == pair.host and config.to_dict()["initializer_range"] == 0.3
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(other) is type(config) and other.to_dict() == config.to_dict()
        other.save_pretrained(tmp_path / "config")
        assert is_marked(config_of(tmp_path / "config"))
    assert issubclass(AutoModelForCausalLM._model_mapping[type(config)], type(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, tiny_ids(40)), logits(model, tiny_ids(40)))
        unpatch_model(twin)
        assert type(twin.config) is host
    unpatch_model(model)
    assert model.config is before and type(model.config) is host
    model.save_pretrained(tmp_path / "unpatched")
    assert config_of(tmp_path / "unpatched")["model_type"] == pair.host


@some_pairs
def test_on_disk(pair: Pair, tmp_path: Path) -> None:
    """Another type and architecture, one sentence; the auto classes load it, and a second trip is the same."""
    model = pair.patched()
    model.save_pretrained(tmp_path / "first")
    raw = config_of(tmp_path / "first")
    assert raw["model_type"] == f"posenc_{pair.host}"
    assert raw["architectures"] == [f"Posenc{type(model).__name__}"]
    want = logits(model, tiny_ids(60))
    with pytest.raises(StrictDataclassError, match=r"hf_posenc\.from_pretrained"):
        type(model).from_pretrained(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    assert torch.equal(logits(loaded, tiny_ids(60)), want) and type(loaded) is type(model)
    assert get_encoding(AutoModel.from_pretrained(tmp_path / "first")) == get_encoding(model)
    config = AutoConfig.from_pretrained(tmp_path / "first")
    assert config.model_type == pair.host and type(copy.deepcopy(config)) is type(config)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "first", config=config), tiny_ids(60)), want
    )
    random = AutoModelForCausalLM.from_config(config)
    assert get_encoding(random) == get_encoding(model) and type(random.config) is type(model.config)
    loaded.save_pretrained(tmp_path / "second")
    assert config_of(tmp_path / "second") == raw


def test_native_results_are_not_marked(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "yarn", factor=2)
    assert type(model.config) is LlamaConfig
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["model_type"] == "llama"
    model = patch_model(tiny_model("gpt2"), "learned", resize="interpolate", factor=2)
    model.save_pretrained(tmp_path / "gpt2")
    assert config_of(tmp_path / "gpt2")["model_type"] == "gpt2"


def test_marks_come_off_as_they_went_on() -> None:
    raw = {
        "model_type": "x",
        "architectures": ["X"],
        "vocab_size": 3,
        "hf_posenc": {"native": False, "encoding": "nope"},
    }
    assert unmark(mark(raw)) == raw and mark(mark(raw)) == mark(raw) and is_marked(mark(raw))
    assert mark({**raw, "hf_posenc": {"native": True}})["model_type"] == "x"
    assert mark({"model_type": "x"}) == unmark({"model_type": "x"}) == {"model_type": "x"}


def test_without_the_package(tmp_path: Path) -> None:
    """Plain Transformers names the type that it does not know; the tokenizer beside is read all the same."""
    model = hf_posenc.from_pretrained(demo.model_path("llama"), encoding="alibi")
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo.model_path("llama")).save_pretrained(tmp_path)
    code = ALONE.split("import json, torch")[0] + (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM\n"
        "assert AutoTokenizer.from_pretrained(sys.argv[1])('abc')['input_ids']\n"
        "for cls, word in ((AutoModelForCausalLM, 'posenc_llama'), (LlamaForCausalLM, 'hf_posenc.from_pretrained')):\n"
        "    try:\n        cls.from_pretrained(sys.argv[1])\n"
        "    except Exception as error:\n        assert word in str(error), error\n"
        "    else:\n        raise SystemExit('loaded without a word')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("order", ["hf_posenc, transformers", "transformers, hf_posenc"])
def test_importing_is_enough_in_either_order(order: str, tmp_path: Path) -> None:
    Pair("llama", "alibi").patched().save_pretrained(tmp_path)
    code = (
        f"import sys\nimport {order}\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert hf_posenc.get_encoding(model).name == 'alibi'\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('hf_posenc')], 'the finder has gone'"
    )
    root = Path(hf_posenc.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]


def test_registration_takes_nothing_from_others() -> None:
    from hf_posenc.auto import register

    register()
    assert CONFIG_MAPPING["llama"] is LlamaConfig
    assert LlamaConfig in AutoModelForCausalLM._model_mapping
    assert {"posenc_llama", "posenc_gpt2", "posenc_bloom"} <= set(CONFIG_MAPPING)


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of pushing upload what `save_pretrained` writes: marked, with its record."""
    pushed = fake_hub(monkeypatch)
    model = Pair("llama", "alibi", {"factor": 2}).patched()
    model.push_to_hub("someone/alibi")
    model.save_pretrained(str(tmp_path / "saved"), push_to_hub=True, repo_id="someone/alibi")
    assert len(pushed) == 2
    for number, files in enumerate(pushed):
        assert {"config.json", "model.safetensors"} <= set(files)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        assert config_of(folder)["model_type"] == "posenc_llama"
        assert torch.equal(logits(hf_posenc.from_pretrained(folder), tiny_ids(30)), logits(model, tiny_ids(30)))


def test_an_adapter_over_a_patched_checkpoint(tmp_path: Path) -> None:
    """PEFT loads the base that the adapter names by its own class, which is refused; by an auto class it works."""
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

    Pair("llama", "alibi").patched().save_pretrained(tmp_path / "base")
    base = hf_posenc.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    asks = pytest.warns(UserWarning, match="made over a model patched with alibi; on any other base it is wrong")
    with asks, pytest.raises(StrictDataclassError, match=r"hf_posenc\.from_pretrained"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match="made over a model patched with alibi"), quiet_peft():
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert get_encoding(loaded) == get_encoding(model)
    assert torch.equal(logits(loaded, tiny_ids(40)), logits(model, tiny_ids(40)))


def test_the_exported_folder_is_all_that_a_hub_needs(tmp_path: Path) -> None:
    """Plain files side by side, as a hub takes them, with code, card, tokenizer and record; loaded where they land."""
    model = hf_posenc.from_pretrained(demo.model_path("llama"), encoding="alibi")
    files = list(hf_posenc.export(model, tmp_path / "out").path.iterdir())
    needed = {"config.json", "model.safetensors", "modeling_posenc.py", "README.md", "tokenizer.json"}
    assert needed <= {file.name for file in files}
    (tmp_path / "down").mkdir()
    for file in files:
        assert file.is_file() and not file.name.startswith(".")
        (tmp_path / "down" / file.name).write_bytes(file.read_bytes())
    loaded = hf_posenc.from_pretrained(tmp_path / "down")
    assert torch.equal(logits(loaded, tiny_ids(40)), logits(model, tiny_ids(40)))
