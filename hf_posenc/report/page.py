"""The page report.html: what a section is made of, and how it is rendered (one file, no script, no network)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from hf_posenc.report.measures import short_names

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `best` is printed bold, `failed` grey, `note` is its tooltip."""

    text: str
    best: bool = False
    failed: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a header row, whose first column names the rows; `folded` starts closed."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    prose: bool = False
    """Whether the cells hold words, not numbers."""


@dataclass(frozen=True)
class Picture:
    """One `<svg>` and what it shows."""

    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side, as many as fit; `small` ones are narrower."""

    pictures: Sequence[Picture]
    small: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: words, pictures, tables, a list, code. `missing`: why it is left out."""

    name: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[Pictures] = ()
    tables: Sequence[Table] = ()
    code: Sequence[str] = ()
    items: Sequence[str] = ()
    missing: str = ""


@dataclass(frozen=True)
class Page:
    """The whole report; `warning` is shown above everything else."""

    title: str
    summary: Sequence[str]
    sections: Sequence[Section]
    warning: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """A line of conditions under the title."""


def text_row(*cells: object) -> list[Cell]:
    """A row of plain cells."""
    return [Cell(str(cell)) for cell in cells]


def named(label: str, names: Mapping[str, str]) -> Cell:
    """The first cell of a row: the short name, the whole label as its tooltip."""
    return Cell(names[label], note="" if names[label] == label else label)


def length_grid(
    caption: str,
    cells: Mapping[str, Mapping[int, Cell]],
    lengths: Iterable[int],
    *,
    first: str = "encoding",
    folded: bool = False,
) -> Table:
    """A table with a row for each label of `cells` and a column for each length."""
    columns = list(lengths)
    names = short_names(list(cells))
    rows = [
        [named(label, names), *(row.get(n, Cell("–", note="not measured")) for n in columns)]
        for label, row in cells.items()
    ]
    return Table(caption, [first, *(f"{n}" for n in columns)], rows, folded)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("hf_posenc.report", "")
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    return Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options).get_template("report.html.j2")


def render(page: Page) -> str:
    """The page as HTML: everything escaped but the pictures, which matplotlib has escaped."""
    return _template().render(page=page)
