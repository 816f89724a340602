"""Results of a comparison on disk and on the terminal: JSON, CSV, a plot, a table."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from hf_posenc.evaluate.results import CompareRow, Comparison

COLUMNS = ("encoding", "options", "length", "tokens", "ppl", "ppl_tail", "seconds", "peak_memory_bytes", "error")
SHARED_OPTIONS = ("rope_theta", "original_max_position_embeddings")
NO_PLOT = "matplotlib is not installed: no plot will be made, JSON and CSV only (pip install 'hf-posenc[report]')"


def can_plot() -> bool:
    """Whether matplotlib is there; asked before a run, so that nobody learns of it after hours."""
    return importlib.util.find_spec("matplotlib") is not None


def prepare_folder(out: str | Path) -> Path:
    """Make the folder `out` and prove that a file can be written there; `CheckpointError` if not."""
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"cannot write to the folder {folder}: {error.strerror or error}") from error
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path` and rename: a reader, or a run that was stopped, never sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp's 0600 would keep a report from everybody else
        os.replace(name, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def json_safe(value: Any) -> Any:
    """`value` in strict JSON: numbers that are not finite become text, since readers refuse bare NaN and Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def json_bytes(value: Any) -> bytes:
    """`value` as indented strict JSON in UTF-8."""
    return (json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def csv_bytes(rows: Sequence[CompareRow]) -> bytes:
    """One line a cell; options as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(asdict(row) | {"options": json.dumps(json_safe(row.options))})
    return text.getvalue().encode()


def write_report(folder: Path, comparison: Comparison, **more: Any) -> list[Path]:
    """Write results.json (header, rows, `more`), results.csv and, with matplotlib, perplexity.png; their paths."""
    rows = [asdict(row) for row in comparison.rows]
    files = {
        "results.json": json_bytes({"header": comparison.header, "rows": rows, **more}),
        "results.csv": csv_bytes(comparison.rows),
    }
    if can_plot():
        files["perplexity.png"] = figure_bytes(
            [partial(plot_rows, comparison=comparison, figure=figure) for figure in ("ppl", "ppl_tail")]
        )
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


def figure_bytes(panels: Sequence[Callable[[Any], None]], columns: int = 2) -> bytes:
    """A PNG with one panel for each function of `panels`, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface: pyplot would change the backend of a caller's own session.
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, draw in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=True):
        draw(axes)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def draw_lengths(axes: Any, lengths: Sequence[int], trained: int | None) -> None:
    """A log2 axis of lengths in tokens, with the trained length as a dashed line."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("length (tokens)")
    axes.grid(alpha=0.3)
    if trained and min(lengths) <= trained <= max(lengths):
        axes.axvline(trained, color="black", linestyle="--", linewidth=1, label=f"trained on {trained}")


def _log_axis(axes: Any) -> None:
    """A log axis with numbers on it even where the figures stay within one decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def plot_rows(axes: Any, comparison: Comparison, figure: str, title: str | None = None) -> None:
    """One line an encoding: perplexity (`ppl` or `ppl_tail`, log axis) over length, without cells that failed."""
    from matplotlib import colormaps

    header, rows = comparison.header, comparison.rows
    _log_axis(axes)
    draw_lengths(axes, sorted({row.length for row in rows}), header.get("trained_length"))
    labels = list(dict.fromkeys(row.label for row in rows))
    palette: Any = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    axes.set_prop_cycle(color=palette.colors)
    for label in labels:
        points = [(row.length, getattr(row, figure)) for row in rows if row.label == label and row.error is None]
        points = [(length, value) for length, value in points if value is not None and math.isfinite(value)]
        if points:
            alone = (
                {"marker": "*", "markersize": 11, "zorder": 5} if len(points) == 1 else {"marker": "o", "markersize": 3}
            )
            axes.plot(*zip(*points, strict=True), label=label, **alone)
    default = "perplexity, whole" if figure == "ppl" else f"perplexity, last {header['tail']} tokens"
    low, high = axes.get_ylim()
    if high / low < 5:  # within less than a decade the steps of a log axis would leave one number or none
        from matplotlib.ticker import MaxNLocator

        axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.set_title(title or f"{header['model'].rpartition('/')[2]}\n{default}", fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7 if len(labels) <= 10 else 5)


def _cell(row: CompareRow | None, figure: str) -> str:
    if row is None:
        return ""
    value = getattr(row, figure)
    if row.error is not None or value is None:
        return "error"
    return f"{value:.4g}" if value < 1e5 else f"{value:.2e}"


def console(**options: Any) -> Console:
    """A console that prints what it is given: rich would make a llama of `demo:llama`, and markup of `[1, 2]`."""
    from rich.console import Console

    made = Console(markup=False, emoji=False, highlight=False, **options)
    if not made.is_terminal:
        made.width = 160  # a pipe or a file has no width, and rich's 80 columns would break the tables
    return made


def length_table(title: str, cells: Mapping[str, Mapping[int, str]], lengths: Sequence[int]) -> Group:
    """A title and a table for the terminal: a row for each label of `cells`, a column for each length."""
    from rich.console import Group
    from rich.table import Table

    table = Table()  # not with its own title, which rich would break to the width of a narrow table
    table.add_column("encoding")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for label, by_length in cells.items():
        table.add_row(label, *(by_length.get(length, "") for length in lengths))
    return Group(title, table)


def comparison_tables(comparison: Comparison) -> list[Group]:
    """Perplexity by encoding and length, whole and over the tail."""
    rows, header = comparison.rows, comparison.header
    lengths = sorted({row.length for row in rows})
    tables = []
    for figure, what in (("ppl", "perplexity, all tokens"), ("ppl_tail", f"perplexity, last {header['tail']} tokens")):
        cells: dict[str, dict[int, str]] = {}
        for row in rows:
            cells.setdefault(row.label, {})[row.length] = _cell(row, figure)
        tables.append(length_table(f"{header['model']}: {what}, by length", cells, lengths))
    return tables


def error_lines(rows: Sequence[CompareRow]) -> list[str]:
    """One line for each cell that could not be measured."""
    return [f"{row.label} at {row.length}: {row.error}" for row in rows if row.error is not None]


def option_lines(row: Any) -> list[str]:
    """One line an option: required, its default, or its choices."""
    from dataclasses import MISSING, fields
    from typing import Literal, get_args, get_origin, get_type_hints

    hints, lines = get_type_hints(row.cls), []
    for field in fields(row.cls):
        if field.name in SHARED_OPTIONS:
            continue
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        kinds = (hints[field.name],) if get_origin(hints[field.name]) is Literal else kinds
        choices = [str(c) for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        default = "" if field.default in (MISSING, None) else f"={field.default}"
        note = " (required)" if field.default is MISSING else f" ({' | '.join(choices)})" if choices else ""
        lines.append(f"{field.name}{default}{note}")
    return lines


def encodings_table() -> tuple[Table, str]:
    """Every encoding with its seam, its options and its source, and what goes for all rotations."""
    from rich.table import Table

    import hf_posenc

    table = Table(title="Encodings: hf_posenc.patch_model(model, NAME, **options)", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("options", no_wrap=True)
    for column in ("what it does", "source"):
        table.add_column(column)
    for row in hf_posenc.list_encodings():
        table.add_row(row.name, "\n".join(option_lines(row)), f"{row.seam}: {row.summary}", row.paper)
    shared = (
        "Every rotation also takes rope_theta (default: the host's) and original_max_position_embeddings, the trained "
        "length (default: the config's; BLOOM states none)."
    )
    return table, shared


def support_table() -> tuple[Table, list[str]]:
    """Encodings by architecture, and a line with the reason for each pair that is refused."""
    from rich.table import Table

    import hf_posenc

    architectures = list(hf_posenc.list_architectures())
    table = Table(title="Encodings by architecture (model_type)", title_justify="left")
    table.add_column("encoding")
    for architecture in architectures:
        table.add_column(architecture, justify="center")
    reasons = []
    for row in hf_posenc.list_encodings():
        answers = [hf_posenc.support(architecture, row.name) for architecture in architectures]
        table.add_row(row.name, *("yes" if answer.ok else "no" for answer in answers))
        pairs = zip(architectures, answers, strict=True)
        reasons += [f"{row.name} on {architecture}: {answer.reason}" for architecture, answer in pairs if not answer.ok]
    return table, reasons
