"""The keys of `config.json` as other readers know them, beside those of Transformers 5."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hf_posenc import record
from hf_posenc.encodings import Encoding, LongRope, NtkByParts, Segmented
from hf_posenc.encodings.frequencies import yarn_temperature
from hf_posenc.ledger import Ledger
from hf_posenc.patching import PatchState, find_backbone

from .llamacpp import explicit_temperature, older_values
from .targets import Subject, Target, stated_length


def served_length(about: Subject) -> int | None:
    """What to give vLLM as `--max-model-len`: the length that the encoding aims at."""
    encoding = about.encoding
    if isinstance(encoding, Segmented):
        return int(encoding.length * float(getattr(encoding, "factor", 1.0)))
    return stated_length(about.config)


def whole(model: Any, about: Subject) -> Any:
    """The config with the host library's own type for an encoding by segments, and a record that says so.

    Made by the patch itself, on the model with its own patch set aside, and taken back at once.
    """
    backbone: Any = find_backbone(model)[1]
    assert isinstance(about.encoding, Segmented)
    static, ledger = about.encoding.but(schedule="whole"), Ledger()
    state: PatchState = backbone._posenc_state
    with state.ledger.suspended():
        before = copy.deepcopy(backbone.config)
        try:
            config = ledger.own_config(model, backbone.config)
            about.patch.apply(backbone, static, ledger)
            config.hf_posenc = record.make(static, before, config, native=True)
            return copy.deepcopy(config)
        finally:
            ledger.undo()


def rewrite(folder: Path, target: Target, encoding: Encoding | None) -> None:
    """Add the keys of version 4 to the config in `folder`, and those that are the server's own."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    if "n_positions" in raw:
        raw["n_ctx"] = raw["n_positions"]
    parameters = raw.get("rope_parameters")
    # parameters a layer type are left as they are: version 4 had other keys for them in every architecture
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        parameters |= own_temperature(encoding, parameters) if target == "vllm" else {}
        raw |= version_4(parameters)
    if target == "gguf":
        raw |= older_values(raw)
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def version_4(parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` in the words of Transformers 4."""
    beside: dict[str, Any] = {
        key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters
    }
    scaling = {key: value for key, value in parameters.items() if key not in beside}
    if parameters.get("rope_type", "default") == "default":
        return beside
    return {**beside, "rope_scaling": {**scaling, "type": parameters["rope_type"]}}


def own_temperature(encoding: Encoding | None, parameters: dict[str, Any]) -> dict[str, float]:
    """vLLM's keys for a temperature of one's own: it reads no `attention_factor`."""
    if parameters.get("rope_type") == "longrope" and "attention_factor" in parameters:
        return {"short_mscale": parameters["attention_factor"], "long_mscale": parameters["attention_factor"]}
    if isinstance(encoding, NtkByParts) and not isinstance(encoding, LongRope):
        wanted = explicit_temperature(encoding)
        if wanted is not None:
            return {"attn_factor": wanted / yarn_temperature(encoding.factor)}
    return {}
