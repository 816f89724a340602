"""The record of a patch in a model's config (`config.hf_posenc`), which `save_pretrained` writes out with the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from . import __version__
from .encodings import Encoding
from .errors import CheckpointError, PosencError
from .marking import UNKNOWN
from .registry import ENCODINGS, create

VERSION = 1
KEY = "hf_posenc"

# the fields of a config that a patch may change
TOUCHED = ("rope_parameters", "max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Record:
    """A record that has been read and checked."""

    name: str
    options: dict[str, Any]
    native: bool
    base: dict[str, Any]

    def encoding(self) -> Encoding:
        """The encoding it names; raises a `CheckpointError` where this version cannot make it."""
        try:
            return create(self.name, **self.options)
        except PosencError as error:
            raise CheckpointError(f"the record of the patch names an encoding that cannot be made: {error}") from error


def make(encoding: Encoding, before: Any, after: Any, native: bool) -> dict[str, Any]:
    """The record of `encoding`: name, options, whether plain Transformers holds it, and what the config said before."""
    old, new = before.to_dict(), after.to_dict()
    return {
        "version": VERSION,
        "encoding": encoding.name,
        "options": encoding.options(),
        "native": native,
        **({} if native or encoding.name in ENCODINGS else {UNKNOWN: True}),
        "base": {key: old[key] for key in TOUCHED if key in old and old[key] != new.get(key)},
        "hf_posenc": __version__,
        "transformers": transformers.__version__,
    }


def read(config: Any) -> Record | None:
    """The record in a config, or None; raises `CheckpointError` for one that is corrupt, foreign or newer."""
    raw = getattr(config, KEY, None)
    if raw is None:
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("version"), int):
        raise CheckpointError(
            f"config.{KEY} is not a record of this package (got {raw!r:.80}); remove that key from config.json, or "
            "load the original checkpoint"
        )
    if raw["version"] < 1:
        raise CheckpointError(f"config.{KEY} is corrupt (version {raw['version']}); restore config.json")
    if raw["version"] > VERSION:
        raise CheckpointError(
            f"this checkpoint was written by a newer hf_posenc ({raw.get('hf_posenc', 'unknown')}, record version "
            f"{raw['version']}; this one reads up to {VERSION}); pip install --upgrade hf_posenc"
        )
    kinds = {"encoding": str, "options": dict, "native": bool, "base": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(raw.get(key), kind)]
    if wrong or not set(raw["base"]) <= set(TOUCHED):
        raise CheckpointError(
            f"config.{KEY} is corrupt (wrong or missing: {', '.join(wrong) or 'base'}); restore config.json, or remove "
            "that key and patch the model anew"
        )
    return Record(raw["encoding"], raw["options"], raw["native"], raw["base"])
