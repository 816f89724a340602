"""A comparison that was stopped, taken up again: the cells that its folder holds are not measured twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_posenc.errors import CheckpointError, OptionError
from hf_posenc.evaluate.conditions import differing
from hf_posenc.evaluate.results import PERPLEXITY, CompareRow, Comparison, TaskRow

RESULTS = "results.json"
ANEW = "choose another folder, or measure everything anew (resume=False, --restart)"

Key = tuple[str, str, int]
"""(label of an encoding, measure, length) of a cell."""


def key_of(row: CompareRow | TaskRow) -> Key:
    """The cell that a row is of."""
    return row.label, row.task if isinstance(row, TaskRow) else PERPLEXITY, row.length


def read(folder: Path) -> Comparison | None:
    """The comparison that a folder holds, or None; `OptionError` for a results.json that is something else."""
    file = folder / RESULTS
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        return Comparison.from_json(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{file} is not a comparison of this version ({type(error).__name__}: {error}); {ANEW}"
        ) from error


def take_up(folder: Path | None, header: dict[str, Any], resume: bool = True) -> Comparison:
    """The comparison to go on with: the folder's earlier cells under the same conditions, or an empty one.

    Cells that failed are left out, so that they are tried again. The header is the new one; what it has no use for, and
    the encodings that only the earlier run had, stay.

    Raises:
        OptionError: the folder's cells were measured under other conditions, which would not be seen in the table.
    """
    earlier = read(folder) if resume and folder is not None else None
    if earlier is None:
        return Comparison(header)
    if (how := differing(earlier.header, header)) is not None:
        raise OptionError(f"{folder} holds cells measured under other conditions ({how}); {ANEW}")
    joined = {key: header.get(key) if header.get(key) is not None else value for key, value in earlier.header.items()}
    for key in ("encodings", "anatomy"):
        joined[key] = {**(earlier.header.get(key) or {}), **(header.get(key) or {})}
    return Comparison(
        {**header, **joined},
        [row for row in earlier.rows if row.error is None],
        [row for row in earlier.task_rows if row.error is None],
    )


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """For the block no other process writes to `folder`: each would drop the other's cells."""
    if folder is None:
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(f"another run is writing to {folder}; wait for it, or choose another folder") from error
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()


def finished(comparison: Comparison) -> Iterator[Key]:
    """The cells that are there."""
    yield from map(key_of, comparison.rows)
    yield from map(key_of, comparison.task_rows)
