"""`adapter_config.json` of an adapter over a patched model: PEFT itself warns where it meets it on another base.

PEFT attaches an adapter to any model that has modules of the right names. What its config holds beyond PEFT's own
fields it ignores with a warning that quotes their names: so the name of one field is a sentence. Its value is the
record of the patch. It is also written when PEFT itself saves, or uploads: PEFT asks the model for its tensors first.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .ledger import Ledger
from .modules import quiet_peft

ADAPTER_CONFIG = "adapter_config.json"
_MARK = "made over a model patched with "


def mark(folder: str | os.PathLike[str], record: dict[str, Any] | None) -> None:
    """Let the config in `folder`, if there is one, hold the record that its base must have; None takes that out."""
    file = Path(folder, ADAPTER_CONFIG)
    if not file.is_file():
        return
    raw = marked(unmarked(json.loads(file.read_text(encoding="utf-8"))), record)
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def marked(raw: dict[str, Any], record: dict[str, Any] | None) -> dict[str, Any]:
    """A config with the sentence and the record."""
    if record is None:
        return raw
    sentence = f"{_MARK}{record['encoding']}; on any other base it is wrong; load it with hf_posenc.from_pretrained"
    return {**raw, sentence: record}


def marked_as(folder: str | os.PathLike[str]) -> tuple[str | None, dict[str, Any] | None]:
    """Which encoding the config in `folder` names, and its record; a folder may name it alone, or neither."""
    file = Path(folder, ADAPTER_CONFIG)
    try:
        raw = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    for key, value in raw.items():
        if key.startswith(_MARK):
            return key.removeprefix(_MARK).partition(";")[0], value if isinstance(value, dict) else None
    return None, None


@dataclass(eq=False)
class MarkedDict:
    """Stands on the instance of an adapter's config in the place of its `to_dict`, from which PEFT writes the file."""

    config: Any
    record: dict[str, Any]

    def __call__(self) -> dict[str, Any]:
        return marked(type(self.config).to_dict(self.config), self.record)


def remember(configs: Any, record: dict[str, Any], ledger: Ledger) -> None:
    """Let the `configs` of a model's adapters be written with the record, until the patch is taken out."""
    for config in configs.values() if isinstance(configs, dict) else ():
        standing = vars(config).get("to_dict")
        if isinstance(standing, MarkedDict):
            standing.record = record
        else:
            ledger.set_attribute(config, "to_dict", MarkedDict(config, record))


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
