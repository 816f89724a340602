"""What llama.cpp makes of each host: its converter, which reads the exported folder, and its graph, which runs a file.

A row is here where a run of llama.cpp gave the log-probabilities that the model gives here
(tests/test_export_llamacpp.py); what the converter writes and what the graph reads was read in their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_posenc.encodings import Encoding, Llama3, LongRope, NtkByParts, Rotation
from hf_posenc.encodings.frequencies import yarn_temperature
from hf_posenc.patches.native_rope import typed

_BETAS = (32.0, 1.0)  # what llama.cpp takes for beta_fast and beta_slow: of these graphs none reads the file's


@dataclass(frozen=True)
class Row:
    """One host: which types its graph was run with, and what the converter leaves to us.

    `types`: those of Transformers that the graph computes. `lists`: factors a pair of channels, that we put into the
    file ("ours") or the converter does ("written"), the host having no other type. `dropped`: the converter writes
    nothing of a rotation. `windows`: the graph has the host's windows. `unless`: config entries that it does not have.
    """

    types: tuple[str, ...] = ("default", "linear", "yarn")
    lists: Literal["", "ours", "written"] = ""
    dropped: bool = False
    windows: bool = False
    unless: tuple[tuple[str, str], ...] = ()


_LAYER_TYPES = ("default", "linear")  # its windowed layers would be given YaRN's ramp and temperature as well
HOSTS: dict[str, Row] = {
    "llama": Row(lists="ours"),
    "mistral": Row(lists="ours"),
    "mixtral": Row(lists="ours"),
    "qwen2": Row(),
    "qwen2_moe": Row(),
    "qwen3": Row(),
    "qwen3_moe": Row(),
    "olmo2": Row(),
    "olmoe": Row(),
    "glm4": Row(),
    "starcoder2": Row(),
    "smollm3": Row(),
    "gpt_oss": Row(windows=True),
    "gemma3_text": Row(types=_LAYER_TYPES, windows=True),
    "gemma": Row(dropped=True),
    "gemma2": Row(dropped=True, windows=True),
    "cohere": Row(dropped=True, unless=(("use_qk_norm", "norms on queries and keys"),)),
    "stablelm": Row(dropped=True, unless=(("qk_layernorm", "norms on queries and keys"),)),
    "phi": Row(dropped=True, unless=(("qk_layernorm", "norms on queries and keys"),)),
    "phi3": Row(types=("default",), lists="written"),
    "falcon": Row(dropped=True, unless=(("alibi", "ALiBi"),)),
    "gpt2": Row(types=()),
    "bloom": Row(types=()),
}
_UNKNOWN = "its converter does not know the architecture"
REFUSED: dict[str, str] = {
    "openai-gpt": _UNKNOWN,
    "opt": _UNKNOWN,
    "gptj": _UNKNOWN,
    "glm": "it does not load what its own converter makes of this host",
    "gpt_neox": "its converter asks for rotary_pct, which Transformers 5 takes out of this config, and fails",
    "mpt": "its converter knows MPT by the class of its authors, and not Transformers' own",
    "bert": "it takes this host as an embedder, without its head",
    "roberta": "it takes this host as an embedder, without its head",
}


def in_llamacpp(encoding: Encoding | None, config: Any, length: int | None) -> str | None:
    """Why llama.cpp would not compute this host with this encoding (None: its own), or None where it does."""
    host = config.model_type
    if host in REFUSED:
        return REFUSED[host]
    if host not in HOSTS:
        return None if encoding is None else f"no run of llama.cpp has given the probabilities that {host} gives here"
    row = HOSTS[host]
    for key, what in row.unless:
        if getattr(config, key, False):
            return f"its graph of {host} has no {what} ({key})"
    window = None if row.windows else shortest_window(config)
    if window is not None and (length is None or window < length):
        return f"its graph of {host} has no window, and this model sees {window} tokens back"
    if not isinstance(encoding, Rotation) or (row.lists and (row.lists == "ours" or is_list(encoding, row))):
        return None
    if needs_factors(encoding):
        if is_yarn(encoding):
            return f"it has YaRN with beta_fast=32, beta_slow=1 and a rounded ramp alone for {host}; leave those out"
        return f"it reads no factors a pair of channels for {host}"
    kind = kind_of(encoding)
    return None if kind in row.types else f"its graph of {host} does not compute {kind!r} as the host does"


def shortest_window(config: Any) -> int | None:
    """The tokens that a windowed layer of this config sees back, or None where no layer is windowed."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(window) if window and windowed else None


def kind_of(encoding: Rotation) -> str:
    """The host library's type for an encoding; any width will do."""
    parameters = typed(encoding, 4) if encoding.is_ours else None
    return "" if parameters is None else str(parameters["rope_type"])


def is_yarn(encoding: Encoding | None) -> bool:
    return isinstance(encoding, NtkByParts) and kind_of(encoding) == "yarn"


def is_list(encoding: Rotation, row: Row) -> bool:
    """Whether the file holds this encoding as factors a pair of channels."""
    return needs_factors(encoding) if row.lists != "written" else kind_of(encoding) != "default"


def needs_factors(encoding: Encoding | None) -> bool:
    """Whether llama.cpp can have this encoding only as factors a pair: its YaRN has one ramp, with rounded ends."""
    if not isinstance(encoding, Rotation):
        return False
    if isinstance(encoding, NtkByParts):
        own = (float(encoding.beta_fast), float(encoding.beta_slow)) != _BETAS or not encoding.truncate
        return own or not is_yarn(encoding)
    return not kind_of(encoding) or isinstance(encoding, (Llama3, LongRope))


def completed(encoding: Encoding | None, host: str) -> bool:
    """Whether llama.cpp's converter drops a part of this encoding, so that the file must be completed after it.

    It makes factors for `llama3` alone, and its YaRN has one temperature, 0.1 ln s + 1.
    """
    row = HOSTS.get(host)
    if row is None or not isinstance(encoding, Rotation):
        return False
    if row.dropped or (row.lists == "written" and is_list(encoding, row)):
        return True
    if isinstance(encoding, NtkByParts) and explicit_temperature(encoding) is not None:
        return True
    return needs_factors(encoding) and not (isinstance(encoding, Llama3) and not encoding.resonance)


def explicit_temperature(encoding: NtkByParts) -> float | None:
    """The factor on cos and sin where it is not the 0.1 ln s + 1 that everybody computes."""
    _, scaling = encoding.inv_freq(4)  # the factor is the same for every width
    usual = yarn_temperature(encoding.factor)
    return None if abs(scaling - usual) < 1e-6 else scaling


def older_values(raw: dict[str, Any]) -> dict[str, Any]:
    """What the converter reads with a meaning that it does not have in Transformers.

    Falcon goes by `multi_query`, and leaves the number of key heads where it was.
    """
    one = raw.get("model_type") == "falcon" and raw.get("multi_query") and not raw.get("new_decoder_architecture")
    return {"num_kv_heads": 1} if one else {}
