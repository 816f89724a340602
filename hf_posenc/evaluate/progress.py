"""A bar over the cells of a run, on stderr, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cell_progress(cells: int, tokens: int, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr with the time left; its step is a token, since a long cell takes longer than a short one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(f"cell 0/{cells}", total=tokens)
        done = 0

        def advance(label: str, length: int) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=length, description=f"cell {done}/{cells}  {length} {label:.44}")

        yield advance
