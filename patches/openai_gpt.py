"""The first GPT: positions in the table `positions_embed`, fused Conv1D q/k/v, no attention interface, no cache at all.

Its layers are handed the call and its mask past the backbone, which has no argument for either (and no gradient
checkpointing, which would need one). So the causal mask of `n_positions` × `n_positions` in each layer is not asked,
and texts may be longer. With its own table it stays on its stock path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers.models.openai.modeling_openai import Attention, OpenAIGPTModel

from hf_posenc.encodings import Encoding, Geometry, Learned
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import FillPositions

from .base import Patch, causal_refusal, expect, rms, whole_refusal
from .handover import Handed, HandOver, hand_over, hand_over_calls
from .own_attention import attend_handed, prove_swapped
from .own_table import insert_in_table, prove_table

__all__ = ["OpenAIGPTPatch"]


class InterfaceOpenAIGPTAttention(Attention):
    """The first GPT's attention through the attention interface, with positions from the call."""

    config: Any

    def forward(self, x: Tensor, attention_mask: Any = None, output_attentions: bool = False) -> list[Any]:
        query, key, value = (self.split_heads(part) for part in self.c_attn(x).split(self.split_size, dim=2))
        scaling = value.shape[-1] ** -0.5 if self.scale else 1.0
        handed = hand_over()
        out, weights = attend_handed(
            self, handed, query, key, value, None, scaling=scaling, dropout=self.attn_dropout.p
        )
        return [self.resid_dropout(self.c_proj(out)), weights]


@dataclass(eq=False)
class HandOverGPT(HandOver):
    """Its pre-hook: this backbone takes no prepared mask, and reads positions from a buffer unless it is given them."""

    def filled(self, kwargs: dict[str, Any], handed: Handed) -> dict[str, Any]:
        return {**kwargs, "attention_mask": None, "position_ids": handed.call.query_positions}


class OpenAIGPTPatch(Patch):
    """Where the first GPT keeps its positions."""

    native: ClassVar[str] = "learned"
    has_table: ClassVar[bool] = True
    has_cache: ClassVar[bool] = False

    def backbone_type(self) -> type[OpenAIGPTModel]:
        return OpenAIGPTModel

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.n_embd,
            num_heads=config.n_head,
            rotary_dim=config.n_embd // config.n_head,
            rope_theta=None,
            max_position_embeddings=config.n_positions,
            embedding_rms=lambda: rms(held(backbone.tokens_embed)),
        )

    def own_reach(self, config: Any) -> int | None:
        return config.n_positions

    def table(self, backbone: Any) -> Any:
        return backbone.positions_embed

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        return whole_refusal(encoding, config) or causal_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return isinstance(encoding, Learned)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry, config = self.geometry(backbone), backbone.config
        rows = insert_in_table(backbone, "positions_embed", encoding, geometry, ledger)
        if isinstance(encoding, Learned) and rows is None:
            ledger.add_pre_hook(backbone, FillPositions(always=True))
            return
        if rows is not None:
            config.n_positions = rows  # the saved config must name the length of the saved table
        hand_over_calls(backbone, encoding, geometry, ledger, hook=HandOverGPT)
        for block in backbone.h:
            ledger.swap_class(block.attn, Attention, InterfaceOpenAIGPTAttention)
            ledger.set_attribute(block.attn, "config", config)

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_table(backbone.positions_embed, encoding)
        if isinstance(encoding, Learned):
            rows = backbone.positions_embed.num_embeddings
            expect(rows == backbone.config.n_positions, "the table and the config differ in length")
        if not (isinstance(encoding, Learned) and encoding.options() == {}):
            prove_swapped([block.attn for block in backbone.h], InterfaceOpenAIGPTAttention)
