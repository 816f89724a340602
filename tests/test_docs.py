"""The pages of docs/ are true: Python and commands run, errors are raised, figures are measured, links lead somewhere.

In a page, a ```python block is a doctest; each line of a ```sh block is a command, run here on the embedded models with
benchmarks/prose.txt as `book.txt`; an ```output block holds lines that the command before it prints, `...` for any text
between, or the one line of an error. What needs a network, a GPU or a model of one's own stands in a ```text block.
"""

from __future__ import annotations

import doctest
import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_posenc import PosencError, demo, from_pretrained, patch_model, patches, registry
from hf_posenc.cli import app
from hf_posenc.evaluate import cells
from hf_posenc.evaluate.limits import past_aim
from hf_posenc.evaluate.specs import EncodingSpec

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FIGURES = ("how-far", "short-length")
"""Pages with measured figures, all of which stand in one of `SOURCES`, where they come from."""
SOURCES = ("README.md", "benchmarks/README.md")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LONGEST = 150

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Block(NamedTuple):
    """A fenced block: its language, its text, the line it begins at."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M)
    return [Block(match[1], match[2], text[: match.start()].count("\n") + 1) for match in found]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a block, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str]) -> tuple[int, str]:
    """Exit status of a command, and what it prints, blanks made one and a table's frame left out."""
    assert words[0] == "hf-posenc", words
    result = CliRunner().invoke(app, words[1:])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, flat(result.output)


def flat(text: str) -> str:
    return " ".join(re.sub(r"[│┃]", " ", text).split())


def expected(line: str) -> str:
    """A pattern for a line of output."""
    return ".*".join(re.escape(flat(part)) for part in line.split("..."))


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    shutil.copy(ROOT / "benchmarks" / "prose.txt", "book.txt")
    registered, level = dict(patches._registered), logging.getLogger("transformers").level
    rows = dict(registry.ENCODINGS)
    yield
    registry.ENCODINGS.clear()
    registry.ENCODINGS.update(rows)
    patches._registered.clear()
    patches._registered.update(registered)
    logging.getLogger("transformers").setLevel(level)


@pytest.mark.filterwarnings("ignore")
@every_page
def test_what_stands_there_happens(page: Path) -> None:
    """One folder a page, blocks in their order; Python names live to the end of the page."""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    names: dict[str, Any] = {}
    printed = ""
    made = blocks(page)
    for block, after in zip(made, [*made[1:], Block("", "", 0)]):
        where = f"{page.name}, line {block.line}"
        if block.language == "python":
            test = parser.get_doctest(block.text, names, page.name, str(page), block.line)
            assert test.examples, f"{where}: no >>> in it"
            assert runner.run(test, clear_globs=False).failed == 0, where
            names.update(test.globs)
        elif block.language == "sh":
            *before, last = commands(block)
            for words in before:
                assert run(words)[0] == 0, f"{where}: {words}"
            status, printed = run(last)
            refused = after.language == "output" and after.text.startswith("hf-posenc: ")
            assert status == (2 if refused else 0), f"{where}: {printed}"
            assert after.language != "output" or printed, where
        elif block.language == "output":
            text = flat(block.text) if block.text.startswith("hf-posenc: ") else ""
            for line in [text] if text else block.text.splitlines():
                assert re.search(expected(line), printed), f"{where}: {line!r} is not in {printed}"
        else:
            assert block.language in ("text", "toml"), where


@every_page
def test_commands_that_cannot_run_here_have_options_that_exist(page: Path) -> None:
    """Of those in ```text blocks, which need a GPU, a network or a model of one's own."""
    known: Any = typer.main.get_command(app)
    for block in (b for b in blocks(page) if b.language == "text"):
        for line in block.text.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\s)(?:hf-posenc|-m hf_posenc) ([a-z]+) (.*)", line)
            if found is not None:
                options = {name for option in known.commands[found[1]].params for name in option.opts}
                assert set(re.findall(r"(?<!\S)--[a-z-]+", found[2])) <= options, line


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_the_readme_links_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert PAGES and all(f"(docs/{page.name})" in text for page in PAGES)


@every_page
def test_pages_are_short(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= LONGEST
    assert all(len(line) <= 120 or line.startswith("|") for line in lines)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_the_benchmarks(name: str) -> None:
    sources = " ".join((ROOT / source).read_text() for source in SOURCES)
    tables = [line for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    figures = {figure for line in tables for figure in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", line)}
    assert len(figures) > 5
    missing = {figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", sources)}
    assert not missing


def test_messages_quoted_in_a_sentence_are_real() -> None:
    """Of errors that a block cannot show in few lines; each phrase stands in the page within quotation marks."""
    page = flat((ROOT / "docs" / "troubleshooting.md").read_text())
    bloom, gpt2, llama = (from_pretrained(demo.model_path(name)) for name in ("bloom", "gpt2", "llama"))
    with pytest.raises(PosencError) as no_length:
        patch_model(bloom, "yarn", factor=4)
    with pytest.raises(IndexError) as stock:
        gpt2(torch.full((1, 260), 97))
    llama.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(PosencError) as flash:
        patch_model(llama, "alibi")
    assert patch_model(llama, "yarn", factor=4) is llama, "flash takes a static rotation"
    (aim,) = past_aim(llama, [2048])
    quoted = {
        "needs the length the model was pretrained on": no_length,
        "index out of range in self": stock,
        "there is none of ours over 'flash_attention_2'": flash,
    }
    for phrase, raised in quoted.items():
        assert f'"{phrase}"' in page and phrase in str(raised.value)
    shown = re.search(r'"(aims at … tokens: the scores at … are past that)"', page)
    assert shown is not None and re.search(shown[1].replace("…", ".*"), aim)


def test_out_of_memory_reads_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cells, "token_nll", full)
    model = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")  # type: ignore[assignment]
    monkeypatch.setattr(cells, "check_reach", lambda *_: None)
    row = cells.measure_perplexity(model, EncodingSpec("none"), [torch.arange(32768)], 32768, 1024)
    assert row.error and f"\n{row.error}\n" in (ROOT / "docs" / "troubleshooting.md").read_text()


def test_plain_transformers_refuses_a_folder_as_the_page_says(tmp_path: Path) -> None:
    """In a process that has not imported this package."""
    patch_model(from_pretrained(demo.model_path("llama")), "alibi").save_pretrained(tmp_path / "saved")
    code = (
        "import transformers as t\n"
        "for c in (t.AutoModelForCausalLM, t.LlamaForCausalLM):\n"
        "    try: c.from_pretrained('saved')\n"
        "    except Exception as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    shown = next(b.text for b in blocks(ROOT / "docs" / "troubleshooting.md") if "posenc_llama" in b.text)
    assert page and all(re.search(expected(line), flat(done.stdout)) for line in shown.splitlines())
