"""What the constructor of an exported model does; it is shipped with the model, and runs without this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_posenc.encodings import Encoding
from hf_posenc.errors import CheckpointError
from hf_posenc.ledger import Ledger
from hf_posenc.marking import MarkedOnDisk, unmark
from hf_posenc.patches.base import Patch

__all__ = ["MarkedOnDisk", "put_in", "unmark"]


def kinds(base: type[Encoding] = Encoding) -> dict[str, type[Encoding]]:
    """Every encoding by its name."""
    found = {base.name: base} if "name" in vars(base) else {}
    for cls in base.__subclasses__():
        found |= kinds(cls)
    return found


def recorded(config: Any) -> Encoding:
    """The encoding that a config's record names."""
    record = getattr(config, "hf_posenc", None)
    if not isinstance(record, dict) or record.get("encoding") not in kinds():
        raise CheckpointError(f"config.json names no encoding under `hf_posenc` that this file knows: {record!r:.200}")
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in record["options"].items()}
    return kinds()[record["encoding"]](**options)


def put_in(model: Any, patch: Patch) -> None:
    """Put the encoding of the config into a model whose weights may not be there yet."""
    backbone: Any = next(module for module in model.modules() if isinstance(module, patch.backbone_type()))
    ledger, geometry = Ledger(), patch.geometry
    # a fresh table is filled from the checkpoint: what it starts from is not asked of weights that may be on meta
    patch.__dict__["geometry"] = lambda host: replace(geometry(host), embedding_rms=lambda: 1.0)
    ledger.own_config(model, backbone.config)
    patch.apply(backbone, recorded(backbone.config), ledger)
    if model is not backbone:
        patch.forward_hooks(model, backbone, ledger)
