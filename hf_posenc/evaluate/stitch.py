"""Neighbouring blocks of a text, tokenised apart, put together to what the tokenizer makes of the whole.

A block is tokenised with the end of the block before it as left context. Near a cut a tokenizer may see another word
than in the whole text; further away it does not. So two neighbours are joined in the middle of a run of tokens that
both have, at the same characters; where there is no such run the overlap grows, at worst to the whole text.

Why that is exact: what stands between a tokenizer's words does not act across them, so neighbours that both see a word
begin at one character agree from there on. Within a word, a sequence of BPE tokens is the right one if each pair of
neighbours is, and every pair is one that the left or the right block holds. Within a word of another model there is no
join: Unigram breaks a tie by the rounding of a sum that goes back to the beginning of the word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OVERLAP = 4096
"""Characters of left context that a block is first given."""
AGREE = 8
"""Tokens on either side of a join that both blocks must have alike, where the join is between two words."""
AGREE_INSIDE = 64
"""The same where the join is inside of a word: some tokenizers take a whole text for one."""


@dataclass(frozen=True)
class _Piece:
    """Tokens of the characters `start` ... `stop` of a text, with what each stands for."""

    start: int
    stop: int
    ids: list[int]
    spans: list[tuple[int, int]]
    """The characters of each token, counted in `start` ... `stop` from 0."""
    words: list[int | None]

    def places(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """(first character, last character, id) of tokens `first` ... `last` - 1, counted in the whole text."""
        chosen = zip(self.spans[first:last], self.ids[first:last])
        return [(self.start + a, self.start + b, token) for (a, b), token in chosen]

    def begins_word(self, index: int) -> bool:
        return self.words[index] != self.words[index - 1]


@dataclass(frozen=True)
class _Run:
    """Tokens `first` ... `last` - 1 of a left piece, which are tokens `first` + `shift` ... of the right one."""

    first: int = 0
    last: int = 0
    shift: int = 0

    def __len__(self) -> int:
        return self.last - self.first


def _first_from(piece: _Piece, at: int) -> int:
    """The first token of `piece` that begins at character `at` of the whole text or later."""
    return bisect_left(piece.spans, at - piece.start, key=lambda span: span[0])


def _encode(tokenizer: Any, text: str, start: int) -> _Piece:
    # verbose=False: a text longer than the model was trained on is the point here, not a mistake to be warned of.
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _Piece(start, start + len(text), made["input_ids"], made["offset_mapping"], made.word_ids(0))


def _join(left: _Piece, right: _Piece, *, inside: bool) -> tuple[int, int] | None:
    """(i, j) such that `left` up to token i and `right` from token j on are the tokens of both texts together.

    None where no run of tokens that both have is long enough to tell; `inside` of a word only where that is allowed.
    """
    tail = _first_from(left, right.start)
    common = right.places(0, _first_from(right, left.stop))
    at = {place: j for j, place in enumerate(common)}
    run = longest = _Run()
    for i, place in enumerate(left.places(tail, len(left.ids)), start=tail):
        j = at.get(place)
        if j is None:
            run = _Run()
            continue
        run = _Run(run.first if run and run.shift == j - i else i, i + 1, j - i)
        longest = run if len(run) > len(longest) else longest
    middle = (longest.first + longest.last) // 2
    for i in sorted(range(longest.first + AGREE, longest.last - AGREE), key=lambda i: abs(i - middle)):
        if left.begins_word(i) and right.begins_word(i + longest.shift):
            return i, i + longest.shift
    return (middle, middle + longest.shift) if inside and len(longest) >= 2 * AGREE_INSIDE else None


def _specials(tokenizer: Any, sample: str) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    for text in (sample, "a", "1", "."):  # of blanks alone nothing may be left to stand between them
        made = tokenizer(text, return_special_tokens_mask=True, verbose=False)
        ids, mask = made["input_ids"], made["special_tokens_mask"]
        if 0 in mask:
            return ids[: mask.index(0)], ids[len(ids) - mask[::-1].index(0) :]
    return ids, []


def token_blocks(texts: Iterator[str], tokenizer: Any, *, overlap: int = OVERLAP) -> Iterator[Tensor]:
    """The tokens of the text whose pieces are `texts`, special tokens too, as int64 tensors in order.

    Put together they are what the tokenizer makes of the whole text. The whole text, once, goes to a tokenizer that
    does not tell which characters a token stands for (one that is not of the library tokenizers), and to one that takes
    it for a single word which cannot be joined.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inside = type(getattr(backend, "model", None)).__name__ == "BPE"
    if not getattr(tokenizer, "is_fast", False) or not (inside or getattr(backend, "pre_tokenizer", None)):
        yield torch.tensor(tokenizer("".join(texts), verbose=False)["input_ids"], dtype=torch.long)
        return
    text = next(texts, "")
    before, after = _specials(tokenizer, text[:1000])
    held, ready = _encode(tokenizer, text, 0), 0  # the last piece, and how many of its tokens are given out
    yield torch.tensor(before, dtype=torch.long)
    wanted = 0  # characters to read before the next try
    for new in texts:
        text += new
        if len(text) < wanted:
            continue
        found, piece = _next_piece(tokenizer, held, text, ready, overlap, inside)
        if found is None:
            # Twice as much before it is all tokenised again: twice the work at most, however often it fails.
            held, wanted = piece, 2 * len(text)
            continue
        yield torch.tensor(held.ids[ready : found[0]], dtype=torch.long)
        text, held, ready, wanted = text[piece.start - held.start :], piece, found[1], 0
    if held.stop - held.start < len(text):
        held = _encode(tokenizer, text, held.start)
    yield torch.tensor(held.ids[ready:] + after, dtype=torch.long)


def _next_piece(
    tokenizer: Any, held: _Piece, text: str, ready: int, overlap: int, inside: bool
) -> tuple[tuple[int, int] | None, _Piece]:
    """The piece after `held`, to the end of `text`, and where they join; else `held` again, made of all of `text`."""
    while (start := held.stop - overlap) > held.start:
        piece = _encode(tokenizer, text[start - held.start :], start)
        found = _join(held, piece, inside=inside)
        if found is not None and found[0] >= ready:
            return found, piece
        overlap *= 2
    piece = _encode(tokenizer, text, held.start)
    assert piece.ids[:ready] == held.ids[:ready], "tokens changed that two blocks had alike"
    return None, piece
