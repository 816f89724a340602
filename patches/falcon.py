"""Falcon, of either kind: rotation in `rotary_emb` (half-split pairs), or ALiBi as a tensor; its own attention.

What its layers are handed as `position_ids` is the `Call` and its mask: the backbone passes that argument on untouched.
A rotation that the host library has a type for leaves a rotary Falcon on its stock path instead.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention

from hf_posenc.attention import BASES
from hf_posenc.encodings import Alibi, Encoding, Geometry
from hf_posenc.ledger import Ledger
from hf_posenc.positions import find_cache, named_arguments

from .base import Patch, add_to_embedding, prove_added, whole_refusal
from .handover import Handed, HandedPositions, NoRotary, causal_mask_of, hand_over_calls
from .native_rope import is_native
from .own_attention import attend_handed, prove_swapped
from .rotary_host import RotaryHostPatch

__all__ = ["FalconPatch"]


class InterfaceFalconAttention(FalconAttention):
    """Falcon's attention through the attention interface, with positions from the call."""

    @property
    def num_key_value_groups(self) -> int:
        """Query heads a key head; the new decoder repeats its key heads by itself."""
        return 1 if self.new_decoder_architecture else self.num_heads // int(self.num_kv_heads or 1)

    def forward(  # type: ignore[override]  # what stands in for `position_ids` is the call
        self,
        hidden_states: Tensor,
        alibi: None,
        attention_mask: Tensor | None,
        position_ids: Handed | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        out, weights = attend_handed(
            self,
            position_ids,
            query,
            key,
            value,
            find_cache(kwargs),
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.config.alibi else 0.0,  # a rotary Falcon has none there
        )
        return self.dense(out), weights


def mask_for_weights(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pre-hook of a Falcon on its stock path: a call that wants attention weights gets its causal mask in full.

    Under sdpa the host then makes the scores in the open, but is told of no mask, and every token sees later ones.
    """
    kwargs = named_arguments(module, args, kwargs)
    wanted = kwargs.get("output_attentions")
    wanted = module.config.output_attentions if wanted is None else wanted
    if wanted and module.config._attn_implementation == "sdpa":
        open_scores = copy.copy(module.config)
        open_scores._attn_implementation_internal = "eager"
        kwargs["attention_mask"] = causal_mask_of(module, open_scores, kwargs, kwargs.get("position_ids"))
    return (), kwargs


class FalconPatch(RotaryHostPatch):
    """Where Falcon keeps its positions: where any rotary host does, and all else in an attention of ours."""

    def __init__(self) -> None:
        super().__init__("falcon.FalconModel")

    def geometry(self, backbone: Any) -> Geometry:
        geometry, config = super().geometry(backbone), backbone.config
        return replace(geometry, rope_theta=None, alibi_scale=own_scale(config)) if config.alibi else geometry

    def width(self, config: Any) -> int:
        return int(config.head_dim)

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if stays_stock(encoding, config):
            return None
        if config._attn_implementation not in BASES:
            return (
                f"its layers were made for {config._attn_implementation}, in a class of their own, which takes no "
                "positions but the host's; load it with attn_implementation='sdpa'"
            )
        return whole_refusal(encoding, config) or super().refusal(encoding, config)

    def complete(self, encoding: Encoding, backbone: Any) -> Encoding:
        return (
            Patch.complete(self, encoding, backbone) if backbone.config.alibi else super().complete(encoding, backbone)
        )

    def holds(self, encoding: Encoding, config: Any) -> bool:
        return encoding == Alibi(scale=own_scale(config)) if config.alibi else is_native(encoding)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        if stays_stock(encoding, backbone.config):
            super().apply(backbone, encoding, ledger)
            ledger.add_pre_hook(backbone, mask_for_weights)
            return
        geometry = self.geometry(backbone)
        hand_over_calls(backbone, encoding, geometry, ledger, slot="position_ids")
        ledger.set_attribute(backbone, "use_alibi", False)
        ledger.set_module(backbone, "rotary_emb", NoRotary())
        for block in backbone.h:
            ledger.swap_class(block.self_attention, FalconAttention, InterfaceFalconAttention)
        if encoding.seam == "embedding":
            add_to_embedding(backbone, backbone.h[0], encoding, geometry, HandedPositions("position_ids"), ledger)

    def owns(self, backbone: Any, encoding: Encoding) -> bool:
        config = backbone.config
        return self.holds(encoding, config) if config.alibi else super().owns(backbone, encoding)

    def tables(self, backbone: Any, positions: Tensor, layer_type: str | None = None) -> Any:
        return None if isinstance(backbone.rotary_emb, NoRotary) else super().tables(backbone, positions)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        if stays_stock(encoding, backbone.config):
            super().prove(backbone, encoding)
            return
        prove_swapped([block.self_attention for block in backbone.h], InterfaceFalconAttention)
        if encoding.seam == "embedding":
            prove_added(backbone.h[0])


def own_scale(config: Any) -> float:
    """What Falcon's ALiBi slopes are multiplied with: it adds them before it divides the scores by sqrt(d)."""
    return float(config.head_dim) ** -0.5


def stays_stock(encoding: Encoding, config: Any) -> bool:
    """Whether the host's own forward does it, told by its config alone."""
    return is_native(encoding) and not config.alibi
