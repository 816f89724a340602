"""What hosts whose layers know of no `Call` hand to them, and how: each call described, and its mask made, once.

A layer is handed both in the place of an argument that its backbone passes on untouched, where gradient checkpointing
keeps it with the call; or, where there is none, by a value that lasts as long as the call.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from hf_posenc.encodings import Encoding, Geometry, Rotation
from hf_posenc.errors import StateError
from hf_posenc.ledger import Ledger
from hf_posenc.offload import execution_device
from hf_posenc.positions import Call, DescribeCall, RememberPositions, find_cache, find_tokens, named_arguments
from hf_posenc.rotation import HALVES, Pairs

from .base import own_bias

OWN = "posenc_"
WITHOUT_HOOKS = "a patched model was called without its own hooks; call the whole model, or unpatch_model() first"


class Handed(NamedTuple):
    """What the layers are handed: where the tokens stand, who sees whom (as the attention function takes it), and
    whether the caller asks for the weights."""

    call: Call
    mask: Any
    weights: bool


class Handover:
    """A value handed down within one call of a model, past code that has no argument for it.

    A context variable, so that threads do not mix; while the compiler traces, which knows none, a plain attribute.
    """

    def __init__(self, name: str) -> None:
        self._value: ContextVar[Any] = ContextVar(name, default=None)
        self._traced: Any = None
        self._by_trace = False  # of a graph that breaks in between, one side is traced and the other is not

    def put(self, value: Any) -> None:
        self._traced, self._by_trace = value, torch.compiler.is_compiling()
        if not self._by_trace:
            self._value.set(value)

    def take(self) -> Any:
        return self._traced if torch.compiler.is_compiling() or self._by_trace else self._value.get()


_handed = Handover("handed")
_position_ids = Handover("position_ids")


def hand_over(*args: Any, **kwargs: Any) -> Handed:
    """Stands in for a backbone's function that builds its own bias: hands its layers the call and its mask instead."""
    handed = _handed.take()
    if handed is None:
        raise StateError(WITHOUT_HOOKS)
    return handed


def causal_mask_of(module: Any, config: Any, kwargs: dict[str, Any], positions: Tensor | None) -> Any:
    """The mask that the host library makes for a call of a backbone, and for the attention that `config` names.

    With `position_ids` and neither mask nor cache it keeps packed sequences apart, as on other hosts.
    """
    tokens, n = find_tokens(kwargs)
    known = inspect.signature(create_causal_mask).parameters
    cache = {"cache" if "cache" in known else "past_key_values": find_cache(kwargs)}
    words = module.get_input_embeddings()
    embeds = words.weight.new_empty(tokens.shape[0], n, 1, device=execution_device(words))
    mask = kwargs.get("attention_mask")
    return create_causal_mask(config=config, inputs_embeds=embeds, attention_mask=mask, position_ids=positions, **cache)


@dataclass(eq=False)
class HandOver(DescribeCall):
    """The pre-hook of a backbone whose layers are handed their `Call`.

    It gives the backbone a mask of one element, which the host library takes for a prepared one and passes on, so that
    neither a bias nor a mask of the host's own is made. `slot`: the argument of the backbone that reaches the layers
    untouched and may hold what is handed; without one, `hand_over` is asked for it.
    """

    slot: str | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = _position_ids.take()
        _, kwargs = super().__call__(module, (), kwargs)
        call, positions = kwargs.pop("posenc"), kwargs.pop("position_ids")
        weights = kwargs.get("output_attentions")
        weights = getattr(module.config, "output_attentions", False) if weights is None else weights
        handed = Handed(call, self.make_mask(module, kwargs, positions), bool(weights))
        if self.slot is None:
            _handed.put(handed)
        return (), self.filled(kwargs, handed)

    def filled(self, kwargs: dict[str, Any], handed: Handed) -> dict[str, Any]:
        """The arguments that the backbone gets."""
        prepared = handed.call.key_positions.new_ones(1, 1, 1, 1, dtype=torch.bool)
        return {**kwargs, "attention_mask": prepared, **({} if self.slot is None else {self.slot: handed})}

    def make_mask(self, module: Any, kwargs: dict[str, Any], positions: Tensor | None) -> Any:
        """The mask that the host library makes for our attention: none where the kernel's causal flag is enough."""
        return causal_mask_of(module, module.config, kwargs, positions)


@dataclass(eq=False)
class AfterHandOver(RememberPositions):
    """The hook after such a backbone, whose keywords hold no `Call`: remembers, and lets go of it."""

    slot: str | None = None

    def find_call(self, kwargs: dict[str, Any]) -> Any:
        handed = _handed.take() if self.slot is None else kwargs.get(self.slot)
        if self.slot is None:
            _handed.put(None)
        return handed.call if isinstance(handed, Handed) else None


@dataclass(eq=False)
class HandedPositions:
    """Where a layer finds its positions, in the argument `name`; for the hook that adds vectors."""

    name: str

    def __call__(self, kwargs: dict[str, Any]) -> Tensor:
        return kwargs[self.name].call.query_positions


class NoRotary(nn.Module):
    """Stands in for a host's rotary module, whose tables nobody asks for any more."""

    def forward(self, hidden_states: Tensor, position_ids: Any) -> None:
        return None


def catch_position_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pre-hook of a model around the backbone, which would drop `position_ids` without a word."""
    if kwargs.get("position_ids") is not None:
        _position_ids.put(kwargs["position_ids"])


def release_position_ids(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Its counterpart after the call, also after one that raised."""
    _position_ids.put(None)


def catch_dropped_positions(model: Any, backbone: Any, ledger: Ledger) -> None:
    """Around a backbone that has no argument `position_ids`: every module that holds it passes them by."""
    for module in model.modules():
        if module is not backbone and any(inner is backbone for inner in module.modules()):
            ledger.add_pre_hook(module, catch_position_ids)
            ledger.add_hook(module, release_position_ids)


def hand_over_calls(
    backbone: Any,
    encoding: Encoding,
    geometry: Geometry,
    ledger: Ledger,
    slot: str | None = None,
    pairs: Pairs = HALVES,
    hook: type[HandOver] = HandOver,
) -> None:
    """Choose our attention, and let every call of the backbone describe itself to its layers; `slot` as in `HandOver`.

    `pairs` says where in a head a rotation acts.
    """
    config = backbone.config
    base = (config._attn_implementation or "eager").removeprefix(OWN)
    if base != "flex_attention" and not (base == "eager" and type(backbone)._supports_sdpa):
        base = "sdpa"  # a host that knows of eager alone has not been told to use it
    ledger.set_attribute(config, "_attn_implementation_internal", OWN + base)
    dim = geometry.rotary_dim if isinstance(encoding, Rotation) else 0
    own_bias(backbone, encoding, geometry, ledger)
    ledger.add_pre_hook(
        backbone, hook(encoding, dim, geometry.num_heads, True, pairs=pairs, slot=slot, stores_turned=True)
    )
    ledger.add_hook(backbone, AfterHandOver(slot))
