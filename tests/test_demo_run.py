"""The demo on one short document: every file it promises, and sentences that follow from its own figures."""

import json
from pathlib import Path

import pytest
import torch

from hf_posenc.demo.run import TAIL, Size, best_and_worst, passkey_sentence, run_demo, sentence
from hf_posenc.evaluate.results import CompareRow, TaskRow

SMALL = Size(lengths=(128, 288), passkey_lengths=(128,), documents=1, samples=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    threads = torch.get_num_threads()
    run_demo(out, size=SMALL, progress=False)
    assert torch.get_num_threads() == threads
    return out


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_each_model_has_its_report(name: str, folder: Path) -> None:
    stored = json.loads((folder / name / "results.json").read_text(), parse_constant=pytest.fail)
    names = {path.name for path in (folder / name).iterdir()}
    assert names >= {"results.json", "results.csv", "perplexity.png", "report.html"}
    assert stored["header"]["trained_length"] == 256 and stored["header"]["threads"] == 1
    errors = {(row["encoding"], row["length"]) for row in stored["rows"] if row["error"]}
    assert errors == ({("none", 288)} if name == "gpt2" else set())
    assert {row["task"] for row in stored["task_rows"]} == ({"passkey"} if name == "llama" else set())
    assert stored["complete"]


def test_the_tables_are_kept_as_text_and_the_picture_is_there(folder: Path) -> None:
    text = (folder / "demo.txt").read_text()
    for words in ("demo:llama: perplexity", "demo:gpt2: perplexity", "demo:bloom: perplexity", "passkey, mean score"):
        assert words in text
    assert "position table ends at 256" in " ".join(text.split())
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def rows(*cells: tuple[str, int, float | None]) -> list[CompareRow]:
    return [
        CompareRow(name, {}, length, length - 1, value, value, error=None if value else "past the end")
        for name, length, value in cells
    ]


def test_a_sentence_follows_from_the_figures() -> None:
    made = rows(("none", 256, 2.0), ("none", 512, 20.0), ("yarn", 256, 2.5), ("yarn", 512, 3.0))
    best, worst = best_and_worst(made, 512)
    assert (best.encoding, worst.encoding) == ("yarn", "none")
    said = sentence(made)
    assert f"last {TAIL} tokens with none: 2 at 256 tokens, 20 at 512 tokens, 2 times the trained length" in said
    assert "3 at best (yarn) and 20 at worst (none). At 256 tokens yarn has 2.5." in said


def test_a_sentence_about_a_table_that_ends() -> None:
    made = rows(("none", 256, 2.0), ("none", 512, None), ("cubic", 256, 2.5), ("cubic", 512, 3.0))
    assert "table ends at 256" in sentence(made)


def passkeys(*cells: tuple[str, int, float | None]) -> list[TaskRow]:
    return [
        TaskRow(name, {}, length, "passkey", "generate", 4, acc, error=None if acc is not None else "no room")
        for name, length, acc in cells
    ]


def test_the_passkey_sentence_counts_them_best_first() -> None:
    made = passkeys(("none", 512, 0.0), ("yarn", 512, 0.75), ("yarn", 128, 1.0))
    assert "4 keys of five digits hidden in 512 tokens are found: yarn 3, none 0" in passkey_sentence(made)


def test_the_passkey_sentence_says_why_there_are_none() -> None:
    assert passkey_sentence(passkeys(("none", 512, None))) == "Passkeys could not be measured: no room"
