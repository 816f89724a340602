"""Position encodings as pure maths: torch alone, no model. See `hf_posenc.registry` for the list."""

from .absolute import Learned, Nope, Sinusoidal
from .base import ADD_ONS, Encoding, Geometry
from .distance import Distance, LeakyRerope, Rerope, SelfExtend
from .dual_chunk import DualChunk
from .log_scaled import LogScaled
from .rotary import Linear, Llama3, Ntk, NtkByParts, NtkMixed, PRope, Rope, Rotation, ScaledRotation, Yarn
from .score import Alibi
from .segmented import DynamicNtk, DynamicYarn, LongRope, Segmented
from .xpos import Xpos

__all__ = [
    "ADD_ONS",
    "Alibi",
    "Distance",
    "DualChunk",
    "DynamicNtk",
    "DynamicYarn",
    "Encoding",
    "Geometry",
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
    "ScaledRotation",
    "Segmented",
    "SelfExtend",
    "Sinusoidal",
    "Xpos",
    "Yarn",
]
