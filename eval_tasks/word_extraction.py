"""Words counted over the whole context: RULER's common words (`cwe`) and frequent words (`fwe`).

Prompts and set-ups as in Hsieh et al., "RULER", 2024 (arXiv 2404.06654); the words are the project's own. The answer is
everywhere, so there is no depth.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from . import words
from .passkey import Counter
from .sizing import Answer, Document, Place, finish

CWE_MAX_NEW_TOKENS, FWE_MAX_NEW_TOKENS = 120, 50
COMMON = 10
SHORT = 4096
_ZETA_2 = math.pi**2 / 6
_LEAST = 60  # with fewer draws, ranks 2 to 5 would not differ in number

_CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
_CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
_FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
_FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


def numbered(items: Sequence[str]) -> str:
    """`1. first 2. second ...`"""
    return " ".join(f"{at}. {item}" for at, item in enumerate(items, 1))


def _word_list(common: Sequence[str], uncommon: Sequence[str], often: int, seldom: int, seed: str) -> str:
    items = [*common] * often + [*uncommon] * seldom
    # A generator of its own: the order is then a function of the list's size, however often it is drawn.
    random.Random(f"{seed}/{len(items)}").shuffle(items)
    return _CWE_HEAD + numbered(items) + _CWE_QUESTION


def build_cwe(place: Place, count: Counter, *, rng: random.Random) -> Document:
    """Ten words 30 times each among others 3 times each (shorter than 4096 tokens: 6 and 1), after a solved example."""
    often, seldom = (30, 3) if place.length >= SHORT else (6, 1)
    example_often, example_seldom, example_others = (10, 3, 30) if place.length >= SHORT else (3, 1, 10)
    seed = str(rng.random())
    known, common = words.distinct_words(rng, COMMON), words.distinct_words(rng, COMMON)
    others = words.distinct_words(rng, example_others, known)
    example = _word_list(known, others, example_often, example_seldom, seed) + _CWE_PREFIX
    uncommon: dict[str, None] = {}

    def render(n: int) -> str:
        while len(uncommon) < n:
            made = words.word(rng)
            if not any(made in other or other in made for other in common):
                uncommon[made] = None
        listed = _word_list(common, list(uncommon)[:n], often, seldom, seed)
        return f"{example} {numbered(known)}\n{listed}"

    answer = Answer(_CWE_PREFIX, common, f" {numbered(common)}", CWE_MAX_NEW_TOKENS)
    return finish(place, answer, render, count)


def build_fwe(place: Place, count: Counter, *, rng: random.Random) -> Document:
    """Coded words drawn by Zipf's law, share k^-2 / zeta(2); rank 1 is dots, ranks 2 to 4 are the answer."""
    seed = str(rng.random())
    coded = words.letters(rng, max(place.length // 50, 20), 6, string.ascii_lowercase)
    ranked = ["...", *coded[1:]]

    def render(n: int) -> str:
        draws = _LEAST + n
        items = [w for k, w in enumerate(ranked, 1) for _ in range(int(draws / (k * k * _ZETA_2)))]
        random.Random(f"{seed}/{len(items)}").shuffle(items)
        return _FWE_HEAD + " ".join(items) + _FWE_QUESTION

    answer = Answer(_FWE_PREFIX, ranked[1:4], f" {', '.join(ranked[1:4])}", FWE_MAX_NEW_TOKENS)
    return finish(place, answer, render, count)
