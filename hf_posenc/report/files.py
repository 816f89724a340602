"""Results on disk: folders that are proved writable, files that are never half written, strict JSON, CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import CheckpointError

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import CompareRow, TaskRow

COLUMNS = ("encoding", "options", "length", "tokens", "ppl", "ppl_tail", "seconds", "peak_memory_bytes", "error")
TASK_COLUMNS = (
    "encoding",
    "options",
    "length",
    "task",
    "form",
    "samples",
    "acc",
    "nll",
    "gain",
    "by_depth",
    "seconds",
    "error",
)


def prepare_folder(out: str | Path) -> Path:
    """Make the folder `out` and prove that a file can be written there; `CheckpointError` if not."""
    folder = Path(out).expanduser()
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, and the results go into a folder; give another name")
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


def _csv(columns: Sequence[str], rows: Sequence[Any]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row).items()
        writer.writerow({key: json.dumps(json_safe(v)) if isinstance(v, Mapping) else v for key, v in cells})
    return text.getvalue().encode()


def csv_bytes(rows: Sequence[CompareRow]) -> bytes:
    """One line a perplexity cell; options as JSON."""
    return _csv(COLUMNS, rows)


def task_csv_bytes(rows: Sequence[TaskRow]) -> bytes:
    """One line a task cell; options and scores by depth as JSON."""
    return _csv(TASK_COLUMNS, rows)
