"""Who can read an exported model: one row of verdicts a model, with the reason where a target refuses.

Read in the sources of vLLM (its rotary layers and its check of the length) and of llama.cpp (its converter, its
Llama graph and its YaRN).
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
    Llama3,
    LogScaled,
    LongRope,
    NtkByParts,
    Rotation,
    Segmented,
)
from hf_posenc.encodings.frequencies import yarn_temperature
from hf_posenc.heads import auto_classes, loader_of
from hf_posenc.patches import Patch, RotaryHostPatch
from hf_posenc.patches.native_rope import typed
from hf_posenc.patching import find_backbone, get_encoding
from hf_posenc.registry import ENCODINGS

Target = Literal["transformers", "vllm", "gguf"]
TARGETS: tuple[Target, ...] = get_args(Target)
How = Literal["config", "code", "approximation", "refused"]

# the hosts that llama.cpp runs by its Llama graph, which reads factors a pair of channels out of the file
_LLAMA_GRAPH = ("llama", "mistral", "mixtral")
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
        return Verdict("transformers", "config", f"its own type, in config.json alone{said}")
    if encoding.name not in ENCODINGS:
        return Verdict("transformers", "refused", f"{encoding.name} has no row in the registry: no file can name it")
    if not type(encoding).__module__.startswith("hf_posenc."):
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
    encoding = about.encoding
    if encoding is None or (about.native and not isinstance(encoding, Rotation)):
        return Verdict("gguf", "config", "by llama.cpp's converter, as its architecture comes")
    reason = not_in_a_server(about)
    if reason is None and isinstance(encoding, DynamicNtk):
        reason = "llama.cpp has no scaling that follows the length; use 'ntk' or 'yarn'"
    if reason is not None:
        return Verdict("gguf", "refused", reason)
    host = about.config.model_type
    if needs_factors(encoding) and host not in _LLAMA_GRAPH:
        return Verdict("gguf", "refused", f"llama.cpp reads no factors a pair of channels for {host}")
    dropped = f"; the converter drops a part of it, which `{COMPLETE}` puts back"
    said = dropped if loses_a_part(encoding) else ""
    if isinstance(encoding, LongRope):
        text = "one list for all tokens: the long one where the context is opened above the trained length"
        return Verdict("gguf", "approximation", text + said)
    return Verdict("gguf", "config", f"by llama.cpp's converter{said}")


def needs_factors(encoding: Encoding | None) -> bool:
    """Whether llama.cpp can have this encoding only as factors a pair of channels: its YaRN rounds the ramp's ends."""
    if not isinstance(encoding, Rotation):
        return False
    if isinstance(encoding, NtkByParts) and not encoding.truncate:
        return True
    own = not type(encoding).__module__.startswith("hf_posenc.") or typed(encoding, dim=4) is None  # any width will do
    return own or isinstance(encoding, (Llama3, LongRope))


def loses_a_part(encoding: Encoding | None) -> bool:
    """Whether llama.cpp's converter drops a part of this encoding, so that the file must be completed after it.

    It makes factors for `llama3` alone, and its YaRN has one temperature, 0.1 ln s + 1.
    """
    if isinstance(encoding, NtkByParts) and explicit_temperature(encoding) is not None:
        return True
    return needs_factors(encoding) and not (isinstance(encoding, Llama3) and not encoding.resonance)


def explicit_temperature(encoding: NtkByParts) -> float | None:
    """The factor on cos and sin where it is not the 0.1 ln s + 1 that everybody computes."""
    _, scaling = encoding.inv_freq(4)  # the factor is the same for every width
    usual = yarn_temperature(encoding.factor)
    return None if abs(scaling - usual) < 1e-6 else scaling


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
