"""`hf-posenc demo`: what each encoding does past the trained length, on three embedded models, in about a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc import report
from hf_posenc.demo import ModelName
from hf_posenc.eval_tasks.text import document
from hf_posenc.evaluate.cells import try_patches
from hf_posenc.evaluate.conditions import conditions
from hf_posenc.evaluate.grid import Bench, Cell, grid
from hf_posenc.evaluate.loading import load_model, load_tokenizer
from hf_posenc.evaluate.progress import cell_progress
from hf_posenc.evaluate.results import PERPLEXITY, CompareRow, Comparison, TaskRow
from hf_posenc.evaluate.specs import parse_specs, resolve_specs
from hf_posenc.evaluate.task_cells import TaskSettings

PASSKEY = "passkey"
TRAINED = 256
LENGTHS = (256, 512, 1024)
PASSKEY_LENGTHS = (128, 256, 512, 1024)
TAIL = 64
DOCUMENTS = 8
SAMPLES = 20

LINES: dict[ModelName, str] = {
    "llama": "none,linear:factor=4,ntk:factor=4,yarn:factor=4,yarn:factor=4,beta_fast=8,dynamic_yarn:beta_fast=8",
    "gpt2": "none,"
    + ",".join(
        f"learned:resize={rule},factor={factor}"
        for rule in ("interpolate", "cubic", "group", "repeat", "hierarchical")
        for factor in (2, 4)
    ),
    "bloom": "alibi,alibi:factor=2,alibi:factor=4",
}


INTRODUCTION = (
    f"Three models of 1 to 2 million parameters, trained on {TRAINED} bytes, read up to {LENGTHS[-1]}, untuned.\n"
    "none is the model as it is. linear, and alibi with a factor, are made to be fine-tuned; here they are not.\n"
    "beta_fast: YaRN keeps pairs that turn 32 times in the trained length. In 256 bytes hardly any does: 8 suits it."
)


@dataclass(frozen=True)
class Size:
    """How much the demo measures; the tests shrink it."""

    lengths: tuple[int, ...] = LENGTHS
    passkey_lengths: tuple[int, ...] = PASSKEY_LENGTHS
    documents: int = DOCUMENTS
    samples: int = SAMPLES


@contextmanager
def calm() -> Iterator[None]:
    """One thread, and nothing said by the host library, for the block.

    At this size a second thread gains little, and on a machine with other work it costs fivefold. The host's bar for
    weights that load in no time would break ours, and its warning of lengths past the trained one is the subject here.
    """
    from transformers.utils import logging as untyped

    logging: Any = untyped
    threads, shown, level = torch.get_num_threads(), logging.is_progress_bar_enabled(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def held_out(tokenizer: Any, count: int, length: int) -> list[Tensor]:
    """`count` documents of exactly `length` tokens that no model was trained on; one byte is one token."""
    texts = [document(seed, length, split="held-out") for seed in range(count)]
    return [torch.tensor(tokenizer(text, verbose=False)["input_ids"])[:length] for text in texts]


def plan_model(name: ModelName, size: Size) -> tuple[Bench, list[Cell]]:
    """One embedded model and its cells: perplexity by length; for the Llama, passkey recall too."""
    model, tokenizer = load_model(f"demo:{name}", dtype="float32", device="cpu"), load_tokenizer(f"demo:{name}")
    texts = held_out(tokenizer, size.documents, size.lengths[-1])
    bench = Bench(model, tokenizer, f"demo:{name}", TAIL, None, TaskSettings(num_samples=size.samples), texts)
    specs = resolve_specs(parse_specs(LINES[name]), None)
    cells = grid(specs, [PERPLEXITY], size.lengths)
    return bench, cells + (grid(specs, [PASSKEY], size.passkey_lengths) if name == "llama" else [])


def measure_model(bench: Bench, cells: Sequence[Cell], advance: Callable[[str, int], None]) -> Comparison:
    """All cells of one model."""
    specs = {cell.spec.label: cell.spec for cell in cells}
    longest = max(cell.length for cell in cells)
    source = {"name": f"held-out documents 0 to {len(bench.texts) - 1} of hf_posenc.eval_tasks.text"}
    header = conditions(
        bench.model,
        bench.tokenizer,
        name=bench.name,
        tail=TAIL,
        text=source,
        documents=len(bench.texts),
        tasks=bench.settings.described(),
    )
    header |= {"trained_length": TRAINED, "command": "hf-posenc demo"}
    header |= try_patches(bench.model, list(specs.values()), longest)
    made = Comparison(header, complete=True)
    for cell, row in bench.run(cells):
        made.add(row)
        advance(f"{cell.measure} {cell.spec.label}", cell.length)
    return made


def best_and_worst(rows: Sequence[CompareRow], length: int) -> tuple[CompareRow, CompareRow]:
    """The rows with the lowest and the highest tail perplexity at `length`, of those that could be measured."""
    measured = [row for row in rows if row.length == length and row.ppl_tail is not None]
    return min(measured, key=lambda row: row.ppl_tail or 0.0), max(measured, key=lambda row: row.ppl_tail or 0.0)


def sentence(rows: Sequence[CompareRow]) -> str:
    """What the table of one model shows, in words made from its own figures; the first encoding is the yardstick."""
    shortest, longest = min(row.length for row in rows), max(row.length for row in rows)
    best, worst = best_and_worst(rows, longest)
    extremes = f"{best.ppl_tail:.3g} at best ({best.label}) and {worst.ppl_tail:.3g} at worst ({worst.label})"
    far = f"at {longest} tokens, {longest / TRAINED:g} times the trained length"
    own = {row.length: row for row in rows if row.label == rows[0].label}
    near = f"{own[shortest].ppl_tail:.3g} at {shortest} tokens"
    start = f"Perplexity of the last {TAIL} tokens with {rows[0].label}: {near}"
    cost = next(row.ppl_tail for row in rows if row.length == shortest and row.label == best.label)
    if own[longest].error:
        end = f"its table ends at {TRAINED} and reads no further. Resized it does: {far}, {extremes}"
        return f"{start}; {end}. At {shortest} tokens {best.label} has {cost:.3g}."
    there = f"there it is {extremes}. At {shortest} tokens {best.label} has {cost:.3g}."
    return f"{start}, {own[longest].ppl_tail:.3g} {far}; {there}"


def passkey_sentence(rows: Sequence[TaskRow]) -> str:
    """What the passkey table shows; why there is none, where it could not be measured."""
    if failed := [row for row in rows if row.error is not None]:
        return f"Passkeys could not be measured: {failed[0].error}"
    longest = max(row.length for row in rows)
    found = [(row.label, round((row.acc or 0) * row.samples)) for row in rows if row.length == longest]
    told = ", ".join(f"{label} {count}" for label, count in sorted(found, key=lambda pair: -pair[1]))
    return f"Of {rows[0].samples} keys of five digits hidden in {longest} tokens are found: {told}."


def drawn(made: Comparison) -> Comparison:
    """The rows for a small panel: of a table resized by two factors, the larger."""
    return replace(made, rows=[row for row in made.rows if row.encoding != "learned" or row.options.get("factor") == 4])


def _write(folder: Path, results: dict[ModelName, Comparison], text: str) -> None:
    for name, comparison in results.items():
        report.write_report(report.prepare_folder(folder / name), comparison)
    report.write_atomically(folder / "demo.txt", text.encode())
    if report.can_plot():
        panels = [partial(report.plot_rows, comparison=drawn(made), figure="ppl_tail") for made in results.values()]
        panels.insert(1, partial(report.plot_task, comparison=results["llama"], task=PASSKEY))
        report.write_atomically(folder / "demo.png", report.figure_bytes(panels, columns=2))


def run_demo(out: str | Path, *, size: Size = Size(), progress: bool = True) -> dict[ModelName, Comparison]:
    """Measure the three embedded models, print the tables with a sentence to each, and write them to the folder `out`.

    Files: demo.txt, demo.png, and for each model a folder with its report.
    """
    folder = report.prepare_folder(out)
    with calm():
        plans = {name: plan_model(name, size) for name in LINES}
        cells = [cell for _, mine in plans.values() for cell in mine]
        with cell_progress(len(cells), sum(cell.length for cell in cells), progress) as advance:
            results = {name: measure_model(bench, mine, advance) for name, (bench, mine) in plans.items()}
    console = report.console(record=True)
    console.print(INTRODUCTION, "", sep="\n")
    for comparison in results.values():
        console.print(*report.comparison_tables(comparison), sep="\n")
        errors = report.error_lines(comparison.rows)
        console.print(*errors[:1], sentence(comparison.rows), "", sep="\n")
        if comparison.task_rows:
            console.print(passkey_sentence(comparison.task_rows), "", sep="\n")
    _write(folder, results, console.export_text())
    console.print(f"written to {folder}")
    return results
