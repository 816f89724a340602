"""A host's own rotary module as a subclass of itself: with frequencies that no cast can round, or silent.

One pair of classes serves every host: they are made from the class that is found in the model, and a copy or a pickle
names that class and not the made one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.encodings import Distance
from hf_posenc.modules import ExactBuffers
from hf_posenc.rotation import cos_sin


class ExactRotary(ExactBuffers):
    """Mixin: the host's own module, its numbers always those of its config."""

    host: ClassVar[type[nn.Module]]
    make: ClassVar[Callable[..., type[nn.Module]]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return blank, (type(self).make, self.host), self.__dict__


class SilentRotary(ExactRotary):
    """Mixin: the host's own module that turns nothing, for every layer type or for the one named by `silent_type`."""

    silent_type: str | None = None

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: Any, **kwargs: Any) -> Any:
        found = super().forward(x, position_ids, *layer_type, **kwargs)
        given = layer_type[0] if layer_type else kwargs.get("layer_type")
        if self.silent_type is not None and given != self.silent_type:
            return found
        if isinstance(found, Tensor):
            return torch.ones_like(found)
        return torch.ones_like(found[0]), torch.zeros_like(found[1])


class StoredRotary(SilentRotary):
    """Mixin: the host's own module that turns by what the keys of a `Distance` wait turned by.

    `pairs` of channels turn; `repeated`: each column of the host's tables stands twice in a row.
    """

    encoding: Distance
    pairs: int
    repeated: bool

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: Any, **kwargs: Any) -> Any:
        found = super().forward(x, position_ids, *layer_type, **kwargs)
        given = layer_type[0] if layer_type else kwargs.get("layer_type")
        if self.silent_type is not None and given != self.silent_type:
            return found
        tables = cos_sin(*self.encoding.inv_freq(2 * self.pairs), self.encoding.stored(position_ids))
        cos, sin = (table[..., : self.pairs] for table in tables)
        if isinstance(found, Tensor):
            return torch.complex(cos, sin).to(found.dtype)
        if found[0].shape[-1] != self.pairs:
            cos, sin = (x.repeat_interleave(2, -1) for x in (cos, sin)) if self.repeated else tables
        return cos.to(found[0].dtype), sin.to(found[1].dtype)


@cache
def exact(host: type[nn.Module]) -> type[nn.Module]:
    """The class `host` with exact frequencies."""
    return type(f"Exact{host.__name__}", (ExactRotary, host), {"host": host, "make": staticmethod(exact)})


@cache
def silent(host: type[nn.Module]) -> type[nn.Module]:
    """The class `host` that turns nothing."""
    return type(f"Silent{host.__name__}", (SilentRotary, host), {"host": host, "make": staticmethod(silent)})


@cache
def stored(host: type[nn.Module]) -> type[nn.Module]:
    """The class `host` that turns by what keys wait turned by."""
    return type(f"Stored{host.__name__}", (StoredRotary, host), {"host": host, "make": staticmethod(stored)})


def blank(make: Callable[..., type[nn.Module]], host: type[nn.Module]) -> nn.Module:
    """An empty module of a made class, to be filled with a state."""
    cls = make(host)
    return cls.__new__(cls)


def per_pair(found: Any, pairs: int, repeated: bool) -> tuple[Tensor, Tensor]:
    """(cos, sin) with one column a pair, of what a host's rotary module gives.

    That may be complex; have one column a pair; or two: the second half repeats the first, or, `repeated`, each column
    stands twice in a row.
    """
    if isinstance(found, Tensor):
        return found.real, found.imag
    cos, sin = found
    if cos.shape[-1] == pairs:
        return cos, sin
    keep = slice(None, None, 2) if repeated else slice(0, pairs)
    return cos[..., keep], sin[..., keep]
