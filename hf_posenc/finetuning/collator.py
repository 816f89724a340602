"""Rows of `windows` as one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .windows import IGNORED, Row


@dataclass(frozen=True)
class Collator:
    """Stacks rows, (batch, n); those of unequal length are padded on the right, which only a row with a mask can be.

    No mask is made up: a packed batch must have none.
    """

    pad_token_id: int = 0

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        keys = list(rows[0])
        assert all(list(row) == keys for row in rows), "one batch, one kind of rows"
        equal = len({len(row["input_ids"]) for row in rows}) == 1
        assert equal or "attention_mask" in keys, "padding needs a mask"
        return {
            key: torch.stack([row[key] for row in rows])
            if equal
            else pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill.get(key, 0))
            for key in keys
        }
