"""BERT: positions in the table `embeddings.position_embeddings`; every token sees every other; attention interface.

The buffers `position_ids` and `token_type_ids` of its embeddings end where the table does: every call is given both, so
that they are not asked. With `is_decoder=True` it is a causal model with a cache, and everything causal can go in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertModel, BertSelfAttention

from hf_posenc.attention import own_name
from hf_posenc.encodings import Encoding, Geometry, Learned, LogScaled, Nope, Rotation
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import Call, DescribeCall, RememberPositions, find_tokens, locate, named_arguments
from hf_posenc.registry import ENCODINGS

from .base import Patch, attention_refusal, expect, own_bias, rms, turns_before_cache, whole_refusal
from .own_attention import TurnsEarly, prove_attention
from .own_table import insert_in_table, prove_table

__all__ = ["BertPatch", "TurnsEncoder"]


class TurnsEncoder(TurnsEarly):
    """Mixin for BERT's self-attention and its copies: turns Q and K before the cache, if there is one, takes K."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, *, posenc: Call | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling}
        return self.attend_turned(posenc, query, key, value, attention_mask, kwargs, **options)


class RotaryBertSelfAttention(TurnsEncoder, BertSelfAttention):
    """BERT's self-attention with a rotation."""


@dataclass(eq=False)
class FillEmbeddings:
    """A pre-hook of the backbone: gives its embeddings the positions and token types that the caller left out.

    `offset`: what the host calls the position of the first token; `padding_idx`: the token that has the position of
    the same number, on hosts that count by tokens.
    """

    offset: int = 0
    padding_idx: int | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        tokens, n = find_tokens(kwargs)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = self.positions(kwargs)
        if kwargs.get("token_type_ids") is None:
            kwargs["token_type_ids"] = torch.zeros(tokens.shape[0], n, dtype=torch.long, device=tokens.device)
        return (), kwargs

    def positions(self, kwargs: dict[str, Any]) -> Tensor:
        """Counted along the mask; without one, along the tokens that are not padding where the host does so."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        found, _, past, _ = locate(kwargs)
        if self.padding_idx is None:
            return found + self.offset
        if isinstance(mask, Tensor) and mask.ndim == 2:
            visible = mask[:, past : past + found.shape[1]] > 0
            return torch.where(visible, found + self.offset, self.padding_idx)
        if ids is None:
            return found + self.offset
        visible = ids.ne(self.padding_idx)
        return torch.where(visible, visible.cumsum(1) - 1 + past + self.offset, self.padding_idx)


@dataclass(eq=False)
class DescribeEncoderCall(DescribeCall):
    """The pre-hook that describes a call, after `FillEmbeddings`; the host counts its positions from `offset`."""

    offset: int = 0
    both_ways: bool = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        given = kwargs["position_ids"]
        _, described = super().__call__(module, (), {**kwargs, "position_ids": (given - self.offset).clamp(min=0)})
        return (), {**described, "position_ids": given}

    def describe(self, kwargs: dict[str, Any]) -> Call:
        return super().describe(kwargs)._replace(both_ways=self.both_ways)


class BertPatch(Patch):
    """Where BERT keeps its positions; its copies differ in what they call the first one."""

    native: ClassVar[str] = "learned"
    has_table: ClassVar[bool] = True
    attention: ClassVar[type[nn.Module]] = BertSelfAttention
    rotary: ClassVar[type[nn.Module]] = RotaryBertSelfAttention

    def backbone_type(self) -> type[nn.Module]:
        return BertModel

    def geometry(self, backbone: Any) -> Geometry:
        config = backbone.config
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=config.hidden_size // config.num_attention_heads,
            rope_theta=None,
            max_position_embeddings=self.own_reach(config),
            embedding_rms=lambda: rms(held(backbone.embeddings.word_embeddings)),
        )

    def own_reach(self, config: Any) -> int:
        return int(config.max_position_embeddings) - self.first_position(config)

    def cached(self, config: Any) -> bool:
        return bool(config.is_decoder)

    def table(self, backbone: Any) -> Any:
        return backbone.embeddings.position_embeddings

    def refused(self, name: str) -> str | None:
        row = ENCODINGS.get(name)
        if row is None:
            return None
        return _NO_ORDER if row.seam == "none" else _CAUSAL if row.cls.causal_only else None

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        if not config.is_decoder:
            if isinstance(encoding, Nope):
                return _NO_ORDER
            if encoding.causal_only:
                return _CAUSAL
            if isinstance(encoding, LogScaled) and encoding.logn:
                return _COUNTS
            if encoding.seam == "score" and config._attn_implementation == "flex_attention":
                return "a bias on both sides needs a mask of numbers; model.set_attn_implementation('sdpa') first"
        return whole_refusal(encoding, config) or attention_refusal(encoding, config)

    def is_native_result(self, encoding: Encoding) -> bool:
        return isinstance(encoding, Learned)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        geometry, config = self.geometry(backbone), backbone.config
        offset = self.first_position(config)
        rows = insert_in_table(backbone.embeddings, "position_embeddings", encoding, geometry, ledger, offset=offset)
        if rows is not None:
            config.max_position_embeddings = rows
        layers = backbone.encoder.layer
        if turns_before_cache(encoding):
            for layer in layers:
                ledger.swap_class(layer.attention.self, self.attention, self.rotary)
        if encoding.inside_attention:
            for layer in layers:
                if hasattr(layer, "crossattention"):  # no positions of ours in there
                    ledger.set_attribute(layer.crossattention.self, "is_cross_attention", True)
        inside = encoding.inside_attention
        if inside or isinstance(encoding, Rotation):
            if inside:
                ledger.set_attribute(config, "_attn_implementation_internal", own_name(config._attn_implementation))
                ledger.add_hook(backbone, RememberPositions())
            dim = geometry.rotary_dim if encoding.seam == "rotation" else 0
            both_ways = not config.is_decoder
            own_bias(backbone, encoding, geometry, ledger, both_ways)
            hook = DescribeEncoderCall(encoding, dim, geometry.num_heads, inside, offset=offset, both_ways=both_ways)
            ledger.add_pre_hook(backbone, hook)
        ledger.add_pre_hook(backbone, FillEmbeddings(offset, self.counted_token(config)))

    def counted_token(self, config: Any) -> int | None:
        """The padding token on hosts that count positions by tokens."""
        return None

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        table = backbone.embeddings.position_embeddings
        prove_table(table, encoding)
        prove_attention([layer.attention.self for layer in backbone.encoder.layer], encoding, self.rotary)
        if isinstance(encoding, Learned):
            expect(
                table.num_embeddings == backbone.config.max_position_embeddings,
                "the table and the config differ in length",
            )


_CAUSAL = (
    "it is causal by definition, made for queries that see earlier keys alone, and this host looks both ways; use an "
    "encoding with one set of frequencies, such as 'yarn' or 'ntk' (a model with is_decoder=True takes it)"
)
_COUNTS = (
    "logn goes by the number of tokens that a query sees, which here is the same for all and not its position; leave "
    "it out, or scale the softmax by hand (a model with is_decoder=True takes it)"
)
_NO_ORDER = (
    "a causal model can count from its mask alone, but every token of this host sees all others alike, so that without "
    "positions it cannot tell their order (a model with is_decoder=True takes it)"
)
