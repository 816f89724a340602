"""Position encodings as pure maths: torch alone, no model. See `hf_posenc.registry` for the list."""

from .absolute import Learned, Nope, Sinusoidal
from .base import Encoding, Geometry
from .bias import Bias, Fire, Kerple, Sandwich, ScoreBias, T5Bias
from .rotary import Linear, Llama3, Ntk, NtkByParts, Rope, Rotation, ScaledRotation, Yarn
from .score import Alibi
from .segmented import DynamicNtk, DynamicYarn, LongRope, Segmented

__all__ = [
    "Alibi",
    "Bias",
    "DynamicNtk",
    "DynamicYarn",
    "Encoding",
    "Fire",
    "Geometry",
    "Kerple",
    "Learned",
    "Linear",
    "Llama3",
    "LongRope",
    "Nope",
    "Ntk",
    "NtkByParts",
    "Rope",
    "Rotation",
    "Sandwich",
    "ScaledRotation",
    "ScoreBias",
    "Segmented",
    "Sinusoidal",
    "T5Bias",
    "Yarn",
]
