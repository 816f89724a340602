"""Three tiny checkpoints of the project's own, the text they were trained on, and the script that trained them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from hf_posenc.errors import unknown

ModelName = Literal["llama", "gpt2", "bloom"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)


def model_path(name: ModelName) -> Path:
    """The folder of a checkpoint that ships with the package, as `from_pretrained` takes it.

    Raises:
        UnknownNameError: there is no such checkpoint.
    """
    if name not in MODEL_NAMES:
        raise unknown("demo model", name, MODEL_NAMES)
    return Path(__file__).parent / "models" / name
