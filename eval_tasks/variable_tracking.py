"""Variable tracking, RULER's `vt`: one chain of assignments through four hops, scattered over noise.

Prompt and set-up as in Hsieh et al., "RULER", 2024 (arXiv 2404.06654), with one solved example before it; the noise is
the project's own. The first assignment lies at the depth of the grid, the others evenly between it and the end.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

from . import words
from .niah import noise
from .passkey import Counter
from .sizing import Answer, Document, Place, Stream, finish, insert

MAX_NEW_TOKENS = 30
HOPS = 4
_EXAMPLE_WORDS = 60
_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the value "
    "{value}, they are:"
)


class _Chain(NamedTuple):
    value: str
    variables: list[str]
    placed: list[tuple[float, str]]

    def ask(self, context: list[str]) -> str:
        return _HEAD + insert(context, self.placed) + _QUESTION.format(value=self.value)

    def prefix(self) -> str:
        return _PREFIX.format(n=len(self.variables), value=self.value)


def _chain(rng: random.Random, letters: int, depth: float) -> _Chain:
    value = words.number(rng, 5)
    names = words.letters(rng, HOPS + 1, letters)
    lines = [f"VAR {names[0]} = {value}\n"]
    lines += [f"VAR {new} = VAR {old}\n" for old, new in pairwise(names)]
    depths = [depth + (1 - depth) * j / len(lines) for j in range(len(lines))]
    return _Chain(value, names, list(zip(depths, lines)))


def build(place: Place, count: Counter, *, rng: random.Random, depth: float) -> Document:
    """One document; the references are the five variables, in the order of the chain."""
    solved, asked = _chain(rng, 3, rng.random()), _chain(rng, 5, depth)
    stream = Stream(noise())
    example = f"{solved.ask(stream.take(_EXAMPLE_WORDS))}{solved.prefix()} {' '.join(solved.variables)}\n\n\n"

    def render(n: int) -> str:
        return example + asked.ask(stream.take(n))

    answer = Answer(asked.prefix(), asked.variables, " " + " ".join(asked.variables), MAX_NEW_TOKENS)
    return finish(place, answer, render, count, depth)
