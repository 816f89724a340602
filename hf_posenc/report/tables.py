"""Results on the terminal: a console that prints what it is given, and tables by encoding and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.report.measures import task_name, task_names

if TYPE_CHECKING:
    from rich.console import Console, Group

    from hf_posenc.evaluate.results import CompareRow, Comparison, TaskRow


def _cell(row: CompareRow | TaskRow, figure: str) -> str:
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
    """Perplexity by encoding and length, whole and over the tail; then the score of every task."""
    header, tables = comparison.header, []
    perplexities = {"ppl": "perplexity, all tokens", "ppl_tail": f"perplexity, last {header.get('tail')} tokens"}
    for figure, what in perplexities.items() if comparison.rows else ():
        tables.append(_table(f"{header['model']}: {what}, by length", comparison.rows, figure))
    for name in task_names(comparison.task_rows):
        rows = [row for row in comparison.task_rows if task_name(row) == name]
        of = max(row.samples for row in rows)
        tables.append(_table(f"{header['model']}: {name}, mean score of {of} documents, by length", rows, "acc"))
    return tables


def _table(title: str, rows: Sequence[CompareRow] | Sequence[TaskRow], figure: str) -> Group:
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        cells.setdefault(row.label, {})[row.length] = _cell(row, figure)
    return length_table(title, cells, sorted({row.length for row in rows}))


def error_lines(rows: Sequence[CompareRow | TaskRow]) -> list[str]:
    """One line for each cell that could not be measured."""
    return [
        (f"{task_name(row)}, " if hasattr(row, "task") else "") + f"{row.label} at {row.length}: {row.error}"
        for row in rows
        if row.error is not None
    ]
