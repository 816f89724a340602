"""Hosts with a position table of their own: other vectors in its place, a longer or a fresh table, or silence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_posenc.encodings import Encoding, Geometry, Learned, Sinusoidal
from hf_posenc.ledger import Ledger
from hf_posenc.modules import BoundedEmbedding, SilentEmbedding, SinusoidalEmbedding
from hf_posenc.offload import held

from .base import expect


class TableKinds(NamedTuple):
    """The class of a host's position table, and those that take its place."""

    stock: type[nn.Embedding]
    silent: type[SilentEmbedding]
    sinusoidal: type[SinusoidalEmbedding]
    bounded: type[BoundedEmbedding]


EMBEDDING = TableKinds(nn.Embedding, SilentEmbedding, SinusoidalEmbedding, BoundedEmbedding)


def insert_in_table(
    owner: Any,
    name: str,
    encoding: Encoding,
    geometry: Geometry,
    ledger: Ledger,
    kinds: TableKinds = EMBEDDING,
    offset: int = 0,
) -> int | None:
    """Let the table `owner.name` give what the encoding adds, or nothing; returns the rows of a table that is new.

    `offset`: the row of position 0. The rows before it are kept as they are.
    """
    old = getattr(owner, name)
    if not isinstance(encoding, (Learned, Sinusoidal)):
        ledger.swap_class(old, kinds.stock, kinds.silent)
        return None
    table = new_rows(held(old), encoding, geometry, offset) if isinstance(encoding, Learned) else None
    if table is None:
        ledger.swap_class(old, kinds.stock, kinds.bounded if isinstance(encoding, Learned) else kinds.sinusoidal)
        ledger.set_attribute(old, "offset", offset)
        if isinstance(encoding, Sinusoidal):
            ledger.set_attribute(old, "encoding", encoding)
        return None
    new: Any = nn.Embedding(len(table), table.shape[1], padding_idx=old.padding_idx, _weight=table)
    new.__class__, new.offset = kinds.bounded, offset
    ledger.set_module(owner, name, new.requires_grad_(old.weight.requires_grad))
    return len(table)


def new_rows(old: Tensor, encoding: Learned, geometry: Geometry, offset: int) -> Tensor | None:
    """The rows of a longer or of a fresh table, or None where the host's own stays."""
    if encoding.resize is not None:
        rows = encoding.resized(old[offset:])
    elif encoding.max_position_embeddings is not None:
        rows = encoding.initial(geometry).to(old)
    else:
        return None
    return torch.cat((old.detach()[:offset], rows)).contiguous()


def prove_table(table: Any, encoding: Encoding) -> None:
    """The host's own table now gives what the encoding says."""
    if isinstance(encoding, Learned):
        expect(isinstance(table, BoundedEmbedding), "the table is not the one that was put in")
    elif isinstance(encoding, Sinusoidal):
        expect(isinstance(table, SinusoidalEmbedding) and table.encoding == encoding, "no sinusoid is added")
    else:
        expect(isinstance(table, SilentEmbedding), "the host's own table is still there")
