"""BLOOM: ALiBi as a tensor in `baddbmm`, fused q/k/v a head, no attention interface, no `position_ids`.

What its layers are handed as `alibi` is the `Call` and its mask: the backbone passes that argument on untouched.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, dropout_add

from hf_posenc.encodings import Encoding, Geometry
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import find_cache

from .base import Patch, add_to_embedding, causal_refusal, prove_added, rms, table_refusal, whole_refusal
from .handover import Handed, HandedPositions, catch_dropped_positions, hand_over, hand_over_calls
from .own_attention import attend_handed, prove_swapped

__all__ = ["BloomPatch"]


class InterfaceBloomAttention(BloomAttention):
    """BLOOM's attention through the attention interface, with positions from the call."""

    config: Any

    def forward(  # type: ignore[override]  # what stands in for `alibi` is the call
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Handed,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out, weights = attend_handed(
            self,
            alibi,
            query,
            key,
            value,
            find_cache(kwargs),
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p,
        )
        return dropout_add(self._project(out), residual, self.hidden_dropout, self.training), weights

    def _project(self, context: Tensor) -> Tensor:
        """The output projection, summed over tensor-parallel slices where the config asks for the training's order."""
        if not (self.pretraining_tp > 1 and self.slow_but_exact):
            return self.dense(context)
        parts = zip(context.chunk(self.pretraining_tp, dim=-1), self.dense.weight.chunk(self.pretraining_tp, dim=1))
        return sum((F.linear(part, weight) for part, weight in parts), torch.zeros_like(context))


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
            embedding_rms=lambda: rms(held(norm), held(norm, "bias")),
        )

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        return table_refusal(encoding, config) or whole_refusal(encoding, config) or causal_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return encoding.name == "alibi" and encoding.options() == {"factor": 1.0}

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry = self.geometry(backbone)
        hand_over_calls(backbone, encoding, geometry, ledger)
        ledger.set_attribute(backbone, "build_alibi_tensor", hand_over)
        for block in backbone.h:
            ledger.swap_class(block.self_attention, BloomAttention, InterfaceBloomAttention)
            ledger.set_attribute(block.self_attention, "config", backbone.config)
        if encoding.seam == "embedding":
            add_to_embedding(backbone, backbone.h[0], encoding, geometry, HandedPositions("alibi"), ledger)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_swapped([block.self_attention for block in backbone.h], InterfaceBloomAttention)
        if encoding.seam == "embedding":
            prove_added(backbone.h[0])

    def forward_hooks(self, model: Any, backbone: Any, ledger: Ledger) -> None:
        catch_dropped_positions(model, backbone, ledger)
