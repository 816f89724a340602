"""OPT: positions in the table `embed_positions`, from row 2 on; q, k and v apart, attention through the interface.

Its causal model calls the decoder and not the model around it, so the decoder is where a call is described.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoder, OPTLearnedPositionalEmbedding

from hf_posenc.encodings import Encoding, Geometry, Learned, Rotation
from hf_posenc.ledger import Ledger
from hf_posenc.modules import BoundedEmbedding, SilentEmbedding, SinusoidalEmbedding
from hf_posenc.offload import held
from hf_posenc.positions import Call, FillPositions

from .base import Patch, attention_refusal, describe_calls, expect, rms, turns_before_cache, whole_refusal
from .own_attention import TurnsEarly, prove_attention
from .own_table import TableKinds, insert_in_table, prove_table

__all__ = ["OPTPatch"]

OFFSET = 2  # the row of position 0


class OPTTable(OPTLearnedPositionalEmbedding):
    """OPT's table is called with a mask and positions, of which the decoder always fills in the latter."""

    def forward(self, attention_mask: Any, cache_length: int = 0, position_ids: Any = None) -> Tensor:
        return super(OPTLearnedPositionalEmbedding, self).forward(position_ids + OFFSET)


class SilentOPTTable(OPTTable, SilentEmbedding):
    """OPT's table taken out of play."""


class SinusoidalOPTTable(OPTTable, SinusoidalEmbedding):
    """OPT's table with sinusoids in its place."""


class BoundedOPTTable(OPTTable, BoundedEmbedding):
    """OPT's table that says clearly where it ends."""


KINDS = TableKinds(OPTLearnedPositionalEmbedding, SilentOPTTable, SinusoidalOPTTable, BoundedOPTTable)


class RotaryOPTAttention(TurnsEarly, OPTAttention):
    """OPT's attention that turns Q and K before the cache takes K."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, posenc: Call | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query = (self.q_proj(hidden_states) * self.scaling).view(shape).transpose(1, 2)
        key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        out, weights = self.attend_turned(
            posenc, query, key, value, attention_mask, kwargs, dropout=dropout, scaling=1.0
        )
        return self.out_proj(out), weights


class OPTPatch(Patch):
    """Where OPT keeps its positions."""

    native: ClassVar[str] = "learned"
    has_table: ClassVar[bool] = True

    def backbone_type(self) -> type[OPTDecoder]:
        return OPTDecoder

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=config.hidden_size // config.num_attention_heads,
            rope_theta=None,
            max_position_embeddings=config.max_position_embeddings,
            embedding_rms=lambda: entering_rms(backbone),
        )

    def own_reach(self, config: Any) -> int | None:
        return config.max_position_embeddings

    def rows_before(self, config: Any) -> int:
        return OFFSET

    def table(self, backbone: Any) -> Any:
        return backbone.embed_positions

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        return whole_refusal(encoding, config) or attention_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return isinstance(encoding, Learned)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry = self.geometry(backbone)
        rows = insert_in_table(backbone, "embed_positions", encoding, geometry, ledger, KINDS, OFFSET)
        if rows is not None:
            backbone.config.max_position_embeddings = rows - OFFSET
        if turns_before_cache(encoding):
            for layer in backbone.layers:
                ledger.swap_class(layer.self_attn, OPTAttention, RotaryOPTAttention)
        if encoding.inside_attention or isinstance(encoding, Rotation):
            describe_calls(backbone, encoding, geometry, ledger)
        else:
            ledger.add_pre_hook(backbone, FillPositions())

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        prove_table(backbone.embed_positions, encoding)
        layers = [layer.self_attn for layer in backbone.layers]
        prove_attention(layers, encoding, RotaryOPTAttention)
        if isinstance(encoding, Learned):
            rows = backbone.embed_positions.num_embeddings - OFFSET
            expect(rows == backbone.config.max_position_embeddings, "the table and the config differ in length")


def entering_rms(backbone: Any) -> float:
    """Root mean square of what positions are added to: the embedding, projected where that is narrower."""
    weight = held(backbone.embed_tokens)
    if backbone.project_in is None:
        return rms(weight)
    with torch.no_grad():
        return rms(backbone.project_in(weight))
