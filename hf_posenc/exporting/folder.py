"""The exported folder: written beside its place and moved there when it is whole; nothing of anybody's is lost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posenc.errors import CheckpointError, OptionError, OptionTypeError

SHARD = 5 * 10**9  # bytes a file of weights, where the checkpoint that the model came from says nothing else
_INDEX = "model.safetensors.index.json"


def check_place(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """The folder to write, or a `CheckpointError` where something that is not to be replaced stands there."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionTypeError(f"a path is a folder to write, got {path!r} ({type(path).__name__})")
    place = Path(path)
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CheckpointError(f"{place} is a file or a link; give a folder that does not exist yet")
    if place.is_dir() and any(place.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{place} exists and is not empty; give another folder, or overwrite=True")
        if not (place / "config.json").is_file():
            raise CheckpointError(f"{place} holds no config.json, so it is no model's folder and is not replaced")
    return place


@contextmanager
def written_beside(place: Path) -> Iterator[Path]:
    """A new folder next to `place`, which takes its place at the end of the block, and is removed after an error."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write to {place.parent}: {error}") from error
    try:
        yield beside
        move(beside, place)
    except OSError as error:
        raise CheckpointError(f"cannot write to {place}: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def move(beside: Path, place: Path) -> None:
    """`beside` becomes `place`; what stood there is removed last."""
    beside.chmod(0o777 & ~current_umask())
    if not place.exists():
        beside.rename(place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)) / "old"
    place.rename(old)
    try:
        beside.rename(place)
    except OSError:
        old.rename(place)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def current_umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def shard_size(model: Any) -> int:
    """The size of the files that the model was read from, where those were several; else 5 GB."""
    name = getattr(model, "name_or_path", None)
    if not name:
        return SHARD
    source = Path(str(name))
    try:
        names = set(json.loads((source / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return min(max((source / name).stat().st_size for name in names), SHARD)
    except (OSError, ValueError, KeyError):
        return SHARD


def find_tokenizer(tokenizer: Any, model: Any) -> Any:
    """A tokenizer to save: the given one, the one in a given folder, or the one beside the model; None without any.

    Raises `CheckpointError` for a given folder that holds none, and for one beside the model that cannot be read.
    """
    if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike)):
        if not hasattr(tokenizer, "save_pretrained"):
            raise OptionError(f"a tokenizer is one of Transformers, or its folder; got {tokenizer!r:.80}")
        return tokenizer
    from transformers import AutoTokenizer

    source = str(getattr(model, "name_or_path", None) or "") if tokenizer is None else os.fspath(tokenizer)
    lies_there = bool(source) and any(Path(source).glob("tokenizer*"))
    if tokenizer is None and not lies_there and (not source or Path(source).exists()):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # what a tokenizer's own code raises differs
        if tokenizer is None and not lies_there:  # a hub id, which need not have one
            return None
        raise CheckpointError(f"no tokenizer could be read from {source!r}: {error}") from error
