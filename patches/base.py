"""What every patch is: where the three seams of one architecture are. Knows the host library, holds no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from hf_posenc.attention import own_name
from hf_posenc.encodings import Bias, Distance, Encoding, Geometry, Learned, Rotation, Segmented, Sinusoidal
from hf_posenc.errors import EffectError, UnsupportedError
from hf_posenc.flex_bias import no_bias, release_takes_bias
from hf_posenc.ledger import Ledger
from hf_posenc.modules import AddVectors, PositionTable, SinusoidVectors, TableVectors
from hf_posenc.offload import execution_device, held
from hf_posenc.positions import DescribeCall, RememberPositions
from hf_posenc.rotation import HALVES, Pairs


class Patch:
    """One architecture. Every file in this folder has one subclass, with these methods in this order.

    `native`: the encoding its hosts are trained with; `has_table`: whether that is a table of their own; `has_cache`:
    whether they can be called in pieces.
    """

    native: ClassVar[str]
    has_table: ClassVar[bool] = False
    has_cache: ClassVar[bool] = True

    def backbone_type(self) -> type[nn.Module]:
        """The class of the module that holds embeddings and layers (imported only when asked for)."""
        raise NotImplementedError

    def geometry(self, backbone: Any) -> Geometry:
        """The numbers of this host that encodings may ask for."""
        raise NotImplementedError

    def own_reach(self, config: Any) -> int | None:
        """How many positions a host with this config answers for without a patch, or None where it has no end."""
        return None

    def cached(self, config: Any) -> bool:
        """`has_cache`, for a host with this config."""
        return self.has_cache

    def first_position(self, config: Any) -> int:
        """What this host calls the position of a text's first token, in `position_ids`."""
        return 0

    def table(self, backbone: Any) -> Any:
        """The position table of this backbone, its own or a fresh one, or None."""
        return getattr(backbone, "posenc", None)

    def rows_before(self, config: Any) -> int:
        """How many rows of its own table come before that of the first position."""
        return self.first_position(config)

    def refused(self, name: str) -> str | None:
        """Why the encoding of this name cannot go into any host of this kind as it comes, or None where it can."""
        return None

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        """Why this encoding cannot go into a host with this config, or None where it can."""
        return None

    def complete(self, encoding: Encoding, backbone: Any) -> Encoding:
        """The encoding with every option filled in that the host can answer."""
        geometry = self.geometry(backbone)
        if isinstance(encoding, Learned) and not self.has_table and encoding.max_position_embeddings is None:
            encoding = encoding.but(max_position_embeddings=geometry.max_position_embeddings)
        return encoding.resolve(geometry)

    def is_native_result(self, encoding: Encoding) -> bool:
        """Whether the host library alone can hold the patched model, so that a plain `from_pretrained` reloads it."""
        raise NotImplementedError

    def holds(self, encoding: Encoding, config: Any) -> bool:
        """`is_native_result`, for a host with this config."""
        return self.is_native_result(encoding)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        """Take the native encoding out and put this one in; every change goes through the ledger."""
        raise NotImplementedError

    def owns(self, backbone: Any, encoding: Encoding) -> bool:
        """Whether this unpatched host has just this encoding anyway."""
        return False

    def tables(self, backbone: Any, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) of the host's own rotary module at `positions`, one column a pair; None where it has none."""
        return None

    def pairs_error(self, backbone: Any, encoding: Encoding, ids: Tensor) -> float | None:
        """How far our rotation of this unpatched host's queries and keys is from its own, as a share of the largest.

        None where an encoding turns nothing that a host with a rotation of its own might pair in another way.
        """
        return None

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        """Raise `EffectError` unless the seams now do what the encoding says (tables and settings, no forward)."""
        raise NotImplementedError

    def forward_hooks(self, model: Any, backbone: Any, ledger: Ledger) -> None:
        """What the outermost model needs, where it is not the backbone itself; nothing for most hosts."""


def turns_early(encoding: Encoding) -> TypeGuard[Rotation]:
    """Whether queries and keys are turned before the cache takes the keys: a rotation with one set of frequencies.

    And so is the host library's own type of a rotation by segments, on hosts that have a rotary module.
    """
    return isinstance(encoding, Rotation) and not encoding.turns_late


def turns_before_cache(encoding: Encoding) -> bool:
    """Whether queries and keys are turned before the cache takes the keys, be it by plain RoPE alone."""
    return turns_early(encoding) or isinstance(encoding, Segmented)


def attention_refusal(encoding: Encoding, config: Any) -> str | None:
    """The refusal of hosts with the attention interface: what acts inside it needs ours over the host's choice."""
    if not encoding.inside_attention or causal_refusal(encoding, config):
        return causal_refusal(encoding, config)
    try:
        own_name(config._attn_implementation)
    except UnsupportedError as error:
        return str(error)
    if isinstance(encoding, Segmented) and config._attn_implementation == "flex_attention":
        return "its segments cannot be cut from FlexAttention's block mask; model.set_attn_implementation('sdpa') first"
    if isinstance(encoding, Bias) and config._attn_implementation == "flex_attention" and not release_takes_bias():
        return no_bias(encoding.name)
    if isinstance(encoding, Distance) and config._attn_implementation == "flex_attention":
        return "its views cannot be cut from FlexAttention's block mask; model.set_attn_implementation('sdpa') first"
    return None


def causal_refusal(encoding: Encoding, config: Any) -> str | None:
    """The refusal of a host made to look both ways: our attention functions count on the causal order."""
    both_ways = {"is_causal": False, "use_bidirectional_attention": True}
    if encoding.inside_attention:
        for key, value in both_ways.items():
            if getattr(config, key, None) is value:
                return f"it is made for causal attention here, and this config says {key}={value}"
    return None


def table_refusal(encoding: Encoding, config: Any) -> str | None:
    """The refusal of hosts with no position table of their own: there is nothing to be made longer."""
    if isinstance(encoding, Learned) and encoding.resize is not None:
        return f"resize={encoding.resize!r} stretches a host's own table, and {config.model_type} has none"
    return None


def whole_refusal(encoding: Encoding, config: Any) -> str | None:
    """The refusal of hosts with no rotary module: `schedule="whole"` means the host library's own type in there."""
    if isinstance(encoding, Segmented) and encoding.schedule == "whole":
        return f"schedule='whole' is a type of the host library's own rotations; {config.model_type} takes 'segments'"
    return None


def describe_calls(
    backbone: Any,
    encoding: Encoding,
    geometry: Geometry,
    ledger: Ledger,
    pairs: Pairs = HALVES,
    layers: tuple[int, ...] | None = None,
    host_turns: bool = False,
    stores_turned: bool = False,
) -> None:
    """Let every call of the backbone carry its positions, and choose our attention where the encoding needs it.

    `pairs` and `layers` say where in a head, and in which layers (None: all), it acts inside the attention function;
    `host_turns` that the host's own rotary module does what is turned before keys are cached; `stores_turned` that
    keys of a `Distance` are turned by then.
    """
    inside = encoding.inside_attention
    own_bias(backbone, encoding, geometry, ledger)
    if inside:
        ledger.set_attribute(
            backbone.config, "_attn_implementation_internal", own_name(backbone.config._attn_implementation)
        )
    dim = geometry.rotary_dim if isinstance(encoding, Rotation) else 0
    how = {"host_turns": host_turns, "stores_turned": stores_turned}
    ledger.add_pre_hook(backbone, DescribeCall(encoding, dim, geometry.num_heads, inside, pairs, layers, **how))
    if inside:
        ledger.add_hook(backbone, RememberPositions())


def own_bias(backbone: Any, encoding: Encoding, geometry: Geometry, ledger: Ledger, both_ways: bool = False) -> None:
    """Give the model the one module of a bias, which all its layers share; nothing for other encodings."""
    if isinstance(encoding, Bias):
        module = encoding.module(geometry.num_heads, both_ways)
        ledger.set_module(backbone, "posenc", module.to(like(backbone.get_input_embeddings())))


def like(words: Any) -> Tensor:
    """An empty tensor where an embedding computes, with the dtype of its weight where that is one to compute in."""
    dtype = words.weight.dtype if words.weight.is_floating_point() else torch.float32
    return torch.empty(0, dtype=dtype, device=execution_device(words))


def add_to_embedding(
    backbone: Any,
    layer: nn.Module,
    encoding: Encoding,
    geometry: Geometry,
    positions: Callable[..., Any],
    ledger: Ledger,
) -> None:
    """Add vectors before the first `layer` of a host that has no table; `positions` finds them in its arguments."""
    if isinstance(encoding, Learned):
        table = encoding.initial(geometry).to(held(backbone.get_input_embeddings()))
        ledger.set_module(backbone, "posenc", PositionTable(table))
        vectors: Callable[..., Any] = TableVectors(backbone)
    else:
        assert isinstance(encoding, Sinusoidal)
        vectors = SinusoidVectors(encoding, geometry.hidden_size)
    ledger.add_pre_hook(layer, AddVectors(vectors, positions))


def prove_added(layer: nn.Module) -> None:
    """The first layer now has the hook that adds vectors."""
    expect(any(isinstance(hook, AddVectors) for hook in layer._forward_pre_hooks.values()), "no vector is added")


def expect(ok: bool, what: str) -> None:
    """Raise `EffectError` with `what` unless `ok`."""
    if not ok:
        raise EffectError(f"the patch did not take effect: {what}")


def rms(*tensors: Any) -> float:
    """Root of the mean over one embedding dimension of the summed squares of `tensors` of one shape."""
    return float(sum(t.detach().float().pow(2).mean() for t in tensors) ** 0.5)
