"""Every mistake of a fine-tuning run: met before anything is trained where it can be, and said in words."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import assert_refused
from tiny import tiny_model
from transformers import TrainerCallback
from tuning import QUIET, TEXTS, YARN, save_base, tune

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.errors import CheckpointError, DivergedError, OptionError, UnknownNameError, UnsupportedError
from hf_posenc.finetuning.checkpoints import last_whole
from hf_posenc.finetuning.limits import refuse_context_parallel
from hf_posenc.finetuning.run import run
from hf_posenc.finetuning.settings import DataSettings, Settings, read_settings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base") / "llama")


def files(folder: Path) -> dict[str, Path]:
    """Data that are not as they should be, by name."""
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "short.txt").write_text("Too short.")
    (folder / "rows.jsonl").write_text('{"body": "a text"}\n')
    (folder / "number.jsonl").write_text('{"text": 3}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "latin.txt").write_bytes("Ünicode".encode("latin-1"))
    (folder / "empty").mkdir()
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("data", "how", "kind", "words"),
    [
        ("blank.txt", {}, ValueError, "no text: blank.txt"),
        ("empty", {}, ValueError, "no text|is empty"),
        ("short.txt", {}, ValueError, "short.txt has 11 tokens, less than one window of 48|max_length=11"),
        ("latin.txt", {}, ValueError, "not UTF-8: byte 0"),
        ("missing.txt", {}, OSError, "missing.txt: no such file"),
        ("rows.jsonl", {}, ValueError, "rows.jsonl, line 1|'text'|known: body"),
        ("rows.jsonl", {"data": {"column": "bod"}}, ValueError, "did you mean 'body'"),
        ("number.jsonl", {}, ValueError, "holds int, not a text"),
        ("broken.jsonl", {}, ValueError, "broken.jsonl, line 2 is not JSON"),
        (None, {"max_length": None}, ValueError, "max_length=0|--max-length"),
        (None, {"max_length": 200}, IndexError, "aims at 128 tokens (32 × the factor)|factor=6.25"),
        (None, {"data": {"mode": "pose", "target_length": 129}}, IndexError, "target_length=129"),
        (None, {"data": {"mode": "pose", "target_length": 40}}, ValueError, "below max_length=48"),
        (None, {"data": {"mode": "randomized", "target_length": 129}}, IndexError, "target_length=129"),
        (None, {"data": {"mode": "randomized", "target_length": 40}}, ValueError, "below max_length=48"),
        (None, {"data": {"mode": "packt"}}, ValueError, "did you mean 'packed'"),
        (None, {"data": {"target_length": 64}}, ValueError, "mode='pose' or 'randomized' only"),
        (None, {"data": {"clumn": "a"}}, ValueError, "did you mean 'column'"),
        (None, {"lora": {"targets": ["q_prj"]}}, ValueError, "unknown LoRA target 'q_prj'|q_proj"),
        (None, {"lora": {"rank": 4}}, ValueError, "setting of lora"),
        (None, {"lora": {"r": 0}}, ValueError, "r=0"),
        (None, {"training": {"learning_rat": 1}}, ValueError, "did you mean 'learning_rate'"),
        (None, {"training": {"output_dir": "x"}}, ValueError, "it is `out`"),
        (None, {"training": {"save_strategy": "sometimes"}}, ValueError, "sometimes"),
        (None, {"steps": 0}, ValueError, "max_steps"),
        (None, {"encoding": "yarm", "options": {"factor": 4}}, ValueError, "did you mean 'yarn'"),
        (None, {"evaluation": {"every": 2}}, ValueError, "lengths"),
        (None, {"evaluation": {"lengths": [64], "text": "TEXT"}}, ValueError, "the longest length needs 64"),
        (None, {"evaluation": {"lengths": [64], "tasks": "passky"}}, ValueError, "did you mean 'passkey'"),
        ("task:passky", {}, ValueError, "did you mean 'passkey'"),
    ],
)
def test_settings_and_data(
    base: str, tmp_path: Path, data: str | None, how: dict[str, Any], kind: type[Exception], words: str
) -> None:
    (tmp_path / "data").mkdir()
    places = files(tmp_path / "data")
    texts: Any = TEXTS if data is None else places.get(data, data if ":" in data else str(tmp_path / data))
    how = {**YARN, **how}
    if "evaluation" in how and "text" in how["evaluation"]:
        how["evaluation"] = {**how["evaluation"], "text": str(places["short.txt"])}
    assert_refused(kind, words, lambda: tune(base, tmp_path / "out", texts, **how))
    assert not list((tmp_path / "out").glob("*")), "nothing was written"


def test_a_table_ends(tmp_path: Path) -> None:
    gpt2 = save_base(tmp_path / "gpt2", "gpt2")
    assert_refused(IndexError, "the position table ends at 32", lambda: tune(gpt2, tmp_path / "out"))


def test_positions_that_a_host_would_drop(tmp_path: Path) -> None:
    bloom = save_base(tmp_path / "bloom", "bloom")
    assert_refused(
        NotImplementedError,
        "takes none as it is; patch it",
        lambda: tune(bloom, tmp_path / "out", data={"mode": "packed"}),
    )


def test_an_adapter_of_another_encoding_or_base(base: str, tmp_path: Path) -> None:
    tune(base, tmp_path / "first", **YARN, steps=1)
    adapter = str(tmp_path / "first")
    linear = {"encoding": "linear", "options": {"factor": 4}}
    assert_refused(
        RuntimeError,
        'was trained with yarn {"original_max_position_embeddings"|this model has linear',
        lambda: tune(base, tmp_path / "out", adapter=adapter, **linear),
    )
    other = save_base(tmp_path / "other")
    assert_refused(ValueError, f"was made for {base}", lambda: tune(other, tmp_path / "out", adapter=adapter, **YARN))
    assert_refused(OSError, "holds no adapter", lambda: tune(base, tmp_path / "out", adapter=other, **YARN))
    assert_refused(ValueError, "give its base as the model", lambda: tune(adapter, tmp_path / "out"))
    went_on = tune(base, tmp_path / "out", adapter=adapter, **YARN, steps=1)
    assert went_on.trained_parameters > 0
    assert hf_posenc.get_encoding(hf_posenc.from_pretrained(tmp_path / "out")).name == "yarn"


def test_an_adapter_of_a_model_from_nowhere(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama", vocab_size=264), "nope")
    assert_refused(RuntimeError, "loaded from nowhere", lambda: tune(model, tmp_path, tokenizer=byte_tokenizer()))


class Spoil(TrainerCallback):
    """Makes a weight infinite before the given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            next(p for p in model.parameters() if p.requires_grad).data.fill_(torch.inf)


def test_a_loss_that_is_no_number_stops_the_run(base: str, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"loss is (nan|inf) at step 3.*checkpoint-2"):
        tune(base, tmp_path, **YARN, callbacks=[Spoil(3)])
    assert last_whole(tmp_path) == (2, tmp_path / "checkpoint-2")
    assert tune(base, tmp_path, **YARN).steps == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json"])
def test_a_full_disk_leaves_the_last_checkpoint(base: str, tmp_path: Path, file: str) -> None:
    class Fill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (tmp_path / "checkpoint-4").mkdir()
                (tmp_path / "checkpoint-4" / file).symlink_to("/dev/full")

    with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be written.*checkpoint-2"):
        tune(base, tmp_path, **YARN, steps=6, callbacks=[Fill()])
    assert last_whole(tmp_path) == (2, tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-4").exists()
    assert tune(base, tmp_path, **YARN, steps=6).steps == 6


def test_a_folder_that_is_not_ours(base: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    assert_refused(RuntimeError, "checkpoints of another program", lambda: tune(base, tmp_path, **YARN))
    (tmp_path / "file").write_text("")
    assert_refused(OSError, "cannot write", lambda: tune(base, tmp_path / "file" / "out", **YARN))


def test_quantization_without_its_package(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    assert_refused(ValueError, "bitsandbytes", lambda: tune(base, tmp_path, **YARN, lora={"quantize": True}))


@pytest.mark.parametrize("name", ["alibi", "dynamic_yarn", "yarn", "sinusoidal", "nope"])
def test_context_parallelism_is_for_what_survives_it(name: str) -> None:
    model = patch_model(tiny_model("llama"), name, **({"factor": 4} if name == "yarn" else {}))
    arguments = SimpleNamespace(parallelism_config=SimpleNamespace(cp_size=2, sp_size=1))
    if name in ("alibi", "dynamic_yarn"):
        with pytest.raises(UnsupportedError, match=f"{name} with context parallelism: it acts inside the attention"):
            refuse_context_parallel(model, arguments, DataSettings(max_length=8))
    else:
        refuse_context_parallel(model, arguments, DataSettings(max_length=8))
        with pytest.raises(UnsupportedError, match="packed"):
            refuse_context_parallel(model, arguments, DataSettings(max_length=8, mode="packed"))


def test_settings_files(tmp_path: Path) -> None:
    good = {"data": {"max_length": 48, "source": "a.txt"}, "training": {"learning_rate": 2e-5}}
    (tmp_path / "a.json").write_text(json.dumps(good))
    (tmp_path / "a.yaml").write_text("data: {max_length: 48, source: a.txt}\ntraining: {learning_rate: 2e-5}\n")
    assert Settings.of(read_settings(tmp_path / "a.json")) == Settings.of(read_settings(tmp_path / "a.yaml"))
    (tmp_path / "bad.yaml").write_text("data: [1, 2\n")
    with pytest.raises(OptionError, match=r"bad.yaml are neither YAML nor JSON"):
        read_settings(tmp_path / "bad.yaml")
    with pytest.raises(CheckpointError, match="cannot read the settings"):
        read_settings(tmp_path / "none.yaml")
    with pytest.raises(UnknownNameError, match=r"group of settings 'trainin'.*'training'"):
        Settings.of({**good, "trainin": {}})


def test_a_written_file_repeats_the_run(base: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    first = tune(base, tmp_path / "first", tmp_path / "text.txt", **YARN, data={"shuffle": 4})
    again = run(Settings.of(read_settings(tmp_path / "first" / "finetune.yaml")), out=tmp_path / "again")
    assert again.losses == first.losses and set(first.losses) == {1, 2, 3, 4} and QUIET["logging_steps"] == 1
