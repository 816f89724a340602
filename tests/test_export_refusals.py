"""What cannot be exported: a clear error, and model, folders and files as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from other_hosts import tiny_host
from pairs import Pair, logits
from refusals import assert_refused
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import export, patch_model
from hf_posenc.cli import app
from hf_posenc.encodings import Nope


def listing(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def model() -> Any:
    return patch_model(tiny_model("llama"), "alibi")


def test_a_folder_that_is_not_empty(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(model, out)  # an empty one is as good as none
    was = listing(out)
    assert_refused(OSError, "out|not empty|overwrite=True|--overwrite", lambda: export(model, out), model)
    assert listing(out) == was
    other = patch_model(tiny_model("llama"), "nope")
    export(other, out, overwrite=True)
    assert json.loads((out / "config.json").read_text())["hf_posenc"]["encoding"] == "nope"
    assert [file.name for file in tmp_path.iterdir()] == ["out"], "nothing is left beside it"


def test_a_folder_that_is_no_models(model: Any, tmp_path: Path) -> None:
    """`overwrite=True` is no leave to remove anything else."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    call = lambda: export(model, tmp_path / "letters", overwrite=True)  # noqa: E731
    assert_refused(OSError, "letters|config.json|not replaced", call, model)
    assert (tmp_path / "letters" / "a.txt").read_text() == "dear"
    file = tmp_path / "file"
    file.write_text("")
    assert_refused(OSError, "file", lambda: export(model, file, overwrite=True), model)
    assert_refused(OSError, "file|write", lambda: export(model, file / "below"), model)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "letters")
    assert_refused(OSError, "link", lambda: export(model, link, overwrite=True), model)
    assert_refused(TypeError, "path", lambda: export(model, 3), model)  # type: ignore[arg-type]


def test_what_others_put_beside_a_model_is_not_lost(model: Any, tmp_path: Path) -> None:
    """A folder with anything that no export writes is left as it is, and named."""
    out = tmp_path / "out"
    export(model, out)
    for name in ("notes.txt", "model.gguf", "pytorch_model.bin", "own.py", ".git"):
        (out / name).mkdir() if name == ".git" else (out / name).write_text("dear")
        was = listing(out)
        call = lambda: export(model, out, overwrite=True)  # noqa: E731
        assert_refused(OSError, f"{name}|not replaced|another folder", call, model)
        assert listing(out) == was
        (out / name).rmdir() if name == ".git" else (out / name).unlink()
    export(model, out, overwrite=True)


def test_sizes_of_files(model: Any, tmp_path: Path) -> None:
    for size in ("lots", "5", "-1GB", 0, -3, True, 2.5, ""):
        call = lambda size=size: export(model, tmp_path / "out", max_shard_size=size)  # noqa: E731
        assert_refused(ValueError, "max_shard_size|'5GB'", call, model)
    assert list(tmp_path.iterdir()) == []
    assert len(list(export(model, tmp_path / "out", max_shard_size="60 kb").path.glob("*.safetensors"))) > 1


def test_a_tokenizer_in_the_files_of_its_kind(tmp_path: Path) -> None:
    """`vocab.txt` alone, and `vocab.json` with `merges.txt`, as older checkpoints have them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"]
    bert, gpt2 = tmp_path / "bert", tmp_path / "gpt2"
    tiny_host("bert").save_pretrained(bert)
    (bert / "vocab.txt").write_text("\n".join(words) + "\n")
    tiny_model("gpt2").save_pretrained(gpt2)
    (gpt2 / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate([*"abc", "ab", "<|endoftext|>"])}))
    (gpt2 / "merges.txt").write_text("#version: 0.2\na b\n")
    for folder, text, want in ((bert, "a b", [2, 5, 6, 3]), (gpt2, "ab", [3])):
        made = export(hf_posenc.from_pretrained(folder, encoding="alibi"), tmp_path / f"{folder.name}-out")
        assert not made.notes and AutoTokenizer.from_pretrained(made.path)(text)["input_ids"] == want


def test_nothing_half_written(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up: the old folder is still there, and nothing beside it."""
    out = tmp_path / "out"
    export(model, out)
    was = listing(out)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    call = lambda place, **how: lambda: export(model, place, **how)  # noqa: E731
    assert_refused(OSError, "cannot write|No space", call(out, overwrite=True), model)
    assert_refused(OSError, "cannot write|No space", call(tmp_path / "new"), model)
    assert listing(out) == was and [file.name for file in tmp_path.iterdir()] == ["out"]


def test_targets_and_tokenizers(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert_refused(ValueError, "vllmm|did you mean|vllm", lambda: export(model, out, "vllmm"), model)  # type: ignore[arg-type]
    learned = patch_model(tiny_model("llama"), "learned", max_position_embeddings=64)
    for target in ("vllm", "gguf"):
        call = lambda target=target: export(learned, out, target)  # noqa: E731
        assert_refused(NotImplementedError, f"{target}|learned|embeddings of llama", call, learned)
        yarn = patch_model(tiny_model("llama"), "yarn", factor=2)
        assert_refused(OSError, "tokenizer=", lambda target=target, yarn=yarn: export(yarn, out, target), yarn)
    missing = tmp_path / "missing"
    assert_refused(OSError, "tokenizer|missing", lambda: export(model, out, tokenizer=missing), model)
    assert_refused(ValueError, "tokenizer", lambda: export(model, out, tokenizer=3), model)
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_not_whole(model: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert_refused(RuntimeError, "merge_and_unload", lambda: export(wrapped, tmp_path / "out"))
    merged = wrapped.merge_and_unload()
    made = export(merged, tmp_path / "out")
    assert torch.equal(logits(hf_posenc.from_pretrained(made.path), tiny_ids(20)), logits(merged, tiny_ids(20)))
    meta = patch_model(tiny_model("llama"), "alibi").to("meta")
    assert_refused(RuntimeError, "meta", lambda: export(meta, tmp_path / "meta"))
    assert_refused(NotImplementedError, "supported", lambda: export(torch.nn.Linear(2, 2), tmp_path / "linear"))


def test_an_encoding_without_a_name(tmp_path: Path) -> None:
    class Silence(Nope):
        name = "silence"

    model = patch_model(tiny_model("llama"), Silence())
    assert_refused(NotImplementedError, "silence|registry", lambda: export(model, tmp_path / "out"), model)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    pass
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out
"""


def base_with_code(folder: Path) -> Path:
    """A Llama with remote code of its own beside it."""
    tiny_model("llama").save_pretrained(folder)
    (folder / "modeling_own.py").write_text(CODE)
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_remote_code_in_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In use: kept and named, and nothing is put on top of it. Not in use: not named by the copy any more."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    base = base_with_code(tmp_path / "base")
    ids = tiny_ids(30)
    own = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
    made = export(patch_model(own, "yarn", factor=2), tmp_path / "yarn")
    assert (made.path / "modeling_own.py").is_file() and any("modeling_own" in note for note in made.notes)
    again = AutoModelForCausalLM.from_pretrained(made.path, trust_remote_code=True)
    assert type(again).__name__ == "OwnModel" and torch.equal(logits(again, ids), logits(own, ids))
    other = patch_model(AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True), "alibi")
    assert_refused(NotImplementedError, "code of its own", lambda: export(other, tmp_path / "alibi"), other)
    plain = patch_model(AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False), "alibi")
    made = export(plain, tmp_path / "plain")
    assert "own." not in json.dumps(json.loads((made.path / "config.json").read_text())["auto_map"])
    assert any("modeling_own" in note for note in made.notes)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("demo:llama", out, "--encoding", "alibi", "--factor", 2)
    assert result.exit_code == 0, result.output
    assert "own code" in result.stdout and "refused" in result.stdout and "trust_remote_code=True" in result.stdout
    assert (out / "tokenizer.json").is_file()
    result = run(out, tmp_path / "served", "--target", "vllm")
    assert result.exit_code == 2 and "no slopes reach" in result.stderr
    result = run("demo:llama", out, "--encoding", "yarn", "--factor", 4, "--target", "vllm")
    assert result.exit_code == 2 and "not empty" in result.stderr
    result = run("demo:llama", out, "--encoding", "yarn", "--factor", 4, "--target", "vllm", "--overwrite")
    assert result.exit_code == 0 and "--max-model-len 1024" in result.stdout
    for arguments in (("--target", "x"), ("--factor", 2), ("--encoding", "yarm")):
        result = run("demo:llama", tmp_path / "new", *arguments)
        assert result.exit_code == 2 and "\n" not in result.stderr.strip()
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written(model: Any, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.touch()  # where even root can make no folder
    assert_refused(OSError, "locked|write", lambda: export(model, locked / "out"), model)


def test_a_source_that_is_gone(tmp_path: Path) -> None:
    """The checkpoint that a model came from may have been removed since."""
    Pair("llama", "alibi").patched().save_pretrained(tmp_path / "source")
    model = hf_posenc.from_pretrained(tmp_path / "source")
    shutil.rmtree(tmp_path / "source")
    assert export(model, tmp_path / "out").verdict.how == "code"
