"""Position encodings as pure maths: torch alone, no model. See `hf_posenc.registry` for the list."""

from .absolute import Learned, Nope, Sinusoidal
from .base import Encoding, Geometry
from .rotary import Linear, Llama3, Ntk, NtkByParts, Rope, Rotation, ScaledRotation, Yarn
from .score import Alibi
from .segmented import DynamicNtk, DynamicYarn, LongRope, Segmented

__all__ = [
    "Alibi",
    "DynamicNtk",
    "DynamicYarn",
    "Encoding",
    "Geometry",
    "Learned",
    "Linear",
    "Llama3",
    "LongRope",
    "Nope",
    "Ntk",
    "NtkByParts",
    "Rope",
    "Rotation",
    "ScaledRotation",
    "Segmented",
    "Sinusoidal",
    "Yarn",
]
