"""`adapter_config.json` of an adapter over a patched model: PEFT itself warns where it meets it on another base.

PEFT attaches an adapter to any model that has modules of the right names. What its config holds beyond PEFT's own
fields it ignores with a warning that quotes their names: so the name of one field is a sentence.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .modules import quiet_peft

ADAPTER_CONFIG = "adapter_config.json"
_MARK = "made over a model patched with "


def mark(folder: str | os.PathLike[str], encoding: str | None) -> None:
    """Let the config in `folder`, if there is one, say which encoding its base must have; None takes that out."""
    file = Path(folder, ADAPTER_CONFIG)
    if not file.is_file():
        return
    raw = unmarked(json.loads(file.read_text(encoding="utf-8")))
    if encoding is not None:
        raw[f"{_MARK}{encoding}; on any other base it is wrong; load it with hf_posenc.from_pretrained"] = True
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def unmarked(raw: dict[str, Any]) -> dict[str, Any]:
    """A config without the sentence."""
    return {key: value for key, value in raw.items() if not key.startswith(_MARK)}


def read(folder: str | os.PathLike[str]) -> Any:
    """PEFT's config of the adapter in `folder`, without a warning; raises `CheckpointError` for one that it refuses."""
    from peft import PeftConfig

    file = Path(folder, ADAPTER_CONFIG)
    try:
        return PeftConfig.from_peft_type(**unmarked(dict(json.loads(file.read_text(encoding="utf-8")))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def attach(model: Any, folder: str | os.PathLike[str], is_trainable: bool = False) -> Any:
    """The adapter in `folder`, or of a hub id, on a model that has its encoding."""
    from peft import PeftModel

    if not Path(folder).is_dir():
        with quiet_peft():
            return PeftModel.from_pretrained(model, os.fspath(folder), is_trainable=is_trainable)
    config = read(folder)
    config.inference_mode = not is_trainable
    with quiet_peft():
        return PeftModel.from_pretrained(model, os.fspath(folder), config=config, is_trainable=is_trainable)
