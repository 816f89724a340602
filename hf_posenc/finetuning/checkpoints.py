"""Checkpoints on disk: which of them are whole, and whether a run may go on from them.

A folder `checkpoint-N` is whole or ignored: the Trainer writes `trainer_state.json` last, so one that can be read says
that everything else was there before it, whatever stopped the process.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_posenc.errors import CheckpointError, StateError

from .settings import FILE, Settings, read_settings

STATE = "trainer_state.json"
FREE = ("merge", "evaluation")
"""Groups that a resumed run may change."""
BOUND = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "train_batch_size")
"""Fields of `TrainingArguments` that decide which data a step sees."""


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders with their steps, the latest first; whole or not."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted(((int(match[1]), path) for match, path in found if match and path.is_dir()), reverse=True)


def is_whole(folder: Path, step: int) -> bool:
    """Whether a checkpoint was written to its end: its state can be read, and so can the head of every weights file."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        weights = list(folder.glob("*.safetensors"))
        for file in weights:
            with safe_open(file, framework="pt"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    sharded = any(path.is_dir() for path in folder.iterdir())  # FSDP's and DeepSpeed's own files
    return isinstance(state, dict) and state.get("global_step") == step and bool(weights or sharded)


def last_whole(folder: Path) -> tuple[int, Path] | None:
    """The latest checkpoint that is whole, with its step."""
    return next(((step, path) for step, path in numbered(folder) if is_whole(path, step)), None)


def remove_broken(folder: Path) -> list[str]:
    """Delete the checkpoints that are not whole, and say which."""
    broken = [path for step, path in numbered(folder) if not is_whole(path, step)]
    for path in broken:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in broken]


def remove_all(folder: Path) -> None:
    """Delete every checkpoint: the run starts anew."""
    for _, path in numbered(folder):
        shutil.rmtree(path)


def refuse_changes(folder: Path, settings: Settings, identity: Mapping[str, Any]) -> None:
    """Raise `StateError` where the run in `folder` had another encoding, model, data or adapter than this one.

    `identity` holds what the settings do not: sizes of files, the encoding with every option, the weights' digest.
    """
    before = read_settings(folder / FILE)
    now = settings.as_dict()
    for group in ("encoding", "model", "data", "lora", "adapter", "dtype", "gguf_file", "shifted_group"):
        old, new = before.get(group), now.get(group)
        if old != new:
            inner = ""
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(k for k in {**old, **new} if old.get(k) != new.get(k))
                old, new, inner = old.get(key), new.get(key), f" {key}"
            raise changed(folder, f"{group}{inner}", old, new)
    for key in BOUND:
        old, new = before.get("training", {}).get(key), now["training"].get(key)
        if old != new:
            raise changed(folder, key, old, new)
    known = read_identity(folder)
    for key, value in identity.items():
        if known is not None and known.get(key) not in (None, value):
            raise changed(folder, key.replace("_", " "), known.get(key), value)


def changed(folder: Path, what: str, old: Any, new: Any) -> StateError:
    """The error for a run that would not go on as it began."""
    return StateError(
        f"the run in {folder} had {what} {old!r}, now it is {new!r}: it cannot go on with that; give the same command "
        "again, another folder, or --restart, which deletes its checkpoints"
    )


def write_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Keep what a resumed run is compared with."""
    from hf_posenc.report import write_atomically

    write_atomically(folder / "run.json", (json.dumps(dict(identity), indent=2) + "\n").encode())


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What `write_identity` kept, None where there is none."""
    file = folder / "run.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; give another folder, or --restart") from error
    return found if isinstance(found, dict) else None
