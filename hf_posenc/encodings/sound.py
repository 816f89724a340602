"""Whether an encoding of somebody else's gives what its base class promises: asked once, before a host is touched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Encoding, Geometry
from .bias import Bias, ScoreBias
from .rotary import Rotation
from .score import Alibi

PLACES = torch.tensor([[0, 1, 5, 1000]])


def check_sound(encoding: Encoding, geometry: Geometry) -> None:
    """Raise `OptionError` where a resolved encoding gives numbers of a wrong shape, or none.

    Asked of those from outside of this package; of our own the tests know it.
    """
    if encoding.is_ours:
        return
    who, half, heads = f"{type(encoding).__name__} ({encoding.name})", geometry.rotary_dim // 2, geometry.num_heads
    if isinstance(encoding, Rotation):
        inv_freq, factor = encoding.inv_freq(geometry.rotary_dim)
        check(inv_freq, (half,), f"{who}: formula({geometry.rotary_dim}), a frequency for each pair of channels,")
        if not math.isfinite(factor):
            raise OptionError(f"{who}: the factor on cos and sin is {factor}, which is no finite number")
    elif isinstance(encoding, Bias):
        if type(encoding).module is Bias.module:
            raise OptionError(f"{who} has no module(num_heads, both_ways), which gives the numbers of a Bias")
        module = encoding.module(heads)
        if not isinstance(module, ScoreBias):
            raise OptionError(f"{who}: module({heads}) gives a {type(module).__name__}, and not a ScoreBias")
        shape = (1, heads, PLACES.shape[1], PLACES.shape[1])
        with torch.no_grad():
            check(module(PLACES, PLACES), shape, f"{who}: what its module gives for {PLACES.shape[1]} tokens")
    elif isinstance(encoding, Alibi):
        check(encoding.slopes(heads), (heads,), f"{who}: slopes({heads})")


def check(found: object, shape: tuple[int, ...], what: str) -> None:
    """Raise `OptionError` unless this is a tensor of that shape, and all of it finite."""
    if not isinstance(found, Tensor) or found.shape != shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OptionError(f"{what} is {got}, and must be {shape}")
    if not bool(found.isfinite().all()):
        raise OptionError(f"{what} holds numbers that are not finite")
