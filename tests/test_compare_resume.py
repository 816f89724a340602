"""A comparison with tasks, stopped and taken up again: no cell twice, no half-written file, no mixing of conditions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_posenc.demo import model_path
from hf_posenc.errors import OptionError, UnknownNameError
from hf_posenc.eval_tasks.text import document
from hf_posenc.evaluate import grid, loading
from hf_posenc.evaluate.compare import run_comparison
from hf_posenc.evaluate.conditions import differing, weights_digest
from hf_posenc.evaluate.results import Comparison
from hf_posenc.evaluate.resume import read

TEXT = document(3, 400, split="held-out")
ASKED: dict[str, Any] = {"lengths": [130, 160], "text": TEXT, "tasks": "passkey", "num_samples": 3, "progress": False}


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("llama"))


@pytest.fixture
def model() -> Any:
    return loading.load_model("demo:llama", dtype="float32", device="cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[grid.Cell]:
    """Every cell that is really measured, in order."""
    seen: list[grid.Cell] = []
    plain = grid.Bench.measure

    def counted(bench: grid.Bench, cell: grid.Cell) -> Any:
        seen.append(cell)
        return plain(bench, cell)

    monkeypatch.setattr(grid.Bench, "measure", counted)
    return seen


def keys(cells: list[grid.Cell]) -> list[tuple[str, str, int]]:
    return [cell.key for cell in cells]


def stop_after(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th cell is the last: the user presses Ctrl-C while the next is measured."""
    plain, done = grid.Bench.measure, []

    def interrupted(bench: grid.Bench, cell: grid.Cell) -> Any:
        if len(done) == n:
            raise KeyboardInterrupt
        done.append(cell)
        return plain(bench, cell)

    monkeypatch.setattr(grid.Bench, "measure", interrupted)


def test_every_cell_of_the_grid(model: Any, tokenizer: Any, measured: list[grid.Cell]) -> None:
    made = run_comparison(model, tokenizer, "none,yarn", factor=2, **ASKED)
    labels = [(row.label, row.length) for row in made.rows]
    assert labels == [("none", 130), ("none", 160), ("yarn (factor=2)", 130), ("yarn (factor=2)", 160)]
    assert [(row.label, row.length) for row in made.task_rows] == labels
    assert all(row.task == "passkey" and row.form == "generate" and row.samples == 3 for row in made.task_rows)
    assert len(measured) == 8 and made.complete
    none = [row.acc for row in made.task_rows if row.label == "none"]
    assert none == [1.0, 1.0], "the embedded model finds its keys inside its length"
    assert set(made.task_rows[0].by_depth) == {0.0, 0.25, 0.5}
    assert made.rows[0].nll_by_position[-1][0] == 130


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, model: Any, tokenizer: Any, measured: list[grid.Cell]
) -> None:
    whole = run_comparison(model, tokenizer, "none,yarn", factor=2, **ASKED)
    order, first = keys(measured), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(3, patch)
        run_comparison(model, tokenizer, "none,yarn", factor=2, out=first, **ASKED)
    begun = read(first)
    assert begun is not None and not begun.complete and len(begun.rows) + len(begun.task_rows) == 3
    assert "Incomplete: the run was stopped" in (first / "report.html").read_text()
    measured.clear()
    resumed = run_comparison(model, tokenizer, "none,yarn", factor=2, out=first, **ASKED)
    assert keys(measured) == order[3:]
    assert [row.ppl for row in resumed.rows] == [row.ppl for row in whole.rows]
    assert [row.acc for row in resumed.task_rows] == [row.acc for row in whole.task_rows]
    stored = read(first)
    assert stored is not None and stored.complete
    assert [row.label for row in stored.rows] == [row.label for row in whole.rows]
    assert not list(first.glob(".*"))


def test_a_grown_grid_measures_only_what_is_new(
    tmp_path: Path, model: Any, tokenizer: Any, measured: list[grid.Cell]
) -> None:
    run_comparison(model, tokenizer, "none", out=tmp_path, **{**ASKED, "tasks": ""}, tail=20)
    measured.clear()
    made = run_comparison(model, tokenizer, "none,alibi", out=tmp_path, **ASKED, tail=20)
    assert keys(measured) == [
        ("none", "passkey", 130),
        ("none", "passkey", 160),
        ("alibi", "perplexity", 130),
        ("alibi", "passkey", 130),
        ("alibi", "perplexity", 160),
        ("alibi", "passkey", 160),
    ]
    assert set(made.header["encodings"]) == {"none", "alibi"} == set(made.header["anatomy"])
    measured.clear()
    run_comparison(model, tokenizer, "none,alibi", out=tmp_path, **ASKED, tail=20)
    assert not measured
    longer: dict[str, Any] = {**ASKED, "lengths": [130, 170], "tasks": ""}
    run_comparison(model, tokenizer, "none", out=tmp_path, **longer, tail=20)
    assert keys(measured) == [("none", "perplexity", 170)]
    measured.clear()
    run_comparison(model, tokenizer, "none,alibi", out=tmp_path, **ASKED, tail=20, resume=False)
    assert len(measured) == 8


def test_failed_cells_are_tried_again(
    tmp_path: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {**ASKED, "tasks": "", "out": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr("hf_posenc.evaluate.cells.token_nll", lambda *_: exec("raise MemoryError"))
        patch.setattr(grid, "warm_up", lambda *_: None)
        failed = run_comparison(model, tokenizer, "none", **asked)
    assert [row.error for row in failed.rows] == ["out of memory at 130 tokens", "out of memory at 160 tokens"]
    assert [row.error for row in run_comparison(model, tokenizer, "none", **asked).rows] == [None, None]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text": TEXT + " More."}, "text .sha256.: "),
        ({"tail": 30}, "tail: 20 there, 30 here"),
        ({"num_samples": 4}, "tasks num_samples: 3 there, 4 here"),
        ({"form": "loglikelihood"}, "tasks form: generate there, loglikelihood here"),
        ({"stride": 50}, "stride: None there, 50 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_cells_of_other_conditions_are_never_mixed(
    tmp_path: Path, model: Any, tokenizer: Any, change: dict[str, Any], says: str
) -> None:
    asked: dict[str, Any] = {**ASKED, "lengths": [130], "tail": 20, "out": tmp_path}
    run_comparison(model, tokenizer, "none", **asked)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(OptionError, match=says) as caught:
        run_comparison(model, tokenizer, "none", **{**asked, **change})
    assert "--restart" in str(caught.value)
    assert (tmp_path / "results.json").read_bytes() == before


def test_retrained_weights_are_another_model(model: Any) -> None:
    before = weights_digest(model)
    assert weights_digest(model) == before
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.001)
    assert weights_digest(model) != before


def test_headers_that_differ_only_in_what_moves_no_figure() -> None:
    header = {"model": "m", "text": {"sha256": "a"}, "tasks": None, "date": "1", "threads": 1}
    assert differing(header, {**header, "date": "2", "threads": 8, "tasks": {"seed": 1}}) is None
    assert differing(header, {**header, "text": None}) is None
    assert differing(header, {**header, "model": "n"}) == "model: m there, n here"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"header": {}, "rows": []}', '{"header": {}, "rows": [1]}'])
def test_a_foreign_results_file_is_left_alone(tmp_path: Path, model: Any, tokenizer: Any, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(OptionError, match="is not a comparison of this version"):
        run_comparison(model, tokenizer, "none", out=tmp_path, **ASKED)
    assert (tmp_path / "results.json").read_text() == content


def test_results_read_back_as_they_were(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    made = run_comparison(model, tokenizer, "none", out=tmp_path, **ASKED)
    assert read(tmp_path) == Comparison.from_json(json.loads(json.dumps(made.as_json())))


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"text": None, "tasks": ""}, OptionError, "nothing to measure"),
        ({"tasks": "paskey"}, UnknownNameError, "did you mean 'passkey'"),
        ({"tasks": "niah_single_2"}, OptionError, "haystack=FILE"),
        ({"lengths": [60]}, OptionError, "too short for a passkey document"),
        ({"form": "chat"}, UnknownNameError, "form"),
        ({"sampels": 3}, UnknownNameError, "num_samples|option"),
        ({"stride": 0}, OptionError, "stride"),
        ({"stride": 131}, OptionError, "stride"),
    ],
    ids=lambda value: "",
)
def test_bad_input_is_met_before_the_first_forward(
    tmp_path: Path, model: Any, tokenizer: Any, asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(error, match=says):
        run_comparison(model, tokenizer, "none", out=tmp_path, **{**ASKED, **asked})
    assert not calls and not list(tmp_path.iterdir())


def test_a_group_names_the_tasks_that_lack_a_file(model: Any, tokenizer: Any) -> None:
    asked: dict[str, Any] = {**ASKED, "tasks": "niah_single_1,ruler", "text": None, "num_samples": 1, "lengths": [1400]}
    made = run_comparison(model, tokenizer, "none", **{**asked, "form": "loglikelihood"})
    assert "too short for cwe" in made.header["not_run"]["cwe at 1400"]
    assert "niah_single_2" in made.header["not_run"] and "haystack=FILE" in made.header["not_run"]["niah_single_2"]
    assert {row.task for row in made.task_rows} >= {"niah_single_1", "vt", "fwe"}
    assert "cwe" not in {row.task for row in made.task_rows}
    assert not made.rows
