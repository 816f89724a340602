"""A bar over a search, on stderr, with the best figure so far and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int, float, float], None]
"""Called after each candidate with the generation, the candidates measured, the seconds spent and the best loss."""


@contextmanager
def search_progress(expected: int, budget: float | None, shown: bool) -> Iterator[Advance]:
    """A bar of `expected` candidates, or of `budget` seconds where time is what ends the search."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("search", total=expected if budget is None else budget)

        def advance(generation: int, measured: int, seconds: float, best: float) -> None:
            done = float(measured) if budget is None else min(seconds, budget)
            said = f"generation {generation}, {measured} candidates, best {best:.4f} nats"
            progress.update(task, completed=done, description=said)

        yield advance
