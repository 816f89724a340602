"""A comparison as a run would have made it, with figures of our own choice: what the tests of the report look at."""

from __future__ import annotations

from typing import Any

from tiny import LENGTH, tiny_model

import hf_posenc
from hf_posenc.evaluate.anatomy import describe
from hf_posenc.evaluate.results import CompareRow, Comparison, TaskRow
from hf_posenc.evaluate.specs import EncodingSpec

LENGTHS = (16, LENGTH, 2 * LENGTH, 4 * LENGTH)
SPECS = (
    EncodingSpec("none"),
    EncodingSpec("yarn", {"factor": 4}),
    EncodingSpec("dynamic_yarn"),
    EncodingSpec("alibi"),
    EncodingSpec("nope"),
)


def ppl_row(name: str, length: int, ppl: float | None, error: str | None = None, **options: Any) -> CompareRow:
    """A cell of perplexity, whole and tail alike."""
    return CompareRow(name, options, length, length - 1, ppl, ppl, 0.1, None, error)


def task_row(name: str, length: int, acc: float | None, task: str = "passkey", **more: Any) -> TaskRow:
    """A cell of a task."""
    given = {"options": {}, "form": "generate", "samples": 20, **more}
    return TaskRow(encoding=name, length=length, task=task, acc=acc, **given)


def header(model: str = "tiny") -> dict[str, Any]:
    """The conditions of a run, without the anatomy."""
    return {
        "model": model,
        "model_type": "llama",
        "trained_length": LENGTH,
        "protocol": "Cell (encoding, L): one forward.",
        "tail": 8,
        "text": {"name": "book.txt", "sha256": "0" * 64, "tokens": 500},
        "tasks": {"form": "generate", "num_samples": 20},
        "dtype": "float32",
        "versions": {"hf_posenc": "0"},
        "date": "2024-05-06T07:08:09+00:00",
    }


def anatomies() -> dict[str, Any]:
    """What the encodings of `SPECS` do on a tiny Llama."""
    model, found = tiny_model("llama"), {}
    for spec in SPECS:
        if spec.name == "none":
            found[spec.label] = describe(model, LENGTHS[-1])
            continue
        with hf_posenc.patched(model, spec.name, **spec.options):
            found[spec.label] = describe(model, LENGTHS[-1])
    return found


def comparison(model: str = "tiny", *, complete: bool = True) -> Comparison:
    """Every kind of cell: two figures, bins, tasks with and without depths, both forms, cells that failed."""
    rows, task_rows = [], []
    for k, spec in enumerate(SPECS):
        for i, length in enumerate(LENGTHS):
            name, options = spec.name, spec.options
            if spec.name == "nope" and i == 3:
                rows.append(CompareRow(name, options, length, 0, error="out of memory at 128 tokens"))
                task_rows.append(task_row(name, length, None, options=options, samples=0, error="out of memory"))
                continue
            ppl = 2.0 + k + i * (3.0 if name == "none" else 0.25)
            bins = [(length * b // 8, ppl / 3 + b / 16) for b in range(1, 9)]
            rows.append(CompareRow(name, options, length, length - 1, ppl, ppl + 0.5, 0.1, None, None, bins))
            score = max(0.0, 1 - 0.2 * k - 0.25 * i)
            depths = {depth / 4: min(1.0, score + depth / 20) for depth in range(5)}
            task_rows.append(task_row(name, length, score, options=options, by_depth=depths))
            task_rows.append(task_row(name, length, score / 2, "vt", options=options))
            task_rows.append(
                task_row(name, length, score, "copy_distance", options=options, form="loglikelihood", nll=0.5, gain=1.5)
            )
    labels = {spec.label: {"factor": 4.0} if spec.options else {} for spec in SPECS}
    conditions = header(model) | {"encodings": labels, "anatomy": anatomies()}
    conditions["not_run"] = {"qa_1": "qa_1 needs a file of yours"}
    return Comparison(conditions, rows, task_rows, complete)
