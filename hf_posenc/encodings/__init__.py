"""Position encodings as pure maths: torch alone, no model. See `hf_posenc.registry` for the list."""

from .absolute import Learned, Nope, Sinusoidal
from .base import ADD_ONS, Encoding, Geometry
from .bias import Bias, Fire, Kerple, Sandwich, ScoreBias, T5Bias
from .distance import Distance, LeakyRerope, Rerope, SelfExtend, View
from .dual_chunk import DualChunk
from .log_scaled import LogScaled
from .rotary import Linear, Llama3, Ntk, NtkByParts, NtkMixed, PRope, Rope, Rotation, ScaledRotation, Yarn
from .score import Alibi
from .segmented import DynamicNtk, DynamicYarn, LongRope, Segmented
from .xpos import Xpos

__all__ = [
    "ADD_ONS",
    "Alibi",
    "Bias",
    "Distance",
    "DualChunk",
    "DynamicNtk",
    "DynamicYarn",
    "Encoding",
    "Fire",
    "Geometry",
    "Kerple",
    "LeakyRerope",
    "Learned",
    "Linear",
    "Llama3",
    "LogScaled",
    "LongRope",
    "Nope",
    "Ntk",
    "NtkByParts",
    "NtkMixed",
    "PRope",
    "Rerope",
    "Rope",
    "Rotation",
    "Sandwich",
    "ScaledRotation",
    "ScoreBias",
    "Segmented",
    "SelfExtend",
    "Sinusoidal",
    "T5Bias",
    "View",
    "Xpos",
    "Yarn",
]
