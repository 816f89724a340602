"""From documents to rows of one size: cut one after another, packed, with far positions, or one document a row.

Facts: a packed batch is known by positions that restart, with no mask and no cache; a batch whose positions skip must
carry a mask of ones, or every skip would be read as a new document. So the two do not combine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hf_posenc.errors import OptionError

from .settings import DataSettings
from .sources import Source

IGNORED = -100
TRAINING_SEEDS = 10**6
"""A task's documents for training take seeds from here on; those that are scored take small ones."""
Row = dict[str, Tensor]


class Tokens(NamedTuple):
    """Token ids of a piece, and whether a document begins with it."""

    ids: list[int]
    begins: bool


def tokenized(source: Source, tokenizer: Any) -> Iterator[Tokens]:
    """The tokens of a source: what the tokenizer puts before a text, the text, and the end-of-text token."""
    end = tokenizer.eos_token_id
    for piece in source.read():
        if not piece.text.strip():
            continue
        # verbose=False: a document longer than the model was trained on is cut here, and no mistake
        ids = list(tokenizer(piece.text, verbose=False, add_special_tokens=piece.begins)["input_ids"])
        if piece.ends and end is not None and ids[-1:] != [end]:
            ids.append(end)
        yield Tokens(ids, piece.begins)


def concatenated(stream: Iterator[Tokens], length: int) -> Iterator[Row]:
    """Rows of `length` tokens cut from all documents one after another; what is left at the end is dropped."""
    held: list[int] = []
    for ids, _ in stream:
        held += ids
        whole = len(held) - len(held) % length
        for at in range(0, whole, length):
            row = torch.tensor(held[at : at + length])
            yield {"input_ids": row, "labels": row.clone()}
        held = held[whole:]


def packed(stream: Iterator[Tokens], length: int) -> Iterator[Row]:
    """The same rows with `position_ids` that restart at each document, and no label on a document's first token.

    A document that does not fit goes on in the next row, again from position 0.
    """
    held: list[int] = []
    first: list[bool] = []
    for ids, begins in stream:
        held += ids
        first += [begins, *[False] * (len(ids) - 1)]
        whole = len(held) - len(held) % length
        for at in range(0, whole, length):
            yield packed_row(torch.tensor(held[at : at + length]), torch.tensor(first[at : at + length]))
        held, first = held[whole:], first[whole:]


def packed_row(ids: Tensor, first: Tensor) -> Row:
    """One packed row (n,) from its ids and from where documents begin."""
    first[0] = True
    at = torch.arange(len(ids))
    starts = torch.where(first, at, 0).cummax(0).values
    return {"input_ids": ids, "labels": ids.masked_fill(first, IGNORED), "position_ids": at - starts}


def skipping(rng: random.Random, length: int, target: int, chunks: int) -> Tensor:
    """Positions (length,) of PoSE: `chunks` pieces, each moved on by a skip; ascending, below `target`.

    With u_0 = 0 and u_i drawn uniformly from [u_{i-1}, target - length], token t of piece i stands at t + u_i
    (Zhu et al. 2023, PoSE, 2309.10400, section 3.2; the text of the pieces stays contiguous).
    """
    cuts = sorted(rng.sample(range(1, length), min(chunks, length) - 1))
    skips, u = torch.zeros(length, dtype=torch.long), 0
    for cut in cuts:
        u = rng.randint(u, target - length)
        skips[cut:] = u
    return torch.arange(length) + skips


def scattered(rng: random.Random, length: int, target: int) -> Tensor:
    """Positions (length,) of randomised encodings: `length` of 0 … target - 1 without repeats, ascending.

    Only their order tells where a token stands, and far positions are met in training (Ruoss et al. 2023, Randomized
    Positional Encodings Boost Length Generalization of Transformers, 2305.16843, section 3).
    """
    return torch.tensor(sorted(rng.sample(range(target), length)))


def answered(name: str, tokenizer: Any, settings: DataSettings, rng: random.Random, seed: int) -> Iterator[Row]:
    """One pass of a task's documents, each with its answer: the task's own lengths, up to `max_length` tokens."""
    from hf_posenc.eval_tasks.tasks import documents

    longest = settings.max_length
    made: list[Any] = []
    for i, length in enumerate([longest, *(rng.randint(longest // 2, longest) for _ in range(4))]):
        make = partial(documents, name, tokenizer, num_samples=10, seed=seed + i, cache=False)
        try:
            found = make(length=length)
        except OptionError:  # the task needs more room
            if length == longest:
                raise
            found = make(length=longest)
        made += [document for document in found if not document.control]
    rng.shuffle(made)
    for document in made:
        prompt = tokenizer(document.prompt, verbose=False)["input_ids"]
        ids = torch.tensor(tokenizer(document.prompt + document.target, verbose=False)["input_ids"])
        labels = ids.clone()
        if settings.answer_only:
            labels[: min(len(prompt), len(ids) - 1)] = IGNORED
        yield {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@dataclass
class Windows(IterableDataset[Row]):
    """An endless stream of rows: pass after pass over the source, each drawn in an order of its own.

    The stream is a function of source, tokenizer, settings and seed alone, so that a resumed run finds its place.
    """

    source: Source | None
    tokenizer: Any
    settings: DataSettings
    seed: int = 0
    target: int | None = None

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        step, start = (1, 0) if worker is None else (worker.num_workers, worker.id)
        rows = itertools.chain.from_iterable(self.one_pass(number) for number in itertools.count())
        return itertools.islice(rows, start, None, step)

    def one_pass(self, number: int) -> Iterator[Row]:
        """The rows of one pass; raises `OptionError` where there is not one."""
        rng = random.Random(f"{self.seed}/{number}")
        rows = drawn(self.cut(number, rng), self.settings.shuffle, rng)
        first = next(rows, None)
        if first is None:
            raise OptionError(self.too_little())
        return itertools.chain([first], rows)

    def cut(self, number: int, rng: random.Random) -> Iterator[Row]:
        """Rows in the source's own order."""
        length, mode = self.settings.max_length, self.settings.mode
        if mode == "task":
            seed = TRAINING_SEEDS + 1000 * self.seed + 5 * number
            return answered(self.settings.source[0].removeprefix("task:"), self.tokenizer, self.settings, rng, seed)
        assert self.source is not None
        stream = tokenized(self.source, self.tokenizer)
        if mode == "packed":
            return packed(stream, length)
        rows = concatenated(stream, length)
        if mode == "concat":
            return rows
        assert self.target is not None
        place: Callable[[], Tensor] = partial(skipping, rng, length, self.target, self.settings.chunks)
        if mode == "randomized":
            place = partial(scattered, rng, length, self.target)
        return (
            {**row, "position_ids": place(), "attention_mask": torch.ones(length, dtype=torch.long)} for row in rows
        )

    def too_little(self) -> str:
        """Why there is no row."""
        assert self.source is not None
        count = sum(len(ids) for ids, _ in tokenized(self.source, self.tokenizer))
        if count == 0:
            return f"no text: {self.source.name} holds nothing but blanks"
        return (
            f"the text of {self.source.name} has {count} tokens, less than one window of {self.settings.max_length}; "
            f"give more text, or max_length={count} or less"
        )


def drawn(rows: Iterator[Row], size: int, rng: random.Random) -> Iterator[Row]:
    """`rows` in another order: each is drawn from the next `size` that have not been."""
    held: list[Row] = []
    for row in rows:
        held.append(row)
        if len(held) >= size:
            at = rng.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            yield held.pop()
    rng.shuffle(held)
    yield from held
