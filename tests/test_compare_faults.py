"""Comparisons and runs of tasks where something is wrong or missing: said in one line, and nothing is mixed up."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.demo import model_path
from hf_posenc.errors import CheckpointError, OptionError, UnknownNameError
from hf_posenc.eval_tasks.text import document
from hf_posenc.evaluate import loading
from hf_posenc.evaluate.compare import run_comparison
from hf_posenc.evaluate.run_tasks import run_tasks
from hf_posenc.evaluate.specs import EncodingSpec
from hf_posenc.evaluate.stream import TextSource

TEXT = document(5, 400, split="held-out")


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("llama"))


@pytest.fixture
def model() -> Any:
    return loading.load_model("demo:llama", dtype="float32", device="cpu")


def compared(model: Any, tokenizer: Any, encodings: str = "none", **asked: Any) -> Any:
    return run_comparison(model, tokenizer, encodings, **{"lengths": 64, "text": TEXT, "progress": False, **asked})


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("form", ["generate", "loglikelihood"])
def test_where_memory_ends_within_a_task_the_rest_goes_on(model: Any, tokenizer: Any, form: str) -> None:
    def full(_module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if (args[0] if args else inputs["input_ids"]).shape[1] > 180:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(full, with_kwargs=True)
    asked = {"lengths": [140, 240], "tasks": "passkey", "num_samples": 2, "form": form}
    made = compared(model, tokenizer, "none,alibi", **asked)
    assert [row.error for row in made.task_rows] == [None, "out of memory at 240 tokens"] * 2
    assert [row.error for row in made.rows] == [None, "out of memory at 240 tokens"] * 2
    assert made.complete


def test_another_config_or_tokenizer_is_another_model(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model_path("llama"), folder)
    compared(str(folder), None, out=out)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 50.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"config: .* there, .* here"):
        compared(str(folder), None, out=out)


def test_tasks_that_were_not_run_are_said_everywhere(tmp_path: Path) -> None:
    how = ("--lengths", 1400, "--tasks", "ruler", "--num-samples", 1, "--form", "loglikelihood")
    result = run("compare", "demo:llama", "--encodings", "none", *how, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    for name in ("niah_single_2", "qa_1", "cwe at 1400"):
        assert f"{name} was not run" in " ".join(result.stdout.split())
        assert f"{name} was not run" in page
    assert "Not run: " in page and "every cell that was tried has a figure" not in page


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(CheckpointError, match="another run is writing"):
        compared(model, tokenizer, out=tmp_path)
    (tmp_path / ".lock").unlink(missing_ok=True)
    compared(model, tokenizer, out=tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_new_start_leaves_no_file_of_the_old_figures(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    compared(model, tokenizer, out=tmp_path, lengths=130, tasks="passkey", num_samples=1)
    assert {"tasks.csv", "passkey.png"} <= {path.name for path in tmp_path.iterdir()}
    (tmp_path / "notes.txt").write_text("mine")
    compared(model, tokenizer, out=tmp_path, resume=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert not {"tasks.csv", "passkey.png"} & names and {"notes.txt", "report.html", "perplexity.png"} <= names


def test_shorter_lengths_join_a_run_with_its_tail(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    assert compared(model, tokenizer, out=tmp_path, lengths=[100, 200]).header["tail"] == 50
    made = compared(model, tokenizer, out=tmp_path, lengths=[60, 100])
    assert made.header["tail"] == 50
    assert sorted(row.length for row in made.rows) == [60, 100, 200]


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path, tokenizer: Any) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text(TEXT, encoding="utf-8")
    marked.write_text(TEXT, encoding="utf-8-sig")
    assert marked.stat().st_size == plain.stat().st_size + 3
    assert torch.equal(TextSource(marked).all_tokens(tokenizer), TextSource(plain).all_tokens(tokenizer))


def test_two_encodings_that_differ_in_the_last_digit_are_two() -> None:
    labels = [EncodingSpec("yarn", {"factor": factor}).label for factor in (2.0, 2.000001, 2.0000049)]
    assert labels == ["yarn (factor=2)", "yarn (factor=2.000001)", "yarn (factor=2.0000049)"]


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"tasks": "passkey_loglikelihood"}, OptionError, "give form='loglikelihood'"),
        ({"form": "chat"}, UnknownNameError, "unknown form 'chat'"),
        ({"batch_size": 0}, OptionError, "batch_size=0"),
        ({"batch_size": "auto"}, OptionError, "batch_size='auto'"),
        ({"text": str(Path(__file__))}, OptionError, "give Path"),
        ({"text": Path("no/such/file")}, CheckpointError, "no/such/file"),
        ({"haystack": "no/such/file", "tasks": "passkey"}, CheckpointError, "haystack"),
    ],
    ids=str,
)
def test_what_is_wrong_is_met_before_the_model_is_loaded(
    asked: dict[str, Any], error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(error, match=says):
        compared("demo:llama", None, out=tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch-size", "foo"), "batch_size='foo'"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--max-length", "0"), "max_length=0"),
        (("--include-path", "no/such/folder"), "no such folder"),
    ],
)
def test_eval_refuses_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    result = run("eval", "demo:llama", "--lengths", "130", "--num-samples", "1", *arguments)
    assert result.exit_code == 2 and says in result.stderr and "\n" not in result.stderr.strip()


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="CUDA devices here"):
        loading.parse_device("cuda:99")


def test_a_limit_past_the_end_of_a_table_is_refused() -> None:
    with pytest.raises(OptionError, match="positions end at 256"):
        run_tasks("demo:gpt2", "passkey", 300, num_samples=1, max_length=4096, device="cpu", bars=False)


def test_a_keyword_that_nobody_reads_is_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UnknownNameError, match="num_samples"):
        run_tasks(model, "passkey", 130, tokenizer=tokenizer, num_sample=3)
