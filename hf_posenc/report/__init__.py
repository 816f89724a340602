"""The report of a comparison: JSON, CSV, plots and one page that explains itself; and the tables of the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .files import csv_bytes, json_bytes, json_safe, prepare_folder, task_csv_bytes, write_atomically
from .lists import encodings_table, option_lines, support_table
from .measures import EffectiveLength, effective_lengths, task_name, task_names
from .plots import NO_PLOT, can_plot, figure_bytes, plot_rows, plot_task
from .tables import comparison_tables, console, error_lines, length_table
from .words import summary

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import Comparison

__all__ = [
    "NO_PLOT",
    "EffectiveLength",
    "can_plot",
    "comparison_tables",
    "console",
    "csv_bytes",
    "effective_lengths",
    "encodings_table",
    "error_lines",
    "figure_bytes",
    "json_bytes",
    "json_safe",
    "length_table",
    "option_lines",
    "plot_rows",
    "plot_task",
    "prepare_folder",
    "summary",
    "support_table",
    "write_atomically",
    "write_report",
    "write_results",
]


def write_results(folder: Path, comparison: Comparison) -> list[Path]:
    """Write the figures alone: results.json, results.csv, and tasks.csv where tasks were run.

    Quick enough to be done after every cell; each file is whole at any time.
    """
    files = {"results.json": json_bytes(comparison.as_json()), "results.csv": csv_bytes(comparison.rows)}
    if comparison.task_rows:
        files["tasks.csv"] = task_csv_bytes(comparison.task_rows)
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


def write_report(folder: Path, comparison: Comparison) -> list[Path]:
    """Write the figures as `write_results`, then plots and report.html where matplotlib and jinja2 are there.

    Plots: perplexity.png, nll_by_position.png, and a map of depth × length for each task, passkey.png.
    """
    paths = write_results(folder, comparison)
    if can_plot():
        from .html import page_html

        for name, make in {**_plots(comparison), "report.html": lambda: page_html(comparison).encode()}.items():
            write_atomically(folder / name, make())
            paths.append(folder / name)
    for name in _possible() - {path.name for path in paths}:
        (folder / name).unlink(missing_ok=True)  # an earlier run's, which these figures do not bear out
    return paths


def _possible() -> set[str]:
    """The names of all files that a report may have beside results.json, results.csv and report.html."""
    from hf_posenc.eval_tasks.tasks import SUFFIX, TASKS

    maps = {f"{task}{suffix}.png" for task in TASKS for suffix in ("", SUFFIX)}
    return maps | {"tasks.csv", "perplexity.png", "nll_by_position.png"}


def _plots(comparison: Comparison) -> dict[str, Callable[[], bytes]]:
    """{file name: what makes it} of the plots that there are figures for."""
    from . import heatmaps, plots

    found: dict[str, Callable[[], bytes]] = {}
    if comparison.rows:
        panels = [partial(plot_rows, comparison=comparison, figure=figure) for figure in ("ppl", "ppl_tail")]
        found["perplexity.png"] = partial(figure_bytes, panels)
    if any(plots.nll_lines(comparison).values()):
        panel = partial(plots.plot_nll, comparison=comparison)
        found["nll_by_position.png"] = partial(figure_bytes, [panel], 1, (7.0, 4.6))
    rows = comparison.task_rows
    for task in task_names(rows):
        if any(task_name(row) == task and row.by_depth for row in rows):
            name = re.sub(r"[^\w.-]+", "_", task).strip("_")
            found[f"{name}.png"] = partial(heatmaps.maps_png, rows, task)
    return found
