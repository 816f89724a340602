"""The keys of `config.json` as other readers know them, beside those of Transformers 5."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hf_posenc import marking, record
from hf_posenc.encodings import Encoding, LongRope, NtkByParts, Segmented
from hf_posenc.encodings.frequencies import yarn_temperature

from .targets import Subject, Target, explicit_temperature

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def stated_length(config: Any) -> int | None:
    """The length in tokens that a config states, by whichever name."""
    return next((int(n) for n in (getattr(config, name, None) for name in _LENGTHS) if n), None)


def served_length(about: Subject) -> int | None:
    """What to give vLLM as `--max-model-len`: the length that the encoding aims at."""
    encoding = about.encoding
    if isinstance(encoding, Segmented):
        return int(encoding.length * float(getattr(encoding, "factor", 1.0)))
    return stated_length(about.config)


def whole(about: Subject) -> Any:
    """A copy of the config with the host library's own type for an encoding by segments, and a record that says so."""
    config = marking.plain(copy.deepcopy(about.config))
    encoding = about.encoding
    assert isinstance(encoding, Segmented)
    before = copy.deepcopy(config)
    static = encoding.but(schedule="whole")
    about.patch.edit_config(config, static)  # type: ignore[attr-defined]  # a rotary host's
    config.hf_posenc = record.make(static, before, config, native=True)
    return config


def rewrite(folder: Path, target: Target, encoding: Encoding | None) -> None:
    """Add the keys of version 4 to the config in `folder`, and those that are the server's own."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return  # no rotation, or parameters a layer type, for which version 4 had other keys in every architecture
    if target == "vllm":
        parameters |= own_temperature(encoding, parameters)
    raw["rope_theta"] = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if parameters.get("rope_type", "default") != "default":
        raw["rope_scaling"] = {**scaling, "type": parameters["rope_type"]}
    if "partial_rotary_factor" in parameters:
        raw["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def own_temperature(encoding: Encoding | None, parameters: dict[str, Any]) -> dict[str, float]:
    """vLLM's keys for a temperature of one's own: it reads no `attention_factor`."""
    if parameters.get("rope_type") == "longrope" and "attention_factor" in parameters:
        return {"short_mscale": parameters["attention_factor"], "long_mscale": parameters["attention_factor"]}
    if isinstance(encoding, NtkByParts) and not isinstance(encoding, LongRope):
        wanted = explicit_temperature(encoding)
        if wanted is not None:
            return {"attn_factor": wanted / yarn_temperature(encoding.factor)}
    return {}
