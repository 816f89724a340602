"""Documents to train on, streamed: text files, JSON lines, `datasets` by name, folder or object, and plain texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_posenc.errors import CheckpointError, OptionError, unknown

from .settings import DataSettings

BLOCK = 1 << 20
"""Characters of a long text file that are read at a time."""
JSON_LINES = (".jsonl", ".ndjson")
BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}


class Piece(NamedTuple):
    """A part of a document, with whether the document begins, and ends, with it."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Source:
    """A named stream of pieces that can be read again and again; `size` in bytes where it is known."""

    name: str
    read: Callable[[], Iterator[Piece]]
    size: int | None = None


def open_source(dataset: Any, settings: DataSettings) -> Source:
    """What `dataset` (an object) or else `settings.source` (names) holds.

    An object is a `datasets.Dataset`, an `IterableDataset`, or a sequence of texts. Raises a `PosencError` for a file
    that is missing, a data set that cannot be had, a column or a split that it has not.
    """
    if dataset is not None:
        return from_object(dataset, settings)
    if not settings.source:
        raise OptionError("no data: give a text file, JSON lines, the name of a data set, or task:passkey (--data)")
    parts = [from_name(name, settings) for name in settings.source]
    sizes = [part.size for part in parts]
    size = None if any(n is None for n in sizes) else sum(n for n in sizes if n is not None)
    return Source(", ".join(part.name for part in parts), lambda: (p for part in parts for p in part.read()), size)


def from_object(dataset: Any, settings: DataSettings) -> Source:
    """A data set or texts in memory."""
    if isinstance(dataset, Sequence) and not isinstance(dataset, str) and all(isinstance(t, str) for t in dataset):
        texts = list(dataset)
        return Source("texts", lambda: map(Piece, texts), sum(len(text.encode()) for text in texts))
    if isinstance(dataset, dict):
        raise OptionError(f"a data set with splits was given; choose one: dataset[{next(iter(dataset), 'train')!r}]")
    if not isinstance(dataset, Iterable) or isinstance(dataset, str):
        raise OptionError(f"data is a datasets.Dataset, a sequence of texts, or names; got {type(dataset).__name__}")
    name = getattr(dataset, "_fingerprint", None) or type(dataset).__name__
    return Source(str(name), lambda: rows(dataset, "the data set", settings.column))


def from_name(name: str, settings: DataSettings) -> Source:
    """A file, a folder or a data set by name."""
    path = Path(name).expanduser()
    if path.is_file():
        return Source(path.name, lambda: read_file(path, settings), path.stat().st_size)
    if path.is_dir():
        return from_folder(path, settings)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in (".txt", *JSON_LINES, *BUILDERS):
        raise CheckpointError(f"cannot read the data {name}: no such file or folder")
    return Source(name, lambda: rows(load(name, settings), name, settings.column))


def from_folder(folder: Path, settings: DataSettings) -> Source:
    """A folder of texts (each a document), one that `Dataset.save_to_disk` wrote, or one of data files."""
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return Source(folder.name, lambda: rows(load_saved(folder, settings), folder.name, settings.column))
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise OptionError(f"no text: the folder {folder} is empty")
    if any(file.suffix in BUILDERS for file in files):
        return Source(folder.name, lambda: rows(load(str(folder), settings), folder.name, settings.column))
    size = sum(file.stat().st_size for file in files)
    return Source(folder.name, lambda: (p for file in files for p in read_file(file, settings)), size)


def read_file(file: Path, settings: DataSettings) -> Iterator[Piece]:
    """The documents of one file, by its ending; one that is not known is a text."""
    if file.suffix in BUILDERS:
        yield from rows(load(BUILDERS[file.suffix], settings, data_files=str(file)), file.name, settings.column)
    elif file.suffix in JSON_LINES:
        yield from read_lines(file, settings.column)
    else:
        yield from read_text(file)


def read_text(file: Path) -> Iterator[Piece]:
    """One document in blocks that end at a line's end, so that a text of any size is held in part only."""
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text, begins = "", True
            while block := stream.read(BLOCK):
                text += block
                cut = text.rfind("\n") + 1
                if cut and len(block) == BLOCK:
                    yield Piece(text[:cut], begins, False)
                    text, begins = text[cut:], False
            yield Piece(text, begins)
    except OSError as error:
        raise CheckpointError(f"cannot read the data {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the data {file} are not UTF-8: byte {error.start} cannot be decoded") from error


def read_lines(file: Path, column: str) -> Iterator[Piece]:
    """JSON lines: one object a line, its text under `column`."""
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield Piece(text_of(json.loads(line), f"{file.name}, line {number}", column))
    except OSError as error:
        raise CheckpointError(f"cannot read the data {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the data {file} are not UTF-8: byte {error.start} cannot be decoded") from error
    except json.JSONDecodeError as error:
        raise OptionError(f"{file.name}, line {number} is not JSON: {error}") from error


def rows(dataset: Any, name: str, column: str) -> Iterator[Piece]:
    """The texts of a data set's rows."""
    for number, row in enumerate(dataset):
        yield Piece(text_of(row, f"{name}, row {number}", column))


def text_of(row: Any, where: str, column: str) -> str:
    """The text under `column`, or an `OptionError` that names what there is."""
    if not isinstance(row, dict):
        raise OptionError(f"{where} is not an object with a text under {column!r}, but {row!r:.60}")
    if column not in row:
        raise unknown(f"column of the data ({where})", column, [str(key) for key in row])
    text = row[column]
    if not isinstance(text, str):
        raise OptionError(
            f"{where}: column {column!r} holds {type(text).__name__}, not a text; choose another (column)"
        )
    return text


def load(name: str, settings: DataSettings, **files: Any) -> Any:
    """A stream of one split of what `datasets` knows by this name, or by `name:configuration`."""
    datasets = need_datasets()
    try:
        given = (name,) if files or Path(name).exists() else name.split(":", 1)
        found = datasets.load_dataset(*given, streaming=True, **files)
    except Exception as error:  # what a hub, a script or a file may raise differs by release
        said = " ".join(str(error).split())
        raise CheckpointError(f"no data set could be had as {name!r}: {type(error).__name__}: {said:.300}") from error
    return split_of(found, settings.split)


def load_saved(folder: Path, settings: DataSettings) -> Any:
    """What `save_to_disk` wrote."""
    try:
        found = need_datasets().load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the data set in {folder} cannot be read: {error}") from error
    return split_of(found, settings.split)


def split_of(found: Any, split: str) -> Any:
    """One split, where there are several."""
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise unknown("split of the data set", split, [str(key) for key in found])
    return found[split]


def need_datasets() -> Any:
    """The package `datasets`, or an error that says how to get it."""
    try:
        import datasets
    except ImportError as error:
        raise OptionError("this kind of data needs the package datasets: pip install 'hf-posenc[finetune]'") from error
    return datasets
