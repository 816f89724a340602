"""GPT-2: positions in the table `wpe`, no rotation, fused Conv1D q/k/v, attention through the interface."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model

from hf_posenc.encodings import Encoding, Geometry, Learned, Rotation
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import Call, FillPositions

from .base import Patch, attention_refusal, describe_calls, expect, rms, turns_before_cache, whole_refusal
from .own_attention import TurnsEarly, prove_attention
from .own_table import insert_in_table, prove_table

__all__ = ["GPT2Patch"]


class RotaryGPT2Attention(TurnsEarly, GPT2Attention):
    """GPT-2's self-attention that turns Q and K before the cache takes K."""

    def forward(
        self, hidden_states: Tensor, *, posenc: Call | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.c_attn(hidden_states).split(self.split_size, dim=2)
        )
        attend = None
        if self.config._attn_implementation == "eager" and self.reorder_and_upcast_attn:
            attend = self._upcast_and_reordered_attn
        dropout = self.attn_dropout.p if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling}
        out, weights = self.attend_turned(posenc, query, key, value, attention_mask, kwargs, attend, **options)
        return self.resid_dropout(self.c_proj(out)), weights


class GPT2Patch(Patch):
    """Where GPT-2 keeps its positions."""

    native: ClassVar[str] = "learned"
    has_table: ClassVar[bool] = True

    def backbone_type(self) -> type[GPT2Model]:
        return GPT2Model

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=config.hidden_size // config.num_attention_heads,
            rope_theta=None,
            max_position_embeddings=config.n_positions,
            embedding_rms=lambda: rms(held(backbone.wte)),
        )

    def own_reach(self, config: Any) -> int | None:
        return config.n_positions

    def table(self, backbone: Any) -> Any:
        return backbone.wpe

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if config.reorder_and_upcast_attn and encoding.inside_attention:
            return (
                "reorder_and_upcast_attn makes this host compute its scores on its own, past the attention function in "
                f"which {encoding.name} acts; load it with reorder_and_upcast_attn=False (same results in float32)"
            )
        return whole_refusal(encoding, config) or attention_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return isinstance(encoding, Learned)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry = self.geometry(backbone)
        rows = insert_in_table(backbone, "wpe", encoding, geometry, ledger)
        if rows is not None:
            backbone.config.n_positions = rows  # the saved config must name the length of the saved table
        if turns_before_cache(encoding):
            for block in backbone.h:
                ledger.swap_class(block.attn, GPT2Attention, RotaryGPT2Attention)
        if encoding.inside_attention or isinstance(encoding, Rotation):
            describe_calls(backbone, encoding, geometry, ledger)
        elif encoding.seam == "embedding":
            ledger.add_pre_hook(backbone, FillPositions())

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_table(backbone.wpe, encoding)
        prove_attention([block.attn for block in backbone.h], encoding, RotaryGPT2Attention)
        if isinstance(encoding, Learned):
            rows = backbone.wpe.num_embeddings
            expect(rows == backbone.config.n_positions, "the table and the config differ in length")
