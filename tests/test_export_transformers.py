"""Every pair exported for plain Transformers gives the same logits in a process that has no hf_posenc."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import other_hosts
import pytest
import snapshots
import torch
from exported import alone, here
from hosts import NOT_HELD, PRESENT, host_pair
from pairs import ENCODINGS, NATIVE, PAIRS, SHAPES, Pair, difference, logits
from tiny import LENGTH, tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import demo, export, get_encoding, list_architectures, patch_model
from hf_posenc.errors import UnsupportedError
from hf_posenc.exporting import bundle
from hf_posenc.exporting.targets import row, subject
from hf_posenc.marking import OWN_CODE
from hf_posenc.patches import find_patch

OWN_CODE_PAIRS = [pair for pair in PAIRS if not pair.native]


def exported(pairs: list[Pair], tmp_path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Folders by pair, and what the models give here."""
    folders, want = {}, {}
    for pair in pairs:
        model, native = pair.patched(), getattr(pair, "native", None)
        kind = row(subject(model))[0].how
        assert native is None or kind == ("config" if native else "code")
        folders[str(pair)] = str(tmp_path / f"{pair}-{kind}")
        export(model, folders[str(pair)])
        want |= {f"{pair}{key}": value for key, value in here(model).items()}
    return folders, want


def check(pairs: list[Pair], tmp_path: Path) -> None:
    folders, want = exported(pairs, tmp_path)
    found = alone(folders, tmp_path)
    assert found.keys() == want.keys()
    for key, value in want.items():
        if key.endswith(" new"):
            assert torch.equal(found[key], value), key
        else:
            assert difference(found[key], value) <= 1e-4, key


def test_without_the_package(tmp_path: Path) -> None:
    """Code of their own on a host of every kind and at every seam; weights with other names on disk; one without."""
    others: list[Any] = [host_pair("gpt_neox", "alibi"), Pair("llama", "alibi"), Pair("llama", "yarn", {"factor": 4})]
    others += [host_pair(host, "dynamic_yarn") for host in ("deepseek_v3", "stablelm")]
    check([*OWN_CODE_PAIRS[1::5], *others], tmp_path)


def test_the_other_kinds_of_hosts_without_the_package(tmp_path: Path) -> None:
    """One encoding on each host that is no rotary decoder, encoders among them, by its own auto class."""
    names = {"opt": "yarn", "gptj": "fire", "openai-gpt": "alibi", "falcon": "nope", "roberta": "yarn", "bert": "alibi"}
    check([other_hosts.pair(host, name) for host, name in names.items()], tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("host", [*PRESENT, "others"])
def test_the_other_hosts_without_the_package(host: str, tmp_path: Path) -> None:
    """Every encoding on every rotary decoder; and on the hosts that are none, encoders among them."""
    pairs: list[Any] = [*other_hosts.PAIRS, *other_hosts.VARIED]
    if host != "others":
        pairs = [host_pair(host, name) for name in ENCODINGS if (host, name) not in NOT_HELD]
    check(pairs, tmp_path)


@pytest.mark.extended
def test_every_pair_and_odd_shapes_without_the_package(tmp_path: Path) -> None:
    check([*PAIRS, *SHAPES], tmp_path)


@pytest.mark.parametrize("model_type", list_architectures())
def test_the_file_of_every_architecture_can_be_made(model_type: str, tmp_path: Path) -> None:
    """Its names are unique, it can be imported, and imports nothing but torch, Transformers and the library."""
    file = tmp_path / "file.py"
    file.write_text(bundle.joined(bundle.roots_of(find_patch(model_type))))
    text = file.read_text()
    assert "from hf_posenc" not in text and "import hf_posenc" not in text
    bundle.prove_file(file)


def test_a_file_that_cannot_be_imported_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in one file is run once before anybody is given it; nothing is written then."""
    joined, model = bundle.joined, patch_model(tiny_model("llama"), "alibi")
    for line, words in (
        ("_ROW = types.SimpleNamespace().Rope", r"cannot be imported.*Rope.*import names"),
        ("def late():\n    import numpy", r"imports numpy.*torch and Transformers alone.*importlib"),
    ):
        monkeypatch.setattr(bundle, "joined", lambda roots, line=line: joined(roots) + line + "\n")
        with pytest.raises(UnsupportedError, match=words):
            export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_holds_what_a_hub_wants(tmp_path: Path) -> None:
    """Weights, config, generation config, tokenizer, a card with the numbers, and the code."""
    model = hf_posenc.from_pretrained(demo.model_path("llama"), encoding="alibi", factor=2)
    model.generation_config.max_new_tokens = 7
    made = export(model, tmp_path / "out")
    names = {file.name for file in made.path.iterdir()}
    assert names >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert f"{OWN_CODE}.py" in names
    card = (made.path / "README.md").read_text()
    assert "`alibi`" in card and "| `factor` | 2 |" in card and "trust_remote_code=True" in card
    assert "/" not in card.split("Made from")[1].split("\n")[0], "a path of this machine is nobody's business"
    raw = json.loads((made.path / "config.json").read_text())
    assert raw["model_type"] == "posenc_llama" and raw["architectures"] == ["PosencLlamaForCausalLM"]
    assert set(raw["auto_map"]) >= {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert AutoTokenizer.from_pretrained(made.path)("abc")["input_ids"]
    assert json.loads((made.path / "generation_config.json").read_text())["max_new_tokens"] == 7


def test_this_package_loads_it_too(tmp_path: Path) -> None:
    """By its record; told to trust the code that lies beside, newer releases leave it alone, older ones run it."""
    model = Pair("llama", "dynamic_yarn").patched()
    export(model, tmp_path / "out")
    want = logits(model, tiny_ids(80))
    for load in (hf_posenc.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path / "out")
        assert torch.equal(logits(loaded, tiny_ids(80)), want) and get_encoding(loaded) == get_encoding(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(logits(loaded, tiny_ids(80)), want)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path / "again"), tiny_ids(80)), want)


@pytest.mark.parametrize("host", ["llama", "gpt2", "bloom"])
def test_exporting_changes_nothing(host: str, tmp_path: Path) -> None:
    model = patch_model(tiny_model(host), "nope")
    was = snapshots.of_model(model)
    export(model, tmp_path / "out")
    assert snapshots.of_model(model) == was


def test_an_unpatched_model_is_exported_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = export(model, tmp_path / "out")
    assert made.verdict.how == "config" and [v.how for v in made.row] == ["config"] * 3
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(made.path), tiny_ids(30)), logits(model, tiny_ids(30))
    )


@pytest.mark.parametrize("name", ["alibi", "yarn"])
def test_tied_weights_and_shards_are_kept(name: str, tmp_path: Path) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    source.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    files = sorted(file.name for file in (tmp_path / "source").glob("*.safetensors"))
    assert len(files) > 1
    options: dict[str, Any] = {"factor": 2}
    model = hf_posenc.from_pretrained(tmp_path / "source", encoding=name, options=options)
    made = export(model, tmp_path / "out")
    assert sorted(file.name for file in made.path.glob("*.safetensors")) == files
    index = json.loads((made.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight" not in index
    loaded = hf_posenc.from_pretrained(made.path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded, tiny_ids(LENGTH)), logits(model, tiny_ids(LENGTH)))


def test_the_umask_holds(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        made = export(patch_model(tiny_model("llama"), NATIVE["llama"]), tmp_path / "out")
    finally:
        os.umask(old)
    assert made.path.stat().st_mode & 0o777 == 0o750
