"""Llama: rotation in `rotary_emb` (half-split pairs), attention through the interface, positions to every layer."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

from hf_posenc.encodings import Encoding, Geometry, Learned, Rotation
from hf_posenc.errors import OptionError
from hf_posenc.ledger import Ledger
from hf_posenc.modules import ExactBuffers
from hf_posenc.positions import FillPositions

from .base import Patch, add_to_embedding, attention_refusal, describe_calls, expect, in_attention, prove_added, rms
from .rotary_host import check_buffers, insert_native, is_native, prove_native, prove_silent, refuse_scaled

__all__ = ["LlamaPatch"]


class ExactLlamaRotaryEmbedding(ExactBuffers, LlamaRotaryEmbedding):
    """Llama's own, with frequencies that no cast can round."""


class SilentLlamaRotaryEmbedding(ExactBuffers, LlamaRotaryEmbedding):
    """Llama's own asked for position 0 only: cos = 1, sin = 0."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids * 0)  # over its own factor: the host's config may be YaRN's
        return cos / self.attention_scaling, sin


def position_ids(kwargs: dict[str, Any]) -> Tensor:
    """Where a decoder layer is told its positions."""
    return kwargs["position_ids"]


class LlamaPatch(Patch):
    """Where Llama keeps its positions."""

    native: ClassVar[str] = "rope"

    def backbone_type(self) -> type[LlamaModel]:
        return LlamaModel

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=2 * backbone.rotary_emb.inv_freq.shape[0],
            rope_theta=config.rope_parameters["rope_theta"],
            max_position_embeddings=config.max_position_embeddings,
            embedding_rms=lambda: rms(backbone.embed_tokens.weight),
        )

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if isinstance(encoding, Learned) and encoding.resize is not None:
            return f"resize={encoding.resize!r} stretches a host's own table, and llama has none"
        return attention_refusal(encoding, config)

    def complete(self, encoding: Encoding, backbone: Any) -> Encoding:
        check_buffers(backbone.rotary_emb, backbone.config)
        refuse_scaled(encoding, backbone.config)
        head_dim = backbone.config.head_dim
        if isinstance(encoding, Rotation) and head_dim % 2:
            raise OptionError(
                f"{encoding.name}: rotations turn pairs of channels, and this host's heads are {head_dim} wide"
            )
        return super().complete(encoding, backbone)

    def is_native_result(self, encoding: Encoding) -> bool:
        return is_native(encoding)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        if isinstance(encoding, Rotation) and is_native(encoding):
            insert_native(backbone, encoding, ExactLlamaRotaryEmbedding, ledger)
            return
        silent = SilentLlamaRotaryEmbedding(backbone.config).to(backbone.rotary_emb.inv_freq.device)
        ledger.set_module(backbone, "rotary_emb", silent)
        if in_attention(encoding):
            describe_calls(backbone, encoding, self.geometry(backbone), ledger)
        elif encoding.seam == "embedding":  # and nope is silence alone
            add_to_embedding(backbone, backbone.layers[0], encoding, self.geometry(backbone), position_ids, ledger)
            ledger.add_pre_hook(backbone, FillPositions())

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        if isinstance(encoding, Rotation) and is_native(encoding):
            prove_native(backbone, encoding)
            return
        prove_silent(backbone)
        if in_attention(encoding):
            name = backbone.layers[-1].self_attn.config._attn_implementation
            expect(name.startswith("posenc_"), f"the layers still use {name} attention")
        elif encoding.seam == "embedding":
            prove_added(backbone.layers[0])
