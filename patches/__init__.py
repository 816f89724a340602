"""One file an architecture: where its positions enter. Installed, and always to be imported, as `hf_posenc.patches`."""

from __future__ import annotations

import importlib
from importlib import metadata, util
from typing import Any

from hf_posenc.errors import OptionError, OptionTypeError, UnsupportedError

from .base import Patch
from .decoders import DECODERS
from .rotary_host import RotaryHostPatch, RotaryLayout

__all__ = [
    "PATCHES",
    "Patch",
    "RotaryHostPatch",
    "RotaryLayout",
    "find_patch",
    "has_patch",
    "list_architectures",
    "register_patch",
]

ENTRY_POINTS = "hf_posenc.patches"  # the group in which an installed package names its own: model_type = module:Patch

# model_type → its patch, or where that is: imported when asked for, as it pulls in its host's modelling file
PATCHES: dict[str, Patch | tuple[str, str]] = {
    **DECODERS,
    "bert": ("hf_posenc.patches.bert", "BertPatch"),
    "bloom": ("hf_posenc.patches.bloom", "BloomPatch"),
    "falcon": ("hf_posenc.patches.falcon", "FalconPatch"),
    "gpt2": ("hf_posenc.patches.gpt2", "GPT2Patch"),
    "gptj": ("hf_posenc.patches.gptj", "GPTJPatch"),
    "mpt": ("hf_posenc.patches.mpt", "MptPatch"),
    "openai-gpt": ("hf_posenc.patches.openai_gpt", "OpenAIGPTPatch"),
    "opt": ("hf_posenc.patches.opt", "OPTPatch"),
    "roberta": ("hf_posenc.patches.roberta", "RobertaPatch"),
}

# the modelling files that are not named like their model_type
_FILES = {"gemma3_text": "gemma3", "openai-gpt": "openai"}

_registered: dict[str, Patch] = {}


def register_patch(model_type: str, patch: Patch | type[Patch]) -> None:
    """Make `model_type` an architecture that can be patched, from outside of this package.

    `patch`: a `Patch`, or a subclass of it that takes no arguments. An installed package can do the same with an entry
    point of the group `hf_posenc.patches`, named like the model type. Raises `OptionError` for a model type that has a
    patch already, `OptionTypeError` for what is no patch.
    """
    if not isinstance(model_type, str) or not model_type:
        raise OptionTypeError(f"a model_type is a string such as 'llama', got {model_type!r}")
    found = as_patch(patch)
    if found is None:
        raise OptionTypeError(f"a patch is a Patch or a subclass of it without arguments, got {patch!r}")
    if has_patch(model_type):
        there = type(find_patch(model_type)).__name__
        raise OptionError(f"{model_type!r} has a patch already, {there}; register yours for a model_type of its own")
    _registered[model_type] = found


def as_patch(found: Any) -> Patch | None:
    """A `Patch` from one, or from a subclass of it that needs no arguments; None for anything else."""
    if isinstance(found, type) and issubclass(found, Patch):
        try:
            found = found()
        except TypeError:
            return None
    return found if isinstance(found, Patch) else None


def entry_points() -> dict[str, metadata.EntryPoint]:
    """The patches that installed packages name, for architectures that have none here."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in PATCHES}


def list_architectures() -> list[str]:
    """The `model_type`s that can be patched: those of this package that the installed Transformers has, and others'."""
    own = [name for name in PATCHES if is_installed(name)]
    return sorted({*own, *_registered, *entry_points()})


def is_installed(model_type: str) -> bool:
    """Whether this release of the host library has the architecture."""
    file = _FILES.get(model_type, model_type.replace("-", "_"))
    return util.find_spec(f"transformers.models.{file}") is not None


def has_patch(model_type: Any) -> bool:
    """Whether a `model_type` can be patched."""
    if not isinstance(model_type, str):
        return False
    if model_type in PATCHES:
        return is_installed(model_type)
    return model_type in _registered or model_type in entry_points()


def find_patch(model_type: Any) -> Patch:
    """The patch of a `model_type`; raises `UnsupportedError`, with the list, where there is none."""
    if not has_patch(model_type):
        raise UnsupportedError(
            f"no patch for the architecture {model_type!r}; supported: {', '.join(list_architectures())}"
        )
    if model_type in _registered:
        return _registered[model_type]
    found = PATCHES.get(model_type)
    if isinstance(found, Patch):
        return found
    if found is not None:
        module, name = found
        return getattr(importlib.import_module(module), name)()
    return load_entry_point(entry_points()[model_type])


def load_entry_point(point: metadata.EntryPoint) -> Patch:
    """The patch that an installed package names; raises `UnsupportedError` where that cannot be had."""
    try:
        patch = as_patch(point.load())
    except Exception as error:  # whatever a foreign module raises
        raise UnsupportedError(f"the patch for {point.name!r} ({point.value}) cannot be loaded: {error}") from error
    if patch is None:
        raise UnsupportedError(f"the entry point {point.name!r} of {ENTRY_POINTS} names no Patch: {point.value}")
    _registered[point.name] = patch
    return patch
