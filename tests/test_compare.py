"""A comparison: its cells against plain logits, its refusals before any work, and its files."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import plain_nll
from task_toys import odd_tokenizer, word_tokenizer
from tiny import tiny_model
from torch import Tensor
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc import report
from hf_posenc.demo import model_path
from hf_posenc.errors import (
    CheckpointError,
    OptionError,
    PosencError,
)
from hf_posenc.evaluate import cells
from hf_posenc.evaluate.compare import compare, parse_lengths, run_comparison
from hf_posenc.evaluate.memory import is_out_of_memory, peak_memory
from hf_posenc.evaluate.perplexity import ppl, token_nll
from hf_posenc.evaluate.results import CompareRow, Comparison
from hf_posenc.evaluate.specs import EncodingSpec

TEXT = "The number of Ada is 12345. The blue door moves under the stars. " * 4


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("llama"))


@pytest.mark.parametrize("lengths", ["", "8,x", "1", "8.5", [8.5], [True], []])
def test_lengths_that_are_refused(lengths: Any) -> None:
    with pytest.raises(OptionError, match="length"):
        parse_lengths(lengths)


def test_a_comparison_is_what_one_would_do_by_hand(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model("llama", vocab_size=264)
    made = run_comparison(
        model,
        tokenizer,
        "none,linear,dynamic_yarn",
        factor=2,
        lengths="48,24",
        text=TEXT,
        tail=8,
        out=tmp_path,
        progress=False,
    )
    assert [(row.encoding, row.length) for row in made.rows] == [
        (name, length) for name in ("none", "linear", "dynamic_yarn") for length in (24, 48)
    ]
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    for row in made.rows:
        with cells.apply(model, EncodingSpec(row.encoding, row.options)):
            nll = plain_nll(model, ids[: row.length])
        assert row.error is None and row.tokens == row.length - 1 == len(nll)
        assert row.ppl == pytest.approx(ppl(nll), rel=1e-5) and row.ppl_tail == pytest.approx(ppl(nll[-8:]), rel=1e-5)
    assert made.rows[0].options == {} and made.rows[2].options == {"factor": 2}
    assert hf_posenc.get_encoding(model) is None

    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert [row["ppl"] for row in stored["rows"]] == [row.ppl for row in made.rows]
    assert {"model", "model_type", "versions", "device", "dtype", "threads", "protocol", "date", "text"} <= set(
        stored["header"]
    )
    assert stored["header"]["text"]["tokens"] == 48 and len(stored["header"]["text"]["sha256"]) == 64
    with (tmp_path / "results.csv").open() as file:
        assert [json.loads(line["options"]) for line in csv.DictReader(file)] == [
            row["options"] for row in stored["rows"]
        ]
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    names = {"results.json", "results.csv", "perplexity.png", "report.html"}
    assert names <= {path.name for path in tmp_path.iterdir()} <= names | {"nll_by_position.png"}


@pytest.mark.parametrize("made", [word_tokenizer, odd_tokenizer])
def test_a_tokenizer_without_a_beginning_or_with_odd_blanks_is_enough(made: Any) -> None:
    tokenizer, text = made(), " \n\n" + TEXT.replace(" ", "   ")
    (row,) = compare(tiny_model("llama"), tokenizer, "none", lengths=[24], text=text, progress=False)
    ids = torch.tensor(tokenizer(text)["input_ids"])[:24]
    assert row.ppl == pytest.approx(ppl(plain_nll(tiny_model("llama"), ids)), rel=1e-5)


def test_a_cell_past_a_tables_end_says_so_and_the_rest_goes_on(tokenizer: Any) -> None:
    model = tiny_model("gpt2", vocab_size=264)
    rows = compare(model, tokenizer, "none,rope,learned", lengths=[32, 40], text=TEXT, progress=False)
    errors = {(row.encoding, row.length): row.error for row in rows}
    for name in ("none", "learned"):
        assert errors[name, 32] is None and "32" in (errors[name, 40] or "")
    assert errors["rope", 40] is None
    assert next(row for row in rows if row.error).ppl is None


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory: …")]
)
def test_exhausted_memory_is_a_cells_error(error: Exception, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = token_nll

    def failing(model: Any, ids: Tensor) -> Tensor:
        if len(ids) == 40:
            raise error
        return real(model, ids)

    monkeypatch.setattr(cells, "token_nll", failing)
    rows = compare(
        tiny_model("llama", vocab_size=264), tokenizer, "none,rope", lengths=[40, 48], text=TEXT, progress=False
    )
    assert [row.error for row in rows] == ["out of memory at 40 tokens", None] * 2


def test_another_runtime_error_is_not_taken_for_a_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": [5000]}, "has 260 tokens; the longest length needs 5000"),
        ({"tail": 24}, "below the shortest length, 24"),
        ({"tail": 0}, "tail must be"),
        ({"text": " \n"}, "is empty"),
        ({"text": Path("no/such/file.txt")}, "cannot read the text"),
        ({"encodings": "none,yarm"}, "did you mean 'yarn'"),
        ({"encodings": "yarn:factor=2,original_max_position_embeddings=-3"}, "original_max_position_embeddings"),
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"dtype": "bfloat16"}, "model's own"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
    ],
)
def test_bad_input_is_refused_before_the_first_forward(
    change: dict[str, Any], says: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "token_nll", lambda *_: pytest.fail("a forward was run"))
    arguments = {"encodings": "none", "lengths": [24], "text": TEXT, "tokenizer": tokenizer, "progress": False} | change
    with pytest.raises(PosencError, match=says):
        compare(tiny_model("llama", vocab_size=264), **arguments)


def test_a_run_that_is_stopped_keeps_its_cells(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(model: Any, ids: Tensor) -> Tensor:
        if len(ids) == 40:
            raise KeyboardInterrupt
        return token_nll(model, ids)

    monkeypatch.setattr(cells, "token_nll", stopped)
    model = tiny_model("llama", vocab_size=264)
    with pytest.raises(KeyboardInterrupt):
        compare(model, tokenizer, "rope", lengths=[24, 40], text=TEXT, out=tmp_path, progress=False)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [row["length"] for row in stored["rows"]] == [24] and stored["complete"] is False
    assert hf_posenc.get_encoding(model) is None


def test_text_that_is_not_utf8(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(OptionError, match=r"latin\.txt is not UTF-8: byte 2"):
        compare(tiny_model("llama"), tokenizer, "none", lengths=[4], text=tmp_path / "latin.txt")


def test_a_folder_that_cannot_be_written_is_met_first(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        compare(tiny_model("llama"), tokenizer, "none", lengths=[4], text=TEXT, out=tmp_path / "file" / "out")


def test_peak_memory_sees_what_was_there_and_gone() -> None:
    with peak_memory(torch.device("cpu")) as peak:
        torch.zeros(16_000_000).add_(1)
    assert peak.bytes is None or 60e6 < peak.bytes < 80e6  # None: a system that keeps no high-water mark


def test_without_matplotlib_the_figures_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_plot", lambda: False)
    rows = [
        CompareRow("none", {}, 8, 7, math.inf, math.nan, 0.1, None),
        CompareRow("yarn", {"factor": 2}, 8, 0, error="x"),
    ]
    made = Comparison({"model": "m", "tail": 4}, rows)
    assert [path.name for path in report.write_report(tmp_path, made)] == ["results.json", "results.csv"]
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert stored[0]["ppl"] == "inf" and stored[1] == stored[1] | {"ppl": None, "error": "x"}
    assert report.error_lines(rows) == ["yarn (factor=2) at 8: x"]
