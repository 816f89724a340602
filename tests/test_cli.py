"""The command line: what it prints, what it writes, and the exit status of every kind of mistake."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

import hf_posenc
from hf_posenc import report
from hf_posenc.cli import app

COMPARE = ("compare", "demo:llama", "--encodings", "none")
TEXT = "The number of Ada is 12345. The blue door moves under the stars. " * 10


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder that `patch` wrote, and what it printed."""
    out = tmp_path_factory.mktemp("patched") / "yarn"
    arguments = ("--factor", 4, "--option", "beta_fast=16", "--out", out)
    return out, run("patch", "demo:llama", "yarn", *arguments)


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'transformers', 'matplotlib', 'peft', 'lm_eval'}"
    code = f"import sys, hf_posenc.cli; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_command_runs_as_a_module_of_its_own() -> None:
    command = [sys.executable, "-m", "hf_posenc", "verify", "no/such/folder/anywhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == "hf-posenc: no such folder: no/such/folder/anywhere"


@pytest.mark.parametrize("command", ["list", "patch", "verify", "compare", "eval", "finetune", "demo"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and f"hf-posenc {command}" in result.output


def test_list_names_every_encoding() -> None:
    result = run("list")
    assert result.exit_code == 0
    assert all(row.name in result.stdout for row in hf_posenc.list_encodings())


def test_list_architectures_is_the_support_matrix() -> None:
    result = run("list", "--architectures")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in [*hf_posenc.list_architectures(), "dynamic_yarn"])
    pairs = [(a, row.name) for a in hf_posenc.list_architectures() for row in hf_posenc.list_encodings()]
    refused = [pair for pair in pairs if not hf_posenc.support(*pair)]
    assert f"{len(refused)} of {len(pairs)} pairs are refused" in result.stdout and len(refused) == 14


def test_patch_saves_a_model_that_loads_patched(yarn: tuple[Path, Result]) -> None:
    out, result = yarn
    assert result.exit_code == 0, result.output
    assert "plain Transformers reads it with its encoding" in result.stdout
    encoding = hf_posenc.get_encoding(hf_posenc.from_pretrained(out))
    assert encoding is not None and encoding.name == "yarn"
    assert encoding.options()["factor"] == 4 and encoding.options()["beta_fast"] == 16
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"] == [97]


def test_patch_says_so_where_plain_transformers_cannot_read_the_result(tmp_path: Path) -> None:
    result = run("patch", "demo:llama", "alibi", "--out", tmp_path, "--no-verify")
    assert result.exit_code == 0, result.output
    assert "plain Transformers cannot express alibi" in result.stdout


def test_verify_of_a_patched_folder(yarn: tuple[Path, Result]) -> None:
    result = run("verify", yarn[0])
    assert result.exit_code == 0, result.output


def test_verify_with_an_encoding_of_choice() -> None:
    result = run("verify", "demo:llama", "--encoding", "linear", "--factor", 2)
    assert result.exit_code == 0, result.output


def test_verify_of_a_model_without_a_patch_asks_for_one() -> None:
    result = run("verify", "demo:llama")
    assert result.exit_code == 2 and "--encoding" in result.stderr


def test_a_failed_check_is_exit_status_1(yarn: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(passed=False, rows=[], table=lambda: "cached = uncached: FAILED")
    monkeypatch.setattr(hf_posenc, "verify", lambda *_args, **_options: failed)
    result = run("verify", yarn[0])
    assert result.exit_code == 1 and "FAILED" in result.stdout


def test_nothing_is_saved_when_a_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(passed=False, rows=[], table=lambda: "FAILED")
    monkeypatch.setattr(hf_posenc, "verify", lambda *_args, **_options: failed)
    assert run("patch", "demo:llama", "yarn", "--factor", 2, "--out", tmp_path / "out").exit_code == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_compare_writes_its_report(tmp_path: Path, text: Path) -> None:
    options = ("--encodings", "none,yarn:factor=2,beta_fast=16,linear", "--factor", 4, "--tail", 16)
    result = run("compare", "demo:llama", *options, "--lengths", "64,128", "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "demo:llama: perplexity, last 16 tokens" in result.stdout
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["header"]["model"] == "demo:llama" and stored["header"]["trained_length"] == 256
    assert [row["options"].get("factor") for row in stored["rows"]] == [None, None, 2, 2, 4, 4]
    assert {"perplexity.png", "results.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_compare_says_before_the_run_that_there_will_be_no_plot(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "can_plot", lambda: False)
    options = ("--encodings", "none", "--lengths", "32", "--text", text, "--out", tmp_path / "out")
    result = run("compare", "demo:llama", *options)
    assert result.exit_code == 0 and "pip install 'hf-posenc[report]'" in result.stderr
    assert not (tmp_path / "out" / "perplexity.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("patch", "demo:llama", "yarm", "--factor", 4, "--out", "OUT"), "did you mean 'yarn'"),
        (("patch", "demo:llama", "yarn", "--factor", 0.5, "--out", "OUT"), "factor"),
        (("patch", "demo:llama", "yarn", "--factor", "nan", "--out", "OUT"), "factor"),
        (("patch", "demo:llama", "yarn", "--option", "facto=4", "--out", "OUT"), "did you mean 'factor'"),
        (("patch", "demo:llama", "yarn", "--option", "factor", "--out", "OUT"), "key=value"),
        (("patch", "demo:llama", "yarn", "--factor", 2, "--option", "factor=4", "--out", "OUT"), "given twice"),
        (("patch", "demo:llama", "yarn", "--factor", 2, "--out", "TEXT/below-a-file"), "cannot write"),
        (("patch", "demo:lama", "yarn", "--factor", 2, "--out", "OUT"), "did you mean 'llama'"),
        (("patch", "./no-such-folder", "yarn", "--factor", 2, "--out", "OUT"), "no such folder"),
        (("patch", "EMPTY", "yarn", "--factor", 2, "--out", "OUT"), "holds no config.json"),
        (("patch", "demo:llama", "yarn", "--factor", 2, "--dtype", "float7", "--out", "OUT"), "unknown dtype"),
        (("verify", "demo:llama", "--factor", 2), "without --encoding"),
        (("verify", "demo:llama", "--encoding", "nope", "--factor", 2), "factor"),
        (("verify", "demo:llama", "--encoding", "nope", "--device", "gpu"), "unknown device"),
        (("compare", "demo:llama", "--lengths", "64", "--text", "TEXT", "--out", "OUT"), "linear needs factor"),
        ((*COMPARE, "--lengths", "64,many", "--text", "TEXT", "--out", "OUT"), "'many' is not"),
        ((*COMPARE, "--lengths", "9999", "--text", "TEXT", "--out", "OUT"), "has 650 tokens"),
        ((*COMPARE, "--lengths", "64", "--text", "MISSING", "--out", "OUT"), "cannot read the text"),
        ((*COMPARE, "--lengths", "64", "--tail", 64, "--text", "TEXT", "--out", "OUT"), "tail must be"),
        ((*COMPARE, "--lengths", "64", "--text", "TEXT", "--out", "TEXT/x"), "cannot write"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_status_2(
    arguments: tuple[object, ...], says: str, tmp_path: Path, text: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"OUT": tmp_path / "out", "TEXT": text, "EMPTY": tmp_path / "empty", "MISSING": tmp_path / "missing.txt"}
    places["TEXT/below-a-file"] = places["TEXT/x"] = text / "out"
    result = run(*(places.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("hf-posenc: ")]
    assert len(lines) == 1 and says in lines[0]
    assert "Traceback" not in result.output
