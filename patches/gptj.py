"""GPT-J: a table of sines and cosines as long as `n_positions`, interleaved pairs, partial; q, k and v apart.

What its layers are handed as `position_ids` is the `Call` and its mask: the backbone passes that argument on untouched,
in every release. So a patched GPT-J has no end at `n_positions`, with its own rotation, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention, GPTJModel

from hf_posenc.attention import eager_attention as eager_attention_forward  # stands beside the attention below
from hf_posenc.encodings import Encoding, Geometry, Rope
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import find_cache
from hf_posenc.rotation import Pairs

from .base import Patch, add_to_embedding, attention_refusal, prove_added, rms, table_refusal, whole_refusal
from .handover import Handed, HandedPositions, NoRotary, hand_over_calls
from .own_attention import attend_handed, prove_swapped

__all__ = ["GPTJPatch", "eager_attention_forward"]

PAIRS = Pairs(interleaved=True)
THETA = 10_000.0  # fixed in its modelling file


class InterfaceGPTJAttention(GPTJAttention):
    """GPT-J's attention through the attention interface, with positions from the call."""

    def forward(  # type: ignore[override]  # what stands in for `position_ids` is the call
        self, hidden_states: Tensor, *, position_ids: Handed | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, weights = attend_handed(
            self,
            position_ids,
            query,
            key,
            value,
            find_cache(kwargs),
            scaling=self.head_dim**-0.5,
            dropout=self.config.attn_pdrop,
            pairs=PAIRS,
        )
        return self.resid_dropout(self.out_proj(out)), weights


class GPTJPatch(Patch):
    """Where GPT-J keeps its positions."""

    native: ClassVar[str] = "rope"

    def backbone_type(self) -> type[GPTJModel]:
        return GPTJModel

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.n_embd,
            num_heads=config.n_head,
            rotary_dim=config.rotary_dim or config.n_embd // config.n_head,
            rope_theta=THETA,
            max_position_embeddings=config.n_positions,
            embedding_rms=lambda: rms(held(backbone.wte)),
        )

    def own_reach(self, config: Any) -> int | None:
        return config.n_positions

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        return table_refusal(encoding, config) or whole_refusal(encoding, config) or attention_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        if not isinstance(encoding, Rope) or encoding.resonance or encoding.logn:
            return False
        return encoding.theta == THETA  # up to n_positions

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry = self.geometry(backbone)
        hand_over_calls(backbone, encoding, geometry, ledger, slot="position_ids", pairs=PAIRS)
        if hasattr(backbone, "rotary_emb"):
            ledger.set_module(backbone, "rotary_emb", NoRotary())
        for block in backbone.h:
            ledger.swap_class(block.attn, GPTJAttention, InterfaceGPTJAttention)
        if encoding.seam == "embedding":
            add_to_embedding(backbone, backbone.h[0], encoding, geometry, HandedPositions("position_ids"), ledger)

    def owns(self, backbone: Any, encoding: Encoding) -> bool:
        return self.is_native_result(encoding)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_swapped([block.attn for block in backbone.h], InterfaceGPTJAttention)
        if encoding.seam == "embedding":
            prove_added(backbone.h[0])
