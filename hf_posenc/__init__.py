"""Replace the position encoding of a loaded Hugging Face model: `patch_model(model, "yarn", factor=4)`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .auto import register_on_import

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .checkpoint import from_pretrained, save_pretrained
    from .encodings import Encoding
    from .errors import PosencError
    from .exporting.api import export
    from .finetuning.run import finetune
    from .patches import list_architectures, register_patch
    from .patching import get_encoding, patch_model, patched, support, unpatch_model
    from .registry import list_encodings, register_encoding
    from .verification import Verification, verify

# name → module; imported on first use, so that `import hf_posenc` costs nothing
_PUBLIC = {
    "Encoding": ".encodings",
    "PosencError": ".errors",
    "Verification": ".verification",
    "export": ".exporting.api",
    "finetune": ".finetuning.run",
    "from_pretrained": ".checkpoint",
    "get_encoding": ".patching",
    "list_architectures": ".patches",
    "list_encodings": ".registry",
    "patch_model": ".patching",
    "patched": ".patching",
    "register_encoding": ".registry",
    "register_patch": ".patches",
    "save_pretrained": ".checkpoint",
    "support": ".patching",
    "unpatch_model": ".patching",
    "verify": ".verification",
}

__all__ = [
    "Encoding",
    "PosencError",
    "Verification",
    "export",
    "finetune",
    "from_pretrained",
    "get_encoding",
    "list_architectures",
    "list_encodings",
    "patch_model",
    "patched",
    "register_encoding",
    "register_patch",
    "save_pretrained",
    "support",
    "unpatch_model",
    "verify",
]


register_on_import()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
