"""The grid of a comparison, encodings × lengths × measures, filled cell by cell so that it can be stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_posenc.eval_tasks.sizing import Document
from hf_posenc.evaluate import resume
from hf_posenc.evaluate.cells import apply, measure_perplexity, warm_up
from hf_posenc.evaluate.cost import estimate, line
from hf_posenc.evaluate.progress import cell_progress
from hf_posenc.evaluate.results import PERPLEXITY, CompareRow, Comparison, TaskRow
from hf_posenc.evaluate.specs import EncodingSpec
from hf_posenc.evaluate.task_cells import TaskSettings, measure_task
from hf_posenc.evaluate.windows import windows


@dataclass(frozen=True)
class Cell:
    """What is to be measured: `measure` is `perplexity` or a task's name."""

    spec: EncodingSpec
    measure: str
    length: int

    @property
    def key(self) -> resume.Key:
        return self.spec.label, self.measure, self.length


@dataclass(frozen=True)
class Bench:
    """A model with everything that its cells are measured with."""

    model: Any
    tokenizer: Any
    name: str
    tail: int | None
    stride: int | None
    settings: TaskSettings
    texts: list[Tensor] = field(default_factory=list)
    """Tokens of the texts for perplexity, (n,) each."""
    documents: dict[tuple[str, int], list[Document]] = field(default_factory=dict)
    """Of a task at a length."""

    def measure(self, cell: Cell) -> CompareRow | TaskRow:
        """One cell, on the model as it is."""
        if cell.measure == PERPLEXITY:
            assert self.tail is not None
            return measure_perplexity(self.model, cell.spec, self.texts, cell.length, self.tail, self.stride)
        return measure_task(self.model, self.tokenizer, cell.spec, cell.measure, cell.length, self.settings)

    def forwards(self, cell: Cell) -> tuple[list[int], int]:
        """Lengths of the forwards that a cell takes, and how many tokens it generates at most."""
        if cell.measure == PERPLEXITY:
            if self.stride is None:
                return [cell.length] * len(self.texts), 0
            return [w.end - w.begin for ids in self.texts for w in windows(len(ids), cell.length, self.stride)], 0
        documents = self.documents.get((cell.measure, cell.length), [])
        if self.settings.form == "loglikelihood":
            return [document.tokens + document.target_tokens for document in documents], 0
        asked = [document for document in documents if not document.control]
        return [document.tokens for document in asked], sum(document.max_new_tokens for document in asked)

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, CompareRow | TaskRow]]:
        """All `cells`, each when it is measured, encodings outermost: one patch each."""
        if self.texts and cells:
            warm_up(self.model, self.texts[0])
        for spec in dict.fromkeys(cell.spec.label for cell in cells):
            mine = [cell for cell in cells if cell.spec.label == spec]
            with apply(self.model, mine[0].spec):
                for cell in mine:
                    yield cell, self.measure(cell)


def grid(specs: Iterable[EncodingSpec], measures: Sequence[str], lengths: Iterable[int]) -> list[Cell]:
    """Every cell of a comparison, encodings outermost, then lengths."""
    return [Cell(spec, measure, length) for spec in specs for length in lengths for measure in measures]


def say_cost(bench: Bench, missing: Sequence[Cell], asked: int) -> str:
    """One line before a run: its cells, forwards and tokens, and about how long they take on the model as it is."""
    found = [bench.forwards(cell) for cell in missing]
    made = estimate(bench.model, [n for lengths, _ in found for n in lengths], decode_steps=sum(s for _, s in found))
    there = f" ({asked - len(missing)} of {asked} are there)" if len(missing) < asked else ""
    return f"{len(missing)} cells{there}: {line(made)}"


def fill(
    bench: Bench, cells: Sequence[Cell], comparison: Comparison, folder: Path | None, *, progress: bool
) -> Comparison:
    """Measure the cells that `comparison` lacks; every one is on the disk before the next begins.

    A run that is stopped leaves its cells, and a report that says that it is not complete.
    """
    from hf_posenc import report

    there = set(resume.finished(comparison))
    missing = [cell for cell in cells if cell.key not in there]
    if progress and missing:
        report.console(stderr=True).print(say_cost(bench, missing, len(cells)))
    complete = False
    try:
        with cell_progress(len(missing), sum(cell.length for cell in missing), progress) as advance:
            for cell, row in bench.run(missing):
                comparison.add(row)
                if folder is not None:
                    report.write_results(folder, comparison)
                advance(f"{cell.measure} {cell.spec.label}", cell.length)
        complete = True
    finally:
        comparison = in_order(replace(comparison, complete=complete), cells)
        if folder is not None and (comparison.rows or comparison.task_rows):
            report.write_report(folder, comparison)
    return comparison


def in_order(comparison: Comparison, cells: Sequence[Cell]) -> Comparison:
    """The rows in the order of `cells`; those of an earlier run that are not among them come last."""
    place = {cell.key: at for at, cell in enumerate(cells)}

    def by_cell(row: CompareRow | TaskRow) -> int:
        return place.get(resume.key_of(row), len(place))

    return replace(
        comparison, rows=sorted(comparison.rows, key=by_cell), task_rows=sorted(comparison.task_rows, key=by_cell)
    )
