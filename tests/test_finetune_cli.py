"""`hf-posenc finetune`: flags and files, what it prints, exit statuses."""

import json
from pathlib import Path

import pytest
import yaml
from tuning import TEXTS, save_base
from typer.testing import CliRunner, Result

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.errors import PosencError
from hf_posenc.finetuning.settings import Settings

SHORT = ("--max-length", 48, "--steps", 3, "--training", "logging_steps=1", "--training", "disable_tqdm=true")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["finetune", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_base(folder / "llama")
    (folder / "text.txt").write_text("\n".join(TEXTS))
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    return folder


def test_a_run_measures_before_and_after_merges_and_can_be_repeated(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    encoding = ("--encoding", "yarn", "--factor", 4, "--option", "beta_fast=16")
    measured = ("--eval-lengths", "40,120", "--eval-text", base / "text.txt", "--eval-every", 2)
    result = run(base / "llama", *encoding, "--data", base / "text.txt", *SHORT, *measured, "--merge", "--out", out)
    assert result.exit_code == 0, result.output
    assert "perplexity, by length" in result.stdout and "merged:" in result.stdout and "tokens/s" in result.stdout
    figures = json.loads((out / "results.json").read_text())
    assert [row["step"] for row in figures["evaluations"]] == [0, 2, 3]
    page = (out / "report.html").read_text()
    first, last = (figures["evaluations"][i]["perplexity"]["120"] for i in (0, -1))
    assert f"{last / first:.3f} ×" in page and "before" in page and "after" in page and "beta_fast=16" in page
    assert page.count("<svg") == 2 and "<script" not in page
    assert set(figures["evaluations"][0]["perplexity"]) == {"40", "120"} and list(figures["losses"]) == ["1", "2", "3"]
    options = hf_posenc.get_encoding(hf_posenc.from_pretrained(out / "merged")).options()
    assert options["factor"] == 4 and options["beta_fast"] == 16
    again = run("--config", out / "finetune.yaml", "--out", tmp_path / "again", "--rank", 2)
    assert again.exit_code == 0, again.output
    stored = yaml.safe_load((tmp_path / "again" / "finetune.yaml").read_text())
    assert stored["lora"]["r"] == 2 and stored["encoding"] == {"name": "yarn", "factor": 4, "beta_fast": 16}
    Settings.of({key: value for key, value in stored.items() if key != "versions"})


def test_fields_of_training_count_as_their_flags_do_and_before_a_file(base: Path, tmp_path: Path) -> None:
    common = (base / "llama", "--data", base / "text.txt", "--max-length", 48, "--training", "disable_tqdm=true")
    fields = ("max_steps=2", "learning_rate=0.01", "per_device_train_batch_size=2")
    given = [word for field in fields for word in ("--training", field)]
    assert run(*common, *given, "--out", tmp_path / "a").exit_code == 0
    found = yaml.safe_load((tmp_path / "a" / "finetune.yaml").read_text())["training"]
    assert [found[field.partition("=")[0]] for field in fields] == [2, 0.01, 2]
    assert json.loads((tmp_path / "a" / "results.json").read_text())["steps"] == 2
    file = ("--config", tmp_path / "a" / "finetune.yaml", "--training", "learning_rate=0.02", "--steps", 1)
    assert run(*file, "--out", tmp_path / "b").exit_code == 0
    found = yaml.safe_load((tmp_path / "b" / "finetune.yaml").read_text())["training"]
    assert (found["max_steps"], found["learning_rate"], found["per_device_train_batch_size"]) == (1, 0.02, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--training", "max_steps=2", "--steps", 3), "the same setting"),
        (("--training", "learning_rate=abc"), "give a number"),
        (("--full", "--merge"), "no adapter to merge"),
        (("--training", "report_to=nosuchtracker"), "nosuchtracker is not supported"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_a_refused_run_says_why_and_leaves_no_folder(
    base: Path, tmp_path: Path, wrong: tuple[object, ...], said: str
) -> None:
    data = () if "--data" in wrong else ("--data", base / "text.txt")
    result = run(base / "llama", *data, "--max-length", 48, *wrong, "--out", tmp_path / "out")
    assert isinstance(result.exception, PosencError | SystemExit) and result.exit_code != 0
    assert said in f"{result.exception} {result.output}" and not (tmp_path / "out").exists()


def test_more_training_removes_what_was_merged_before(base: Path, tmp_path: Path) -> None:
    common = (base / "llama", "--data", base / "text.txt", "--max-length", 48, "--training", "disable_tqdm=true")
    assert run(*common, "--steps", 1, "--merge", "--out", tmp_path).exit_code == 0
    for folder in (tmp_path, tmp_path / "merged"):  # of a model with its own positions, too
        assert hf_posenc.get_encoding(hf_posenc.from_pretrained(folder)) is None
    assert run(*common, "--steps", 2, "--out", tmp_path).exit_code == 0
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("mode", ["packed", "pose", "randomized"])
def test_modes(base: Path, tmp_path: Path, mode: str) -> None:
    data = ("--data", base / "rows.jsonl", "--column", "body", "--mode", mode)
    flags = ("--training", "gradient_checkpointing=true", "--no-norms", "--target", "q_proj", "--batch-size", 2)
    result = run(base / "llama", "--encoding", "linear", "--factor", 4, *data, *SHORT, *flags, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    stored = yaml.safe_load((tmp_path / "finetune.yaml").read_text())
    assert stored["data"]["mode"] == mode and stored["lora"]["targets"] == ["q_proj"] and not stored["lora"]["norms"]


@pytest.mark.extended
def test_passkey_documents_and_their_score(tmp_path: Path) -> None:
    data = ("--data", "task:passkey", "--max-length", 192, "--steps", 2)
    result = run("demo:llama", *data, "--eval-lengths", 160, "--eval-tasks", "passkey", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    assert all(0 <= row["tasks"]["passkey"]["160"] <= 1 for row in rows) and len(rows) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "TEXT", "--max-length", 48, "--out", "OUT"), "no model"),
        (("MODEL", "--data", "TEXT", "--max-length", 48), "no folder"),
        (("MODEL", "--max-length", 48, "--out", "OUT"), "no data"),
        (("MODEL", "--data", "TEXT", "--factor", 2, "--max-length", 48, "--out", "OUT"), "without --encoding"),
        (
            ("MODEL", "--data", "TEXT", "--max-length", 48, "--training", "lr=1", "--out", "OUT"),
            "training argument 'lr'",
        ),
        (("MODEL", "--encoding", "yarm", "--data", "TEXT", "--max-length", 48, "--out", "OUT"), "did you mean 'yarn'"),
        (("demo:lama", "--data", "TEXT", "--max-length", 48, "--out", "OUT"), "did you mean 'llama'"),
        (("MODEL", "--data", "TEXT", "--max-length", 9999, "--out", "OUT"), "less than one window"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    base: Path, tmp_path: Path, arguments: tuple[object, ...], says: str
) -> None:
    places = {"OUT": tmp_path, "TEXT": base / "text.txt", "MODEL": base / "llama"}
    result = run(*(places.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("hf-posenc: ")]
    assert len(lines) == 1 and says in lines[0]


def test_an_interrupted_run_says_how_to_go_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt("stopped after step 3 of 9; the same command again goes on from there")

    monkeypatch.setattr("hf_posenc.finetuning.run.run", stopped)
    result = run(base / "llama", "--data", base / "text.txt", *SHORT, "--out", tmp_path)
    assert result.exit_code == 130 and "goes on from there" in result.stderr
