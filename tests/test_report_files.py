"""The report's files: what is written when, read back as it was, never half, and the figures that are counted out."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from samples import comparison, header, ppl_row, task_row

from hf_posenc import report
from hf_posenc.errors import CheckpointError
from hf_posenc.evaluate.results import CompareRow, Comparison
from hf_posenc.report import effective_lengths
from hf_posenc.report.measures import RULER_THRESHOLD, highest, lowest, mean_scores, short_names
from hf_posenc.report.plots import spaced, styles


def test_every_file_is_written_and_the_results_read_back(tmp_path: Path) -> None:
    made = comparison()
    paths = report.write_report(tmp_path, made)
    names = {"results.json", "results.csv", "tasks.csv", "report.html", "perplexity.png", "nll_by_position.png"}
    maps = {"passkey.png"}  # neither vt nor copy_distance has depths here
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths} == names | maps
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    back = Comparison.from_json(stored)
    assert back.rows == made.rows and back.task_rows == made.task_rows and back.complete is True
    assert back.header == made.header


def test_a_csv_line_a_cell(tmp_path: Path) -> None:
    made = comparison()
    report.write_results(tmp_path, made)
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["encoding"], int(line["length"])) for line in lines] == [(r.encoding, r.length) for r in made.rows]
    assert [json.loads(line["options"]) for line in lines] == [dict(row.options) for row in made.rows]
    with (tmp_path / "tasks.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["task"] for line in lines] == [row.task for row in made.task_rows]
    depths = [{float(depth): s for depth, s in json.loads(line["by_depth"]).items()} for line in lines]
    assert depths == [dict(row.by_depth) for row in made.task_rows]


def test_numbers_that_are_not_finite_go_through_strict_json(tmp_path: Path) -> None:
    rows = [CompareRow("none", {}, 8, 7, math.inf, math.nan), ppl_row("yarn", 8, None, "x", factor=2)]
    report.write_report(tmp_path, Comparison(header(), rows, complete=True))
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    back = Comparison.from_json(stored)
    assert back.rows[0].ppl == math.inf and math.isnan(back.rows[0].ppl_tail or 0) and back.rows[1] == rows[1]


def test_without_matplotlib_the_figures_alone_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_plot", lambda: False)
    names = [path.name for path in report.write_report(tmp_path, comparison())]
    assert names == ["results.json", "results.csv", "tasks.csv"]


def test_tasks_alone_make_a_report(tmp_path: Path) -> None:
    conditions = header() | {"tail": None, "text": None, "protocol": None}
    made = Comparison(conditions, [], [task_row("none", 16, 0.5, by_depth={0.0: 0.5})], True)
    names = {path.name for path in report.write_report(tmp_path, made)}
    assert names == {"results.json", "results.csv", "tasks.csv", "passkey.png", "report.html"}
    assert len(report.comparison_tables(made)) == 1


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        report.write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_terminal_tables_of_perplexity_and_of_every_task() -> None:
    made = comparison()
    tables = report.comparison_tables(made)
    assert all(isinstance(table, Group) for table in tables)
    titles = [str(table.renderables[0]) for table in tables]
    assert titles == [
        "tiny: perplexity, all tokens, by length",
        "tiny: perplexity, last 8 tokens, by length",
        "tiny: passkey, mean score of 20 documents, by length",
        "tiny: vt, mean score of 20 documents, by length",
        "tiny: copy_distance (loglikelihood), mean score of 20 documents, by length",
    ]
    assert report.error_lines([*made.rows, *made.task_rows]) == [
        "nope at 128: out of memory at 128 tokens",
        "passkey, nope at 128: out of memory",
    ]


EFFECTIVE = [
    # (scores by length, effective length)
    ({8: 0.9, 16: 0.9, 32: 0.9}, 32),
    ({8: 0.9, 16: 0.86, 32: 0.85}, 16),
    ({8: 0.9, 16: RULER_THRESHOLD, 32: 0.1}, 16),
    ({8: 0.9, 16: 0.1, 32: 1.0}, 8),  # what holds again further out does not count
    ({8: 0.8, 16: 1.0, 32: 1.0}, None),
    ({8: 0.9, 16: None, 32: 1.0}, 8),  # a cell that failed
    ({8: None, 16: 1.0, 32: 1.0}, None),
]


@pytest.mark.parametrize(("scores", "length"), EFFECTIVE)
def test_effective_length(scores: dict[int, float | None], length: int | None) -> None:
    rows = [task_row("yarn", n, score, error=None if score else "x") for n, score in scores.items()]
    other = [task_row("none", n, 1.0) for n in scores]  # so that every length was measured
    found = {made.label: made.length for made in effective_lengths(rows + other)}
    assert found == {"yarn": length, "none": 32}


def test_the_mean_is_over_all_tasks_and_a_missing_one_ends_the_count() -> None:
    rows = [task_row("yarn", n, 1.0, "a") for n in (8, 16, 32)] + [task_row("yarn", 8, 0.72, "b")]
    rows += [task_row("yarn", 16, 0.70, "b"), task_row("yarn", 32, None, "b", error="x")]
    rows += [task_row("none", n, 0.0, name) for n in (8, 16, 32) for name in ("a", "b")]
    assert mean_scores(rows)["yarn"] == {8: pytest.approx(0.86), 16: pytest.approx(0.85)}
    assert [(made.label, made.length) for made in effective_lengths(rows)] == [("yarn", 8), ("none", None)]
    assert effective_lengths(rows, threshold=0.85)[0].length == 16


def test_no_scores_no_effective_length() -> None:
    assert effective_lengths([]) == []
    assert effective_lengths([task_row("none", 8, None, error="x")]) == []


def test_leaders_are_those_that_cannot_be_told_apart() -> None:
    assert lowest({"a": 2.0, "b": 2.019, "c": 2.03, "d": 1.999}) == ["d", "a"]
    assert highest({"a": 0.9, "b": 0.89, "c": 0.88, "d": 0.895}) == ["a", "d", "b"]
    assert lowest({}) == [] and highest({}) == []


def test_long_names_are_cut_and_stay_apart() -> None:
    long = [f"longrope (short_factor={[1.0] * 32}, long_factor={[factor] * 32})" for factor in (2.0, 4.0, 8.0)]
    names = short_names(["none", *long])
    assert names["none"] == "none" and len(set(names.values())) == 4
    assert all(len(name) <= 48 for name in names.values())


def test_one_style_an_encoding_however_many() -> None:
    rows = [ppl_row("learned", 8, 2.0, factor=factor) for factor in range(1, 28)]
    looks = [(s["color"], s["linestyle"], s["marker"]) for s in styles(Comparison(header(), rows)).values()]
    assert len(set(looks)) == 27


def test_lengths_on_an_axis_do_not_run_into_each_other() -> None:
    assert spaced([128, 256, 512, 1024]) == [128, 256, 512, 1024]
    assert spaced([8192]) == [8192]
    kept = spaced([2**k for k in range(7, 18)])
    assert kept[-1] == 131072 and 4 <= len(kept) <= 7
