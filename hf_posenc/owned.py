"""What a patch owns on a host and trains, in files: a fresh table of positions, or the module of a bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from . import record
from .encodings import Bias, ScoreBias
from .errors import CheckpointError
from .offload import held
from .patching import find_backbone, get_encoding

OWN = "posenc"  # the name under which it stands on the backbone


def fill_own(model: nn.Module, path: str, hub: dict[str, Any]) -> None:
    """Read what a patch owns and trains, a fresh table or a bias, which the stock loader does not know.

    Raises `CheckpointError` for a tensor that is not there, or has another shape than the record says.
    """
    _, backbone = find_backbone(model)
    owned = getattr(backbone, OWN, None)
    wanted = {} if owned is None else owned.state_dict()
    if not wanted:
        return
    found = own_tensors(path, hub)
    for name, tensor in wanted.items():
        if name not in found:
            raise CheckpointError(
                f"the record of {path!r} names {get_encoding(model).name}, and no file there holds its {OWN}.{name}"  # type: ignore[union-attr]
            )
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{OWN}.{name} in {path!r} is {tuple(found[name].shape)}, its record says {tuple(tensor.shape)}"
            )
        tensor.copy_(found[name])


def own_tensors(path: str, hub: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a checkpoint that stand below the name under which a patch keeps its own."""
    hub = {key: value for key, value in hub.items() if key != "trust_remote_code"}
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **hub)
    names, found = ["model.safetensors"], {}
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    for name in names:
        file = cached_file(path, name, **hub)
        assert file is not None
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                _, own, rest = f".{key}".rpartition(f".{OWN}.")
                if own:
                    found[rest] = tensors.get_tensor(key)
    return found


def check_adapter(model: Any, backbone: Any) -> None:
    """Raise where a bias that differs from its fresh values would be in neither the adapter nor its base."""
    encoding = get_encoding(model)
    if not hasattr(model, "peft_config") or not isinstance(encoding, Bias) or not encoding.trained:
        return
    owned, base = getattr(backbone, OWN), Path(str(backbone.config.name_or_path), "config.json")
    if not isinstance(owned, ScoreBias) or (base.is_file() and f'"{record.KEY}"' in base.read_text()):
        return  # wrapped by PEFT, which then saves it; or the base has it
    fresh = encoding.module(find_backbone(model)[0].geometry(backbone).num_heads).state_dict()
    now = {name: held(owned, name) for name in fresh}
    if any(not torch.equal(fresh[name].to(tensor), tensor) for name, tensor in now.items()):
        raise CheckpointError(
            f"this adapter would lose the trained values of {encoding.name}, which the base does not hold either; make "
            f'it with LoraConfig(…, modules_to_save=["{OWN}"])'
        )
