"""Depth × length: where in a context of which length a task's answer is still found."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hf_posenc.report.measures import short_names, task_name
from hf_posenc.report.plots import Draw, Size, figure_bytes, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_posenc.evaluate.results import TaskRow

COLOURMAP = "viridis"


def with_depths(rows: Sequence[TaskRow], task: str) -> list[TaskRow]:
    """The cells of a task that have scores by depth."""
    return [row for row in rows if task_name(row) == task and row.by_depth]


def axes_of(rows: Sequence[TaskRow]) -> tuple[list[int], list[float]]:
    """The lengths and depths of all maps of one task: the same for every encoding, so that the eye can compare."""
    return sorted({row.length for row in rows}), sorted({depth for row in rows for depth in row.by_depth})


def map_size(rows: Sequence[TaskRow]) -> Size:
    """Inches of one map."""
    lengths, depths = axes_of(rows)
    return max(2.7, 0.9 + 0.48 * len(lengths)), 0.95 + 0.25 * len(depths)


def plot_depths(axes: Any, rows: Sequence[TaskRow], label: str, title: str) -> None:
    """The mean score (0 to 1, colour and number) of one encoding by depth and length; grey where there is none."""
    from matplotlib import colormaps

    lengths, depths = axes_of(rows)
    scores = {(row.length, depth): s for row in rows if row.label == label for depth, s in row.by_depth.items()}
    grid = [[scores.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    palette = colormaps[COLOURMAP]
    axes.set_facecolor("#d0d0d0")
    axes.pcolormesh(grid, cmap=palette, vmin=0, vmax=1, edgecolor="white", linewidth=0.5, clip_on=False)
    for y, row in enumerate(grid):
        for x, score in enumerate(row):
            if score == score:
                red, green, blue, _ = palette(float(score))  # of a whole number it would take an index
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                text = f"{score:.2f}".removeprefix("0") if 0 < score < 1 else f"{score:.0f}"
                axes.text(
                    x + 0.5, y + 0.5, text, ha="center", va="center", color="white" if dark else "black", fontsize=8
                )
    axes.invert_yaxis()
    axes.set_xticks([x + 0.5 for x in range(len(lengths))], [str(length) for length in lengths])
    if len(lengths) > 5:
        axes.tick_params(axis="x", rotation=45)
    axes.set_yticks([y + 0.5 for y in range(len(depths))], [f"{depth:.0%}" for depth in depths])
    axes.tick_params(length=0)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth")
    axes.set_title(plain(title), fontsize=9)


def draw_maps(rows: Sequence[TaskRow], task: str) -> dict[str, Draw]:
    """{label: its map} of one task; encodings whose cells failed have none."""
    found = with_depths(rows, task)
    names = short_names(list(dict.fromkeys(row.label for row in found)))
    return {label: partial(plot_depths, rows=found, label=label, title=name) for label, name in names.items()}


def maps_png(rows: Sequence[TaskRow], task: str) -> bytes:
    """All maps of one task, which has depths, side by side as a PNG."""
    maps = draw_maps(rows, task)
    return figure_bytes(list(maps.values()), min(4, len(maps)), map_size(with_depths(rows, task)))


def plot_scale(axes: Any) -> None:
    """The colours of the maps, 0 to 1."""
    steps = 20
    axes.pcolormesh([[(i + 0.5) / steps for i in range(steps)]], cmap=COLOURMAP, vmin=0, vmax=1)
    axes.set_yticks([])
    axes.set_xticks([0, steps / 2, steps], ["0", "0.5", "1"])
    axes.set_xlabel("mean score")
