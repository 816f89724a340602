"""StableLM: its layers hand their attention `position_ids`, and no other keyword that the backbone was given."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.encodings import Encoding
from hf_posenc.ledger import Ledger

from .rotary_host import RotaryHostPatch

__all__ = ["StableLmPatch"]


def put_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pre-hook of a layer: the `Call` goes where the positions are, which travel on."""
    return args, {**kwargs, "position_ids": kwargs["posenc"]}


def take_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pre-hook of its attention: both in their own places again."""
    call = kwargs["position_ids"]
    return args, {**kwargs, "position_ids": call.query_positions, "posenc": call}


class StableLmPatch(RotaryHostPatch):
    """A rotary host whose attention is told of the call by its layer's hook."""

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        super().apply(backbone, encoding, ledger)
        if encoding.inside_attention:
            for layer in backbone.layers:
                ledger.add_pre_hook(layer, put_call)
                ledger.add_pre_hook(layer.self_attn, take_call)
