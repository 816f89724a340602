"""One file an architecture: where its positions enter. Installed, and always to be imported, as `hf_posenc.patches`."""

from __future__ import annotations

import importlib
from typing import Any

from hf_posenc.errors import UnsupportedError

from .base import Patch

__all__ = ["PATCHES", "Patch", "find_patch", "list_architectures"]

# model_type → where its patch is; imported when asked for, since each pulls in its host's modelling file
PATCHES: dict[str, tuple[str, str]] = {
    "bloom": ("hf_posenc.patches.bloom", "BloomPatch"),
    "gpt2": ("hf_posenc.patches.gpt2", "GPT2Patch"),
    "llama": ("hf_posenc.patches.llama", "LlamaPatch"),
}


def list_architectures() -> list[str]:
    """The `model_type`s that can be patched."""
    return sorted(PATCHES)


def find_patch(model_type: Any) -> Patch:
    """The patch of a `model_type`; raises `UnsupportedError`, with the list, where there is none."""
    if model_type not in PATCHES:
        raise UnsupportedError(
            f"no patch for the architecture {model_type!r}; supported: {', '.join(list_architectures())}"
        )
    module, name = PATCHES[model_type]
    return getattr(importlib.import_module(module), name)()
