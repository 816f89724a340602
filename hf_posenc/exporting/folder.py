"""The exported folder: written beside its place and moved there when it is whole.

With `overwrite=True` an earlier model is replaced, and nothing else: a folder that holds what no export writes is left
as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hf_posenc.errors import CheckpointError, OptionError, OptionTypeError
from hf_posenc.marking import OWN_CODE

SHARD = 5 * 10**9  # bytes a file of weights, where the checkpoint that the model came from says nothing else
_INDEX = "model.safetensors.index.json"
_TOKENIZER = ("tokenizer*", "vocab.txt", "vocab.json", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
# what an export may write, beside the code that the config names
_WRITTEN = (
    *("config.json", "generation_config.json", "README.md", f"{OWN_CODE}.py", "model*.safetensors", _INDEX),
    *(*_TOKENIZER, "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates"),
)


def check_place(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """The folder to write, or a `CheckpointError` where something that is not to be replaced stands there."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionTypeError(f"a path is a folder to write, got {path!r} ({type(path).__name__})")
    place = Path(path)
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CheckpointError(f"{place} is a file or a link; give a folder that does not exist yet")
    if place.is_dir() and any(place.iterdir()):
        if not overwrite:
            raise CheckpointError(
                f"{place} exists and is not empty; give another folder, or overwrite=True (--overwrite)"
            )
        if not (place / "config.json").is_file():
            raise CheckpointError(f"{place} holds no config.json, so it is no model's folder and is not replaced")
        others = not_ours(place)
        if others:
            raise CheckpointError(
                f"{place} holds what an export does not write ({', '.join(others[:5])}), so it is not replaced; give "
                "another folder, or move that out first"
            )
    return place


def not_ours(place: Path) -> list[str]:
    """The names in a model's folder that an export would not write."""
    try:
        named = (json.loads((place / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}).values()
    except (OSError, ValueError, AttributeError):
        named = ()
    code = {f"{str(name).split('--')[-1].split('.')[0]}.py" for name in named}
    names = sorted(entry.name for entry in place.iterdir())
    return [name for name in names if name not in code and not any(fnmatch(name, known) for known in _WRITTEN)]


def check_size(size: int | str | None) -> int | str | None:
    """The size of a file of weights; raises `OptionError` for one that is no size."""
    is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
    is_text = isinstance(size, str) and re.fullmatch(r"\s*\d*\.?\d+\s*[KMGT]B\s*", size, re.I) is not None
    if not (size is None or is_count or is_text):
        raise OptionError(f"max_shard_size is a number of bytes or a size such as '5GB' or '200MB', got {size!r}")
    return size


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
    lies_there = bool(source) and any(any(Path(source).glob(name)) for name in _TOKENIZER)
    if tokenizer is None and not lies_there and (not source or Path(source).exists()):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # what a tokenizer's own code raises differs
        if tokenizer is None and not lies_there:  # a hub id, which need not have one
            return None
        raise CheckpointError(f"no tokenizer could be read from {source!r}: {error}") from error
