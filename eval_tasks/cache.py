"""Generated documents on disk, so that a second run, or a second process, need not size them again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .sizing import Document

log = logging.getLogger(__name__)

VERSION = 1
"""Raised with every change of a generator: documents of another version are made anew."""


def cache_folder() -> Path:
    """`$HF_POSENC_CACHE`, else `hf_posenc/` in the user's cache folder (XDG)."""
    own = os.environ.get("HF_POSENC_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(base).expanduser() / "hf_posenc"


def tokenizer_hash(tokenizer: Any) -> str:
    """A digest of all that decides how many tokens a text has."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # Padding and truncation are left from the last call and say nothing about a text's size.
        state = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
    else:
        state = {"vocab": tokenizer.get_vocab()}
    flags = {key: getattr(tokenizer, key, None) for key in ("add_bos_token", "add_eos_token")}
    text = json.dumps([type(tokenizer).__name__, flags, state], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path) -> list[Document] | None:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return [Document(**{**row, "outputs": tuple(row["outputs"])}) for row in rows]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("documents in %s cannot be read (%s); they are made anew", file, error)
        return None


def _write(file: Path, documents: list[Document]) -> None:
    """Write beside `file` and rename: a reader, or a run that was stopped, never sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump([asdict(document) for document in documents], stream)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        # A full or read-only disk costs time at the next run, and nothing else.
        log.warning("documents are not kept in %s: %s", file.parent, error.strerror or error)


def cached(key: dict[str, Any], make: Callable[[], list[Document]]) -> list[Document]:
    """The documents of `key` (JSON values) from the disk, or from `make` and then kept."""
    text = json.dumps({"version": VERSION, **key}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    file = cache_folder() / "documents" / f"{key['task']}-{key['length']}-{digest}.json"
    documents = _read(file)
    if documents is None:
        documents = make()
        _write(file, documents)
    return documents
