"""RoBERTa: BERT, but that its positions start behind the padding token's number and are counted by tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers.models.roberta.modeling_roberta import RobertaModel, RobertaSelfAttention

from .bert import BertPatch, TurnsEncoder

__all__ = ["RobertaPatch"]


class RotaryRobertaSelfAttention(TurnsEncoder, RobertaSelfAttention):
    """RoBERTa's self-attention with a rotation."""


class RobertaPatch(BertPatch):
    """Where RoBERTa keeps its positions."""

    attention: ClassVar[type[nn.Module]] = RobertaSelfAttention
    rotary: ClassVar[type[nn.Module]] = RotaryRobertaSelfAttention

    def backbone_type(self) -> type[nn.Module]:
        return RobertaModel

    def first_position(self, config: Any) -> int:
        return int(config.pad_token_id) + 1

    def counted_token(self, config: Any) -> int | None:
        return int(config.pad_token_id)
