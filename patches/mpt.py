"""MPT: ALiBi as a tensor as wide as `max_seq_len`, fused q/k/v, no attention interface, no `position_ids`.

What its layers are handed as `position_bias` is the `Call` and its mask. So a patched MPT has no end at `max_seq_len`,
and is not bound to eager attention; `clip_qkv` and `softmax_scale` are kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

from hf_posenc.encodings import Encoding, Geometry
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import find_cache

from .base import Patch, add_to_embedding, causal_refusal, prove_added, rms, table_refusal, whole_refusal
from .handover import Handed, HandedPositions, catch_dropped_positions, hand_over, hand_over_calls
from .own_attention import attend_handed, prove_swapped

__all__ = ["MptPatch"]


class InterfaceMptAttention(MptAttention):
    """MPT's attention through the attention interface, with positions from the call."""

    config: Any

    def forward(  # type: ignore[override]  # what stands in for `position_bias` is the call
        self, hidden_states: Tensor, position_bias: Handed, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in fused.chunk(3, dim=2))
        out, weights = attend_handed(
            self,
            position_bias,
            query,
            key,
            value,
            find_cache(kwargs),
            scaling=float(self.softmax_scale or self.head_dim**-0.5),
            dropout=self.attn_dropout_p,
        )
        return self.out_proj(out), weights


class MptPatch(Patch):
    """Where MPT keeps its positions."""

    native: ClassVar[str] = "alibi"

    def backbone_type(self) -> type[MptModel]:
        return MptModel

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        # the host's own forward takes it for 8 whatever the config says, unlike the code that trains such models
        bias_max = float(config.attn_config.alibi_bias_max)
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.n_heads,
            rotary_dim=config.hidden_size // config.n_heads,
            rope_theta=None,
            max_position_embeddings=config.max_seq_len,
            embedding_rms=lambda: rms(held(backbone.wte)),
            alibi_bias_max=bias_max if bias_max != 8 else None,
        )

    def own_reach(self, config: Any) -> int | None:
        return config.max_seq_len

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        return table_refusal(encoding, config) or whole_refusal(encoding, config) or causal_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return encoding.name == "alibi" and encoding.options() == {"factor": 1.0}  # up to max_seq_len

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry = self.geometry(backbone)
        hand_over_calls(backbone, encoding, geometry, ledger)
        ledger.set_attribute(backbone, "build_mpt_alibi_tensor", hand_over)
        for block in backbone.blocks:
            ledger.swap_class(block.attn, MptAttention, InterfaceMptAttention)
            ledger.set_attribute(block.attn, "config", backbone.config)
        if encoding.seam == "embedding":
            add_to_embedding(backbone, backbone.blocks[0], encoding, geometry, HandedPositions("position_bias"), ledger)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_swapped([block.attn for block in backbone.blocks], InterfaceMptAttention)
        if encoding.seam == "embedding":
            prove_added(backbone.blocks[0])

    def forward_hooks(self, model: Any, backbone: Any, ledger: Ledger) -> None:
        catch_dropped_positions(model, backbone, ledger)
