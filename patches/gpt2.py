"""GPT-2: positions in the table `wpe`, no rotation, fused Conv1D q/k/v, attention through the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model, eager_attention_forward

from hf_posenc.encodings import Encoding, Geometry, Learned, Rotation, Sinusoidal
from hf_posenc.errors import StateError
from hf_posenc.ledger import Ledger
from hf_posenc.modules import BoundedEmbedding, SilentEmbedding, SinusoidalEmbedding
from hf_posenc.positions import Call, FillPositions, find_cache
from hf_posenc.rotation import rotate

from .base import Patch, attention_refusal, describe_calls, expect, in_attention, rms

__all__ = ["GPT2Patch"]


class RotaryGPT2Attention(GPT2Attention):
    """GPT-2's self-attention that turns Q and K before the cache takes K."""

    def forward(
        self, hidden_states: Tensor, *, posenc: Call | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if posenc is None:
            raise StateError(
                "a patched GPT-2 layer was called without positions; call the whole model, or unpatch it first"
            )
        assert posenc.cos is not None and posenc.sin is not None
        cache = find_cache(kwargs)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.c_attn(hidden_states).split(self.split_size, dim=2)
        )
        query, key = (rotate(x, posenc.cos, posenc.sin) for x in (query, key))
        if cache is not None:
            own = getattr(cache, "self_attention_cache", cache)  # beside a cross-attention cache, where there is one
            key, value = own.update(key, value, self.layer_idx)
        name = self.config._attn_implementation
        if name == "eager" and self.reorder_and_upcast_attn:
            out, weights = self._upcast_and_reordered_attn(query, key, value, attention_mask)
        else:
            attend: Callable[..., Any] = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
            dropout = self.attn_dropout.p if self.training else 0.0
            out, weights = attend(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        out = self.c_proj(out.reshape(*out.shape[:-2], -1).contiguous())
        return self.resid_dropout(out), weights


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
            embedding_rms=lambda: rms(backbone.wte.weight),
        )

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if config.reorder_and_upcast_attn and in_attention(encoding):
            return (
                "reorder_and_upcast_attn makes this host compute its scores on its own, past the attention function in "
                f"which {encoding.name} acts; load it with reorder_and_upcast_attn=False (same results in float32)"
            )
        return attention_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return isinstance(encoding, Learned)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        if isinstance(encoding, Learned):
            self._insert_table(backbone, encoding, ledger)
            ledger.add_pre_hook(backbone, FillPositions())
            return
        wpe = backbone.wpe
        if isinstance(encoding, Sinusoidal):
            ledger.swap_class(wpe, torch.nn.Embedding, SinusoidalEmbedding)
            ledger.set_attribute(wpe, "encoding", encoding)
            ledger.add_pre_hook(backbone, FillPositions())
            return
        ledger.swap_class(wpe, torch.nn.Embedding, SilentEmbedding)
        if isinstance(encoding, Rotation) and not in_attention(encoding):
            for block in backbone.h:
                ledger.swap_class(block.attn, GPT2Attention, RotaryGPT2Attention)
        if encoding.seam in ("rotation", "score"):
            describe_calls(backbone, encoding, self.geometry(backbone), ledger)

    def _insert_table(self, backbone: Any, encoding: Learned, ledger: Ledger) -> None:
        """The host's own table with an end that is said; a longer one; or a fresh one."""
        old = backbone.wpe
        if encoding.resize is not None:
            table = encoding.resized(old.weight)
        elif encoding.max_position_embeddings is not None:
            table = encoding.initial(self.geometry(backbone)).to(old.weight)
        else:
            ledger.swap_class(old, torch.nn.Embedding, BoundedEmbedding)
            return
        new = BoundedEmbedding(len(table), table.shape[1], _weight=table.contiguous()).requires_grad_(
            old.weight.requires_grad
        )
        ledger.set_module(backbone, "wpe", new)
        backbone.config.n_positions = len(table)  # the saved config must name the length of the saved table

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        wpe, probe = backbone.wpe, torch.zeros(1, 1, dtype=torch.long, device=backbone.wpe.weight.device)
        if isinstance(encoding, Learned):
            expect(wpe.num_embeddings == backbone.config.n_positions, "the table and the config differ in length")
            return
        silent = bool((wpe(probe) == 0).all())
        expect(silent != isinstance(encoding, Sinusoidal), "the host's own table is still there")
        if isinstance(encoding, Rotation) and not in_attention(encoding):
            turning = all(isinstance(block.attn, RotaryGPT2Attention) for block in backbone.h)
            expect(turning, "the layers do not turn their queries and keys")
        if in_attention(encoding):
            name = backbone.h[-1].attn.config._attn_implementation
            expect(name.startswith("posenc_"), f"the layers still use {name} attention")
