"""An attention of ours, through the attention interface, for hosts that make their scores in a way of their own.

And what the attention of a host with that interface needs where its queries and keys are to be turned early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.attention import base_function, posenc_eager
from hf_posenc.encodings import Encoding
from hf_posenc.errors import StateError
from hf_posenc.positions import Call, find_cache
from hf_posenc.rotation import HALVES, Pairs, turn_both

from .base import expect, turns_before_cache
from .handover import OWN, WITHOUT_HOOKS, Handed


def attend_handed(
    module: Any,
    handed: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
    pairs: Pairs = HALVES,
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention: early rotation, cache, our function. (batch, heads, n, d) → (batch, n, heads · d), weights.

    `scaling` multiplies the scores, before any bias. `module` has `config` and, with a cache, `layer_idx`.
    """
    if not isinstance(handed, Handed):  # a host that got no mask makes its own bias, and asks nobody
        raise StateError(WITHOUT_HOOKS)
    config = module.config
    query, key, value = turn_and_store(module, handed.call, query, key, value, cache, pairs)
    attend: Any = posenc_eager if handed.weights else ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    out, weights = attend(
        module,
        query,
        key,
        value,
        handed.mask,
        dropout=dropout if module.training else 0.0,
        scaling=scaling,
        is_causal=getattr(config, "is_causal", True),
        posenc=handed.call,
    )
    return out.flatten(2), weights


def turn_and_store(
    module: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, cache: Any, pairs: Pairs = HALVES
) -> tuple[Tensor, Tensor, Tensor]:
    """Q and K turned where the call says so, and then all keys and values so far."""
    if call.cos is not None:
        query, key = turn_both(query, key, *call.early(query, pairs), pairs)
    if cache is not None:
        own = getattr(cache, "self_attention_cache", cache)  # beside a cross-attention cache, where there is one
        key, value = own.update(key, value, module.layer_idx)
    return query, key, value


class TurnsEarly:
    """Mixin for the attention of a host with the attention interface: what its rotation needs, and nothing more."""

    config: Any

    def attend_turned(
        self,
        call: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        kwargs: dict[str, Any],
        attend: Callable[..., Any] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, heads, n, d) → (batch, n, heads · d) and weights, by the attention that the config names.

        `attend`: a function of the host's own in its place, which is asked for no options.
        """
        if not isinstance(call, Call):
            raise StateError(WITHOUT_HOOKS)
        query, key, value = turn_and_store(self, call, query, key, value, find_cache(kwargs))
        if attend is not None:
            out, weights = attend(query, key, value, mask)
            return out.flatten(2), weights
        name, module = self.config._attn_implementation, cast(nn.Module, self)
        if name.startswith(OWN):  # where more is to be done than to turn
            kwargs = {**kwargs, "posenc": call}
        function: Any = base_function("eager", module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        out, weights = function(module, query, key, value, mask, **options, **kwargs)
        return out.flatten(2), weights


def prove_swapped(layers: list[Any], swapped: type[nn.Module]) -> None:
    """All layers have our attention, and it is the one that will be used."""
    expect(all(isinstance(layer, swapped) for layer in layers), "the layers still attend in the host's own way")
    name = str(layers[-1].config._attn_implementation)
    expect(name.startswith(OWN), f"the layers still use {name} attention")


def prove_attention(layers: list[Any], encoding: Encoding, turning: type[nn.Module]) -> None:
    """On a host with the attention interface: layers that turn early do, and what acts inside has our function."""
    if encoding.inside_attention:
        name = str(layers[-1].config._attn_implementation)
        expect(name.startswith(OWN), f"the layers still use {name} attention")
    if turns_before_cache(encoding):
        expect(all(isinstance(x, turning) for x in layers), "the layers do not turn their queries and keys")
