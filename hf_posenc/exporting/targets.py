"""Who can read an exported model: one row of verdicts a model, with the reason where a target refuses.

What vLLM holds was read in its sources (its rotary layers and its check of the length); llama.cpp's rows stand in
`llamacpp`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_posenc import marking
from hf_posenc.encodings import (
    Distance,
    DynamicNtk,
    DynamicYarn,
    Encoding,
    Learned,
    LogScaled,
    LongRope,
    Rotation,
    Segmented,
)
from hf_posenc.heads import CAUSAL, auto_classes, loader_of
from hf_posenc.patches import Patch, RotaryHostPatch
from hf_posenc.patching import find_backbone, get_encoding
from hf_posenc.registry import ENCODINGS

from .llamacpp import HOSTS, completed, in_llamacpp

Target = Literal["transformers", "vllm", "gguf"]
TARGETS: tuple[Target, ...] = get_args(Target)
How = Literal["config", "code", "approximation", "refused"]

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_COUNT_PADDING = ("gpt2", "openai-gpt", "bert")
COUNTS_PADDING = (
    "Alone, it counts padding as the host does: a plain call with padding on the left needs position_ids, counted "
    "along the mask (generate gives them, and hf_posenc counts so)."
)
COMPLETE = "python -m hf_posenc.exporting.gguf_file"


@dataclass(frozen=True)
class Verdict:
    """How a target holds a model: by its config alone, by code of its own, nearly, or not at all, and in words."""

    target: Target
    how: How
    text: str

    @property
    def refused(self) -> bool:
        return self.how == "refused"


@dataclass(frozen=True)
class Subject:
    """What the verdicts are about: an encoding (None: as the model was trained) in one host, under one head.

    `loader`: the class of Transformers that loads it, an auto class where one finds the model's own.
    """

    encoding: Encoding | None
    patch: Patch
    config: Any
    native: bool
    remote_code: bool
    loader: str

    @property
    def counts_padding(self) -> bool:
        """Whether the stock host numbers padding as it does tokens, unless it is given positions."""
        return self.config.model_type in _COUNT_PADDING

    @property
    def flat_rope(self) -> bool:
        """Whether the host has one set of rope parameters."""
        return isinstance(self.patch, RotaryHostPatch) and self.patch.layout.layer_type is None


def subject(model: Any) -> Subject:
    """The encoding and the host of a loaded model; raises `UnsupportedError` for an architecture without a patch."""
    patch, backbone = find_backbone(model)
    encoding = get_encoding(model)
    record = getattr(backbone.config, "hf_posenc", None)
    native = encoding is None or bool(isinstance(record, dict) and record["native"])
    remote = type(model).__module__.startswith("transformers_modules")
    return Subject(encoding, patch, backbone.config, native, remote, loader_name(model, remote))


def loader_name(model: Any, remote_code: bool) -> str:
    """The class of Transformers to load a model with."""
    host = type(marking.plain(copy.copy(model.config)))
    if remote_code:
        return str(loader_of(model.config, trust_remote_code=True).__name__)
    return next(iter(auto_classes(host, type(model))), type(model).__name__)


def row(about: Subject) -> tuple[Verdict, ...]:
    """The verdicts of all targets."""
    return for_transformers(about), for_vllm(about), for_gguf(about)


def for_transformers(about: Subject) -> Verdict:
    """Plain Transformers, with no hf_posenc installed."""
    encoding = about.encoding
    if encoding is None:
        return Verdict("transformers", "config", "as it is: no encoding has been put in")
    if about.native:
        inexact = isinstance(encoding, Segmented)
        said = "; its own cache is inexact: keys keep the frequencies of an earlier length" if inexact else ""
        if isinstance(encoding, Learned) and about.counts_padding:
            said = "; padding on the left is counted there, unless position_ids are given"
        return Verdict("transformers", "config", f"its own type, in config.json alone{said}")
    if encoding.name not in ENCODINGS:
        return Verdict("transformers", "refused", f"{encoding.name} has no row in the registry: no file can name it")
    if not encoding.is_ours:
        where = type(encoding).__module__
        said = f"{encoding.name} comes from outside of hf_posenc, from {where}, whose code would not be in the folder"
        return Verdict("transformers", "refused", said)
    if about.remote_code:
        return Verdict(
            "transformers", "refused", "the model is code of its own already, and one cannot stand on another"
        )
    return Verdict("transformers", "code", "a modelling file in the folder; loading needs trust_remote_code=True")


def for_vllm(about: Subject) -> Verdict:
    """vLLM, by the keys of config.json."""
    encoding = about.encoding
    if encoding is None or (about.native and not isinstance(encoding, Segmented)):
        return Verdict("vllm", "config", "config.json alone")
    reason = not_in_a_server(about)
    if reason is not None:
        return Verdict("vllm", "refused", reason)
    if isinstance(encoding, DynamicNtk):
        if encoding.factor == 1:
            return Verdict(
                "vllm", "refused", "vLLM scales by the factor alone, and this one is 1; give dynamic_ntk one"
            )
        text = "static: frequencies of the full length for every token, short inputs too"
        return Verdict("vllm", "approximation", text)
    text = "one list for all tokens: the long one where --max-model-len is above the trained length"
    return Verdict("vllm", "approximation", text)


def for_gguf(about: Subject) -> Verdict:
    """llama.cpp, by its own converter, which reads this folder."""
    encoding, host = about.encoding, about.config.model_type
    reason = None if about.loader == CAUSAL else f"it runs language models, and this one is loaded by {about.loader}"
    reason = reason or not_in_a_server(about)
    if reason is None and isinstance(encoding, DynamicNtk):
        reason = "llama.cpp has no scaling that follows the length; use 'ntk' or 'yarn'"
    reason = reason or in_llamacpp(encoding, about.config, stated_length(about.config))
    if reason is not None:
        return Verdict("gguf", "refused", reason)
    if not isinstance(encoding, Rotation):
        run = "" if host in HOSTS else f"; no run of llama.cpp has shown that it computes {host} as it is here"
        return Verdict("gguf", "config", f"by llama.cpp's converter, as its architecture comes{run}")
    dropped = f"; the converter drops a part of it, which `{COMPLETE}` puts back"
    said = dropped if completed(encoding, host) else ""
    if isinstance(encoding, LongRope):
        text = "one list for all tokens: the long one where the context is opened above the trained length"
        return Verdict("gguf", "approximation", text + said)
    return Verdict("gguf", "config", f"by llama.cpp's converter{said}")


def stated_length(config: Any) -> int | None:
    """The length in tokens that a config states, by whichever name."""
    return next((int(n) for n in (getattr(config, name, None) for name in _LENGTHS) if n), None)


def not_in_a_server(about: Subject) -> str | None:
    """Why a server that reads config.json alone cannot have this encoding, or None where it can."""
    encoding, host = about.encoding, about.config.model_type
    if encoding is None or (about.native and not isinstance(encoding, Segmented)):
        return None
    if isinstance(encoding, LogScaled) and encoding.logn:
        return "it scales no query by its position (logn)"
    if isinstance(encoding, Segmented) and encoding.resonance:
        return "its types that follow the length have no whole wavelengths (resonance)"
    if encoding.seam == "score":
        return f"no slopes reach the attention that it has for {host}"
    if isinstance(encoding, Learned) or encoding.seam == "embedding":
        return f"it adds nothing to the embeddings of {host}"
    if encoding.seam == "none":
        return f"the positions of {host} cannot be switched off there"
    if not isinstance(about.patch, RotaryHostPatch):
        return f"it has no rotation for {host}"
    if isinstance(encoding, Distance):
        return f"its rotations know one distance a pair, and {encoding.name} shows another; use 'yarn' or 'ntk' there"
    if isinstance(encoding, DynamicYarn):
        return "it has no YaRN that follows the length; use the static 'yarn' with the factor that you need"
    if not about.flat_rope:
        return f"{host} has parameters for each layer type, and no type that follows the length for one of them"
    return None
