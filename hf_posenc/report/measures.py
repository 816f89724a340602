"""Figures taken out of a comparison: by encoding and length, who leads, and how far an encoding carries its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import CompareRow, Comparison, TaskRow

CLOSE = 0.01
"""Figures whose ratio is nearer to 1 than this are not told apart."""

RULER_THRESHOLD = 0.856
"""The score of Llama-2-7B at 4096 tokens: below it a length does not count as used (Hsieh et al. 2024, 2404.06654)."""

RULER_TASKS = 13
LABEL = 44
"""Characters of an encoding's name in a figure."""

ByLength = dict[int, float]
T = TypeVar("T")


def all_rows(comparison: Comparison) -> list[CompareRow | TaskRow]:
    """Every cell, of perplexity and of tasks."""
    return [*comparison.rows, *comparison.task_rows]


def labels(comparison: Comparison) -> list[str]:
    """Every encoding of a comparison, in the order of its rows."""
    known = list(comparison.header.get("anatomy") or {})
    return list(dict.fromkeys([row.label for row in all_rows(comparison)] + known))


def short_names(full: Sequence[str]) -> dict[str, str]:
    """A name that fits into a figure for each label: LongRoPE's lists alone are hundreds of characters."""
    names: dict[str, str] = {}
    for label in full:
        name = label if len(label) <= LABEL else f"{label[: LABEL - 4]} …"
        twins = sum(other == name or other.startswith(f"{name} #") for other in names.values())
        names[label] = f"{name} #{twins + 1}" if twins else name
    return names


def perplexities(rows: Iterable[CompareRow], figure: Literal["ppl", "ppl_tail"]) -> dict[str, ByLength]:
    """{label: {length: perplexity}} of the cells that have a finite one."""
    found: dict[str, ByLength] = {}
    for row in rows:
        value = getattr(row, figure)
        if row.error is None and value is not None and math.isfinite(value):
            found.setdefault(row.label, {})[row.length] = value
    return found


def task_name(row: Any) -> str:
    """The task of a `TaskRow`, with its form where that is not the usual one."""
    return row.task if row.form == "generate" else f"{row.task} ({row.form})"


def task_names(rows: Iterable[TaskRow]) -> list[str]:
    """Every task once, in the order of the rows."""
    return list(dict.fromkeys(task_name(row) for row in rows))


def task_scores(rows: Iterable[TaskRow]) -> dict[str, dict[str, ByLength]]:
    """{task: {label: {length: mean score}}} of the cells that have a score."""
    found: dict[str, dict[str, ByLength]] = {}
    for row in rows:
        if row.error is None and row.acc is not None and math.isfinite(row.acc):
            found.setdefault(task_name(row), {}).setdefault(row.label, {})[row.length] = row.acc
    return found


def at_length(values: Mapping[str, Mapping[T, float]], length: T) -> dict[str, float]:
    """{label: value} of those that have one at `length`."""
    return {label: row[length] for label, row in values.items() if length in row}


def lowest(values: Mapping[str, float]) -> list[str]:
    """The labels that cannot be told from the lowest value, best first: those within 1 % of it."""
    return sorted((k for k, v in values.items() if v <= min(values.values()) * (1 + CLOSE)), key=values.__getitem__)


def highest(values: Mapping[str, float], margin: float = CLOSE) -> list[str]:
    """The labels that cannot be told from the highest score, best first: those no more than `margin` below it."""
    least = max(values.values(), default=0.0) - margin - 1e-9
    return sorted((label for label, value in values.items() if value >= least), key=lambda label: -values[label])


def mean_scores(rows: Sequence[TaskRow]) -> dict[str, ByLength]:
    """{label: {length: mean over the tasks}}, where every task that was scored at that length has a score.

    A mean over some of the tasks would not compare with one over all.
    """
    scores = task_scores(rows)
    wanted = {n: {task for task, by in scores.items() if any(n in row for row in by.values())} for n in _lengths(rows)}
    found: dict[str, ByLength] = {}
    for label in dict.fromkeys(row.label for row in rows):
        for length, tasks in wanted.items():
            values = [scores[task].get(label, {}).get(length) for task in sorted(tasks)]
            present = [value for value in values if value is not None]
            if tasks and len(present) == len(tasks):
                found.setdefault(label, {})[length] = sum(present) / len(present)
    return found


def _lengths(rows: Iterable[CompareRow | TaskRow]) -> list[int]:
    return sorted({row.length for row in rows})


@dataclass(frozen=True)
class EffectiveLength:
    """How far one encoding carries the tasks of a report."""

    label: str
    length: int | None
    """The largest length in tokens up to which the mean score holds; None: not even at the shortest."""
    scores: ByLength
    """The mean over the tasks at each length where all of them were scored."""


def effective_lengths(rows: Sequence[TaskRow], threshold: float = RULER_THRESHOLD) -> list[EffectiveLength]:
    """RULER's rule for each encoding: the largest length with mean score >= threshold there and at every shorter one.

    The mean is over the tasks of `rows`. A length at which the encoding lacks the score of a task (the cell failed, or
    the run was stopped) ends the walk: what was not measured is not claimed. Hsieh et al. 2024, arXiv 2404.06654.
    """
    means = mean_scores(rows)
    lengths = sorted({length for by_length in means.values() for length in by_length})
    result = []
    for label in dict.fromkeys(row.label for row in rows) if lengths else ():
        reached, scores = None, means.get(label, {})
        for length in lengths:
            if scores.get(length, -1.0) < threshold:
                break
            reached = length
        result.append(EffectiveLength(label, reached, scores))
    return result
