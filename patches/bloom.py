"""BLOOM: ALiBi as a tensor in `baddbmm`, fused q/k/v a head, no attention interface, no `position_ids`.

Every patched BLOOM gets an attention that goes through the interface. What its layers are handed as `alibi` is the
`Call`: the backbone passes that argument on untouched, and gradient checkpointing keeps it with the call.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, dropout_add

from hf_posenc.attention import posenc_eager
from hf_posenc.encodings import Encoding, Geometry, Learned
from hf_posenc.errors import StateError
from hf_posenc.ledger import Ledger
from hf_posenc.positions import Call, DescribeCall, RememberPositions, find_cache, find_tokens, named_arguments
from hf_posenc.rotation import rotate

from .base import Patch, add_to_embedding, causal_refusal, expect, prove_added, rms

__all__ = ["BloomPatch"]


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


_WITHOUT_HOOKS = "a patched BLOOM was called without its own hooks; call the whole model, or unpatch it first"
_call = Handover("call")
_position_ids = Handover("position_ids")


class InterfaceBloomAttention(BloomAttention):
    """BLOOM's attention through the attention interface, with positions from the call."""

    config: Any

    def forward(  # type: ignore[override]  # what stands in for `alibi` is the call
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Call,
        attention_mask: Tensor | None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(alibi, Call):  # without a mask the host makes its own, and asks nobody
            raise StateError(_WITHOUT_HOOKS)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if alibi.cos is not None and alibi.sin is not None:
            query, key = (rotate(x, alibi.cos, alibi.sin) for x in (query, key))
        cache = find_cache(kwargs)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = (posenc_eager if output_attentions else attend)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout.p if self.training else 0.0,
            scaling=self.inv_norm_factor,
            is_causal=getattr(self.config, "is_causal", True),
            posenc=alibi,
        )
        out = self._project(out.reshape(*hidden_states.shape))
        return dropout_add(out, residual, self.hidden_dropout, self.training), weights

    def _project(self, context: Tensor) -> Tensor:
        """The output projection, summed over tensor-parallel slices where the config asks for the training's order."""
        if not (self.pretraining_tp > 1 and self.slow_but_exact):
            return self.dense(context)
        parts = zip(context.chunk(self.pretraining_tp, dim=-1), self.dense.weight.chunk(self.pretraining_tp, dim=1))
        return sum((F.linear(part, weight) for part, weight in parts), torch.zeros_like(context))


def hand_over_call(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Any:
    """Stands in for the backbone's `build_alibi_tensor`: hands its layers the `Call` instead."""
    call = _call.take()
    if call is None:
        raise StateError(_WITHOUT_HOOKS)
    return call


@dataclass(eq=False)
class DescribeBloomCall(DescribeCall):
    """The pre-hook of the backbone, which takes no keyword that it does not know."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = _position_ids.take()
        _, kwargs = super().__call__(module, (), kwargs)
        call, positions = kwargs.pop("posenc"), kwargs.pop("position_ids")
        _call.put(call)
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = self.make_mask(module, kwargs, call, positions)
        return (), kwargs

    def make_mask(self, module: Any, kwargs: dict[str, Any], call: Call, positions: Tensor | None) -> Tensor:
        """A mask where the caller gave none: only then does the backbone ask `build_alibi_tensor`.

        With `position_ids` and no cache it is the one that keeps packed sequences apart, as on other hosts.
        """
        tokens, _ = find_tokens(kwargs)
        if positions is not None and find_cache(kwargs) is None:
            embeds = module.word_embeddings.weight.new_empty(*tokens.shape[:2], 1)
            known = inspect.signature(create_causal_mask).parameters
            no_cache = {"cache" if "cache" in known else "past_key_values": None}
            packed = create_causal_mask(
                config=module.config, inputs_embeds=embeds, attention_mask=None, position_ids=positions, **no_cache
            )
            if packed is not None:
                return packed
        return torch.ones(tokens.shape[0], call.key_positions.shape[1], dtype=torch.long, device=tokens.device)


class AfterBloomCall(RememberPositions):
    """The hook after the backbone, whose keywords hold no `Call`: remembers, and lets go of it."""

    def find_call(self, kwargs: dict[str, Any]) -> Any:
        call = _call.take()
        _call.put(None)
        return call


def catch_position_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pre-hook of a model around the backbone, which would drop `position_ids` without a word."""
    if kwargs.get("position_ids") is not None:
        _position_ids.put(kwargs["position_ids"])


def release_position_ids(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Its counterpart after the call, also after one that raised."""
    _position_ids.put(None)


def call_positions(kwargs: dict[str, Any]) -> Tensor:
    """Where a block is told its positions."""
    return kwargs["alibi"].query_positions


class BloomPatch(Patch):
    """Where BLOOM keeps its positions."""

    native: ClassVar[str] = "alibi"

    def backbone_type(self) -> type[BloomModel]:
        return BloomModel

    def geometry(self, backbone: Any) -> Geometry:
        config, norm = backbone.config, backbone.word_embeddings_layernorm
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.n_head,
            rotary_dim=config.hidden_size // config.n_head,
            rope_theta=None,
            max_position_embeddings=None,  # ALiBi's hosts state none
            embedding_rms=lambda: rms(norm.weight, norm.bias),
        )

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if isinstance(encoding, Learned) and encoding.resize is not None:
            return f"resize={encoding.resize!r} stretches a host's own table, and bloom has none"
        return causal_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return encoding.name == "alibi" and encoding.options() == {"factor": 1.0}

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry, config = self.geometry(backbone), backbone.config
        base = (config._attn_implementation or "").removeprefix("posenc_")
        name = f"posenc_{base}" if base == "flex_attention" else "posenc_sdpa"
        ledger.set_attribute(config, "_attn_implementation_internal", name)
        dim = geometry.rotary_dim if encoding.seam == "rotation" else 0
        ledger.add_pre_hook(backbone, DescribeBloomCall(encoding, dim, geometry.num_heads, True))
        ledger.add_hook(backbone, AfterBloomCall())
        ledger.set_attribute(backbone, "build_alibi_tensor", hand_over_call)
        for block in backbone.h:
            ledger.swap_class(block.self_attention, BloomAttention, InterfaceBloomAttention)
            ledger.set_attribute(block.self_attention, "config", config)
        if encoding.seam == "embedding":
            add_to_embedding(backbone, backbone.h[0], encoding, geometry, call_positions, ledger)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        layers = [block.self_attention for block in backbone.h]
        expect(all(isinstance(x, InterfaceBloomAttention) for x in layers), "the layers still add BLOOM's own bias")
        layer = layers[-1]
        expect(layer.config._attn_implementation.startswith("posenc_"), "the layers do not use our attention")
        if encoding.seam == "embedding":
            prove_added(backbone.h[0])

    def forward_hooks(self, model: Any, backbone: Any, ledger: Ledger) -> None:
        for module in model.modules():
            if module is not backbone and any(inner is backbone for inner in module.modules()):
                ledger.add_pre_hook(module, catch_position_ids)
                ledger.add_hook(module, release_position_ids)
