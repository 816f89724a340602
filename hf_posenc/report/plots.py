"""Figures by matplotlib's object interface: one function draws a panel, for a PNG and for the page alike."""

from __future__ import annotations

import html
import importlib.util
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from hf_posenc.report.measures import labels, perplexities, short_names, task_name, task_scores

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import Comparison

NO_PLOT = (
    "matplotlib or jinja2 is not installed: no plots and no report.html will be made, JSON and CSV only "
    "(pip install 'hf-posenc[report]')"
)
Draw = Callable[[Any], None]
Size = tuple[float, float]

# Okabe and Ito's colours, which the colour blind tell apart, without yellow (unreadable on white) and black (the
# trained length). A second round differs by line and marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5B3A")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
PANEL: Size = (4.2, 3.3)
"""Inches: at the width of a phone, 10 points of type are then about 10 pixels."""


def can_plot() -> bool:
    """Whether matplotlib and jinja2 are there; asked before a run, so that nobody learns of it after hours."""
    return all(importlib.util.find_spec(name) is not None for name in ("matplotlib", "jinja2"))


def styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """{label: colour, line and marker}, the same in every figure of one comparison."""
    found: dict[str, dict[str, Any]] = {}
    known = labels(comparison)
    for i, label in enumerate(known):
        turn = i // len(COLOURS) % len(LINES)
        found[label] = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[turn], "marker": MARKERS[turn]}
        found[label]["linewidth"] = 2.8 - 1.6 * i / len(known)  # of two lines that coincide, both are seen
    return found


@contextmanager
def _look() -> Iterator[None]:
    from matplotlib import rc_context

    small: dict[Any, Any] = {"axes.titlesize": 10, "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9}
    fonts: dict[Any, Any] = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "svg.fonttype": "none"}
    with rc_context({"font.size": 9.5, "legend.fontsize": 8.5, **fonts, **small}):
        yield


def _figure(panels: Sequence[Draw], columns: int, size: Size) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: pyplot would change the backend of a caller's own session.
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, draw in zip(places, panels, strict=False):
        draw(axes)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return figure


def figure_bytes(panels: Sequence[Draw], columns: int = 2, size: Size = (5.5, 4.2)) -> bytes:
    """A PNG with one panel of `size` (inches) for each function of `panels`, row by row."""
    data = io.BytesIO()
    with _look():
        _figure(panels, columns, size).savefig(data, format="png", dpi=120)
    return data.getvalue()


def svg(draw: Draw, name: str, alt: str, size: Size = PANEL) -> str:
    """One panel as an `<svg>` for a page: scales with its place, and every id in it begins with `name`."""
    from matplotlib import rc_context

    data = io.StringIO()
    with _look(), rc_context({"svg.hashsalt": name}):
        _figure([draw], 1, size).savefig(data, format="svg", metadata={"Date": None})
    return slim(data.getvalue(), name, alt)


def slim(text: str, name: str, alt: str) -> str:
    """matplotlib's SVG as a part of a page: a third of the bytes, and no id that another figure has too."""
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"(\.\d\d)\d+", r"\1", body).replace("xlink:href", "href")
    used = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', body))
    kept = {found for pair in used for found in pair if found}
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in kept else "", body)
    body = re.sub(r'(href="#|url\(#)', lambda m: f"{m[1]}{name}-", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    while "<g></g>" in (body := re.sub(r"<g> *</g>|<defs> *</defs>", "<g></g>", body)):
        body = body.replace("<g></g>", "")
    return f'<svg {view[0]} role="img" aria-label="{html.escape(alt)}">{body.strip()}'


def plain(text: str) -> str:
    """`text` as matplotlib is to print it: between two dollar signs it would read a formula."""
    return text.replace("$", r"\$")


def legend_below(axes: Any) -> None:
    """The legend under the axis, where it covers no data."""
    from matplotlib.transforms import ScaledTranslation

    names = axes.get_legend_handles_labels()[1]
    if names:
        below = axes.transAxes + ScaledTranslation(0, -0.5, axes.figure.dpi_scale_trans)
        columns = max(1, min(len(names), 3, int(58 / (max(map(len, names)) + 6))))
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=below,
            ncols=columns,
            frameon=False,
            borderaxespad=0,
        )


def legend_room(names: Sequence[str], size: Size = PANEL) -> Size:
    """`size` with the height that `legend_below` needs for these names and the trained length."""
    columns = max(1, min(len(names) + 1, 3, int(58 / (max(map(len, names), default=0) + 6))))
    return size[0], size[1] + 0.19 * -(-(len(names) + 1) // columns)


def spaced(lengths: Sequence[int], room: float = 24.0) -> list[int]:
    """Those of ascending `lengths` whose numbers fit side by side on a log axis `room` characters wide."""
    low, high = math.log2(lengths[0]), math.log2(lengths[-1])
    kept: list[int] = []
    for length in reversed(lengths):
        gap = (math.log2(kept[-1] / length) / (high - low) * room) if kept else math.inf
        if gap > (len(str(length)) + len(str(kept[-1] if kept else 0))) / 2 + 0.5:
            kept.append(length)
    return kept[::-1]


def draw_lengths(axes: Any, lengths: Sequence[int], trained: int | None, what: str = "length (tokens)") -> None:
    """A log2 axis of lengths in tokens, with the trained length as a dashed line."""
    axes.set_xscale("log", base=2)
    ticks = spaced(lengths)
    axes.set_xticks(ticks, [str(length) for length in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(what)
    axes.grid(alpha=0.3)
    if trained and min(lengths) <= trained <= max(lengths):
        axes.axvline(trained, color="black", linestyle=(0, (4, 3)), linewidth=1, label=f"trained on {trained}")


def log_axis(axes: Any) -> None:
    """A log axis with numbers on it even where the figures stay within one decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 100 else (1.0, 3.0) if high / low < 1e4 else (1.0,)
    # within less than a decade the steps of a log axis would leave one number or none
    near = high / low < 5
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]) if near else LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def plot_lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]], style: Mapping[str, Any]) -> None:
    """One line an encoding through its (x, y); a single point is a larger mark."""
    names = short_names(list(style))
    for label, points in lines.items():
        if points:
            alone = {"markersize": 7, "zorder": 5} if len(points) == 1 else {"markersize": 3.5}
            look = {**style[label], **alone}
            axes.plot(*zip(*points, strict=True), label=plain(names[label]), **look)


def plot_rows(axes: Any, comparison: Comparison, figure: Literal["ppl", "ppl_tail"], title: str | None = None) -> None:
    """One line an encoding: perplexity (`ppl` or `ppl_tail`, log axis) over length, without cells that failed."""
    header, rows = comparison.header, comparison.rows
    draw_lengths(axes, sorted({row.length for row in rows}), header.get("trained_length"))
    found = perplexities(rows, figure)
    plot_lines(axes, {label: sorted(by_length.items()) for label, by_length in found.items()}, styles(comparison))
    log_axis(axes)
    default = "perplexity, whole" if figure == "ppl" else f"perplexity, last {header.get('tail')} tokens"
    axes.set_title(plain(title or f"{header['model'].rpartition('/')[2]}\n{default}"))
    legend_below(axes)


def plot_task(axes: Any, comparison: Comparison, task: str, title: str | None = None) -> None:
    """One line an encoding: mean score of a task (0 to 1) over length, without cells that failed."""
    rows = [row for row in comparison.task_rows if task_name(row) == task]
    draw_lengths(axes, sorted({row.length for row in rows}), comparison.header.get("trained_length"))
    found = task_scores(rows).get(task, {})
    plot_lines(axes, {label: sorted(by_length.items()) for label, by_length in found.items()}, styles(comparison))
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(plain(title or f"{comparison.header['model'].rpartition('/')[2]}\n{task}, mean score"))
    legend_below(axes)


def nll_lines(comparison: Comparison) -> dict[str, list[tuple[float, float]]]:
    """{label: [(last position of a bin, nll in nats)]} of the longest length of each encoding that has them."""
    longest: dict[str, Any] = {}
    for row in comparison.rows:
        if row.nll_by_position and row.length >= getattr(longest.get(row.label), "length", 0):
            longest[row.label] = row
    end = max((row.length for row in longest.values()), default=0)
    return {
        label: [(at, nll) for at, nll in row.nll_by_position if math.isfinite(nll)]
        for label, row in longest.items()
        if row.length == end
    }


def plot_nll(axes: Any, comparison: Comparison) -> None:
    """One line an encoding: negative log-likelihood (nats a token) over the position in the longest length."""
    lines = nll_lines(comparison)
    ends = [at for points in lines.values() for at, _ in points]
    ticks = [int(max(ends))]
    while ticks[-1] // 2 >= max(min(ends), 1):
        ticks.append(ticks[-1] // 2)
    draw_lengths(axes, ticks[::-1], comparison.header.get("trained_length"), "position (tokens)")
    marks = {label: look | {"marker": ""} for label, look in styles(comparison).items()}
    plot_lines(axes, lines, marks)
    axes.set_ylabel("nll (nats a token)")
    legend_below(axes)
