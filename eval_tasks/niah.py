"""Needles in a haystack: RULER's eight retrieval tasks.

Prompts and set-ups as in Hsieh et al., "RULER", 2024 (arXiv 2404.06654); words and noise are the project's own, depths
are a grid. In `repeat` the haystack is one line again and again, in `essay` a text of the user's, in `needle`
nothing but other needles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from . import words
from .passkey import Counter
from .sizing import Answer, Document, Place, Stream, finish, insert

MAX_NEW_TOKENS = 128
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = ("The old boat waits.", "The cold river turns.", "The lamp glows at night.", "So it goes, on and on.")

Kind = Literal["words", "numbers", "uuids"]
_MAKE: dict[Kind, Callable[[random.Random], str]] = {
    "words": words.hyphenated,
    "numbers": words.number,
    "uuids": words.identifier,
}


@dataclass(frozen=True)
class Needles:
    """One set-up: what lies in which haystack. `queries` of `keys` keys are asked for, each with `values` values."""

    haystack: Literal["repeat", "essay", "needle"]
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


SETUPS = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_kind="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}


def noise() -> Iterator[str]:
    """The noise line without end, sentence by sentence."""
    return cycle([f"{sentence} " for sentence in NOISE[:-1]] + [f"{NOISE[-1]}\n"])


def _needle(setup: Needles, key: str, value: str) -> str:
    return NEEDLE.format(kind=setup.value_kind, key=key, value=value)


def _other_needles(setup: Needles, rng: random.Random, taken: Sequence[str]) -> Iterator[str]:
    while True:
        key, value = _MAKE[setup.key_kind](rng), _MAKE[setup.value_kind](rng)
        if key not in taken:
            yield _needle(setup, key, value) + "\n"


def _question(setup: Needles, asked: Sequence[str]) -> tuple[str, str, str]:
    """What stands before the context, after it, and the beginning of the answer."""
    listed = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    if setup.queries * setup.values == 1:
        kind = setup.value_kind.removesuffix("s")
        head = f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        question = f"What is the special magic {kind} for {listed} mentioned in the provided text?"
        prefix = f" The special magic {kind} for {listed} mentioned in the provided text is"
    else:
        kind = setup.value_kind
        head = f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        question = f"What are all the special magic {kind} for {listed} mentioned in the provided text?"
        prefix = f" The special magic {kind} for {listed} mentioned in the provided text are"
    return f"{head}I will quiz you about the {kind} afterwards.\n", f"\n{question}", prefix


def build(place: Place, count: Counter, *, rng: random.Random, depth: float, essay: Sequence[str] = ()) -> Document:
    """One document of a task of `SETUPS`; the first needle that is asked for lies at `depth`.

    `essay` holds the sentences of the user's text, for the set-ups whose haystack is one.
    """
    setup = SETUPS[place.task]
    keys = [_MAKE[setup.key_kind](rng) for _ in range(setup.keys)]
    pairs = [(key, _MAKE[setup.value_kind](rng)) for key in keys for _ in range(setup.values)]
    asked = keys[: setup.queries]
    answers = [value for key, value in pairs if key in asked]
    depths = [depth] + [rng.random() for _ in pairs[1:]]
    separator = " " if setup.haystack == "essay" else "\n"
    placed = [(at, _needle(setup, *pair) + separator) for at, pair in zip(depths, pairs)]
    if setup.haystack == "repeat":
        stream = Stream(noise())
    elif setup.haystack == "essay":
        stream = Stream(cycle(f"{sentence} " for sentence in essay))
    else:
        stream = Stream(_other_needles(setup, rng, keys))
    head, question, prefix = _question(setup, asked)

    def render(n: int) -> str:
        return head + insert(stream.take(n), placed) + question

    answer = Answer(prefix, answers, " " + ", ".join(answers), MAX_NEW_TOKENS)
    return finish(place, answer, render, count, depth)
