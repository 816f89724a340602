"""Copy at a distance: unguessable words come a second time; how much does the first time help, and from how far?

gain = nll(words | nothing to copy from) - nll(words | seen `distance` tokens ago), nats a token. A reader that uses its
whole context gains the same at every distance; one whose positions fail gains nothing past its reach.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from . import words
from .passkey import Counter
from .sizing import Answer, Document, Place, Stream, finish, insert

CUE, COPIED = 2, 6
_HEAD = "Read the words below.\n"
_MARK = "\nOnce more: "


def _sentences(rng: random.Random) -> Iterator[str]:
    while True:
        yield f"{words.sentence(rng)} "


def build(place: Place, count: Counter, *, rng: random.Random, depth: float) -> list[Document]:
    """The document with the words at `depth` of its filler, and its control, whose words there are others."""
    segment, other = words.distinct_words(rng, CUE + COPIED), words.distinct_words(rng, CUE + COPIED)
    cue, rest = " ".join(segment[:CUE]), " ".join(segment[CUE:])
    stream = Stream(_sentences(rng))

    def make(seen: list[str]) -> Document:
        def render(n: int) -> str:
            return _HEAD + insert(stream.take(n), [(depth, f"Once: {' '.join(seen)}.\n")]) + _MARK + cue

        document = finish(place, Answer("", [rest], f" {rest}", 1), render, count, depth)
        first = " ".join(seen[:CUE])
        ahead = document.prompt[: document.prompt.index(first) + len(first)]
        return replace(document, distance=document.tokens - count(ahead), control=seen is other)

    return [make(segment), make(other)]
