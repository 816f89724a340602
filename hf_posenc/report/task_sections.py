"""The sections made of task scores: by length and depth, and the effective length."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hf_posenc.report import heatmaps, plots
from hf_posenc.report.measures import (
    RULER_TASKS,
    RULER_THRESHOLD,
    at_length,
    effective_lengths,
    highest,
    short_names,
    task_name,
    task_names,
    task_scores,
)
from hf_posenc.report.page import Cell, Picture, Pictures, Section, Table, length_grid, named
from hf_posenc.report.sections import picture
from hf_posenc.report.words import share, spoken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_posenc.evaluate.results import Comparison, TaskRow


def tasks(comparison: Comparison) -> Section:
    """Score of each task by length, and its depth × length maps."""
    name, title, rows = "tasks", "Tasks by length and depth", comparison.task_rows
    if not rows:
        return Section(name, title, missing="no task was run; perplexity alone does not show recall.")
    known = task_names(rows)
    curves = [_curve(comparison, task, f"score-{i}") for i, task in enumerate(known)]
    drawn, maps = [curve for curve in curves if curve is not None], _maps(rows)
    mine = {task: [row for row in rows if task_name(row) == task] for task in known}
    tables = [table for task in known for table in (*_task_tables(mine[task], task), *_depth_table(mine[task], task))]
    words = ["Mean score of the documents, 0 to 1. Bold: within 0.01 of the best of its column."]
    if maps:
        words.append(
            "In the maps, depth is where in the context the answer stands: 0 % is the beginning, the furthest from the "
            "question. Dark is 0, bright is 1, grey was not scored; all maps share the scale."
        )
    if without := [task for task in known if not heatmaps.with_depths(rows, task)]:
        words.append(f"No map of {spoken(without)}: no cell of it has scores by depth.")
    return Section(name, title, words, [*([Pictures(drawn)] if drawn else []), *maps], tables)


def _maps(rows: Sequence[TaskRow]) -> list[Pictures]:
    """The scale of all maps, then one group of maps a task."""
    groups = []
    for i, task in enumerate(task_names(rows)):
        maps, size = heatmaps.draw_maps(rows, task), heatmaps.map_size(heatmaps.with_depths(rows, task))
        alt = f"{task}: mean score by depth and length under "
        drawn = [picture(draw, f"map-{i}-{k}", alt + label, (), size) for k, (label, draw) in enumerate(maps.items())]
        if drawn:
            groups.append(Pictures([Picture(made.svg, task) for made in drawn], small=True))
    if not groups:
        return []
    alt = "Colours of the maps from 0, dark, to 1, bright"
    return [Pictures([picture(heatmaps.plot_scale, "map-scale", alt, (), (2.7, 0.7))], small=True), *groups]


def _curve(comparison: Comparison, task: str, name: str) -> Picture | None:
    """Mean score over length; None where no cell of the task has one."""
    found = list(task_scores(comparison.task_rows).get(task, {}))
    draw = partial(plots.plot_task, comparison=comparison, task=task, title=f"{task}, mean score")
    return picture(draw, name, f"{task}: mean score over length, one line an encoding", found) if found else None


def _task_tables(rows: Sequence[TaskRow], task: str) -> list[Table]:
    """Score by length and, in the likelihood form, nats a token of the right answer and what a copy saves."""
    lengths = sorted({row.length for row in rows})
    samples = max(row.samples for row in rows)
    kinds = {
        "acc": f"{task}: mean score of {samples} documents",
        "nll": f"{task}: nll of the right answer (nats a token)",
        "gain": f"{task}: nats a token that an earlier copy saves",
    }
    scores = task_scores(rows).get(task, {})
    best = {n: highest(at_length(scores, n)) for n in lengths}
    tables = []
    for kind, caption in kinds.items():
        if kind != "acc" and all(getattr(row, kind) is None for row in rows):
            continue
        cells: dict[str, dict[int, Cell]] = {}
        for row in rows:
            value, failed = getattr(row, kind), Cell("failed", failed=True, note=row.error or "")
            text = "–" if value is None else share(value) if kind == "acc" else f"{value:.3f}"
            cell = failed if row.error is not None else Cell(text, kind == "acc" and row.label in best[row.length])
            cells.setdefault(row.label, {})[row.length] = cell
        tables.append(length_grid(caption, cells, lengths))
    return tables


def _depth_table(rows: Sequence[TaskRow], task: str) -> list[Table]:
    """The numbers of the maps."""
    found = [row for row in rows if row.by_depth]
    if not found:
        return []
    lengths, depths = heatmaps.axes_of(found)
    scores = {(row.label, row.length): row.by_depth for row in found}
    names = short_names(list(dict.fromkeys(row.label for row in found)))
    cells = {
        f"{names[label]}, depth {depth:.0%}": {
            n: Cell(share(scores[label, n][depth])) for n in lengths if depth in scores.get((label, n), {})
        }
        for label in names
        for depth in depths
    }
    return [length_grid(f"{task}: mean score by depth", cells, lengths, first="encoding, depth", folded=True)]


def effective(comparison: Comparison) -> Section:
    """RULER's effective length of each encoding."""
    name, title = "effective-length", "Effective length"
    found, scored = effective_lengths(comparison.task_rows), list(task_scores(comparison.task_rows))
    if not found:
        return Section(name, title, missing="it is made of task scores, and there are none.")
    shortest = min(n for made in found for n in made.scores) if any(made.scores for made in found) else 0
    lengths = sorted({n for made in found for n in made.scores})
    names, rows = short_names([made.label for made in found]), []
    for made in found:
        text = f"below {shortest}" if made.length is None else f"{made.length}"
        text = f"≥ {text}" if lengths and made.length == lengths[-1] else text
        means = [share(made.scores[n]) if n in made.scores else "–" for n in lengths]
        rows.append([named(made.label, names), Cell(text), *map(Cell, means)])
    of = (
        f"all {RULER_TASKS} tasks of RULER"
        if _is_ruler(scored)
        else f"the {len(scored)} of this report, not RULER's 13"
    )
    one = "the one task of this report" if len(scored) == 1 else f"the tasks ({of})"
    words = [
        f"The largest length up to which the mean score over {one} is at least {RULER_THRESHOLD} at every measured "
        "length: the rule of RULER (Hsieh et al. 2024, arXiv 2404.06654), whose threshold is the score of Llama-2-7B "
        f"at 4096 tokens. Scored here: {spoken(scored)}. “Below {shortest}”: not even at the shortest length; “≥”: the "
        "longest measured length still holds. A length whose tasks could not all be scored ends the count."
    ]
    return Section(
        name,
        title,
        words,
        tables=[Table("Effective length and mean scores", ["encoding", "tokens", *map(str, lengths)], rows)],
    )


def _is_ruler(scored: Sequence[str]) -> bool:
    from hf_posenc.eval_tasks.tasks import RULER

    return set(scored) == set(RULER)
