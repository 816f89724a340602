"""Passkey retrieval: a five-digit key hidden in filler, asked for at the end.

Form of the prompt: Mohtashami and Jaggi, "Landmark Attention", 2023 (arXiv 2305.16300); the filler is the project's
own. Published variants draw the depth at random; here depths are a grid, so that a score can be read by depth.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.errors import OptionError
from hf_posenc.eval_tasks.text import filler_sentence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 10
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
INSTRUCTION = "Find the key."
QUESTION = "What is the pass key? The pass key is"

Counter = Callable[[str], int]


@dataclass(frozen=True)
class PasskeyDocument:
    """One prompt with its answer.

    `tokens` counts the prompt as the tokenizer encodes it, specials included; `tokens + MAX_NEW_TOKENS <= length`.
    `depth` is the share of the filler that stands before the key, 0 (first) to 1 (last).
    """

    prompt: str
    key: str
    length: int
    depth: float
    tokens: int


def passkey_prompt(filler: list[str], key: str, depth: float) -> str:
    """The instruction line, then filler with the key at `depth` of its sentences, then the question."""
    before = round(depth * len(filler))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    return f"{INSTRUCTION}\n" + " ".join([*filler[:before], needle, *filler[before:], QUESTION])


def fill_to_size(render: Callable[[int], str], count: Counter, budget: int) -> tuple[str, int]:
    """The longest `render(n)` of at most `budget` tokens, and its size; n is a number of filler sentences.

    `render(0)` must fit. Interpolates between a size that fits and one that does not; sentences are alike in
    length, so a few counts suffice at any size, and one sentence more would not fit.
    """
    low, low_size = 0, count(render(0))
    high = 8
    while (high_size := count(render(high))) <= budget:
        low, low_size = high, high_size
        high = max(2 * low, int(1.1 * low * budget / low_size)) if low_size else 2 * low
    while high - low > 1:
        guess = low + (budget - low_size) * (high - low) // max(high_size - low_size, 1)
        middle = min(max(guess, low + 1), high - 1)
        size = count(render(middle))
        if size <= budget:
            low, low_size = middle, size
        else:
            high, high_size = middle, size
    return render(low), low_size


def build_passkey(count: Counter, length: int, *, rng: random.Random, depth: float) -> PasskeyDocument:
    """One document for `length` tokens as `count` counts them.

    Raises:
        OptionError: `length` has no room for the prompt without filler; says the smallest that has.
    """
    key = str(rng.randrange(10000, 100000))
    filler: list[str] = []

    def render(n: int) -> str:
        while len(filler) < n:
            filler.append(filler_sentence(rng))
        return passkey_prompt(filler[:n], key, depth)

    bare = count(render(0))
    if bare + MAX_NEW_TOKENS > length:
        raise OptionError(
            f"length={length} is too short for a passkey document: with this tokenizer the prompt without filler has "
            f"{bare} tokens and the answer {MAX_NEW_TOKENS}, so give at least {bare + MAX_NEW_TOKENS}"
        )
    prompt, tokens = fill_to_size(render, count, length - MAX_NEW_TOKENS)
    return PasskeyDocument(prompt, key, length, depth, tokens)


def passkey_documents(
    tokenizer: PreTrainedTokenizerBase, length: int, num_samples: int = 20, seed: int = 0
) -> list[PasskeyDocument]:
    """`num_samples` documents of at most `length` tokens, prompt, specials and answer together.

    Document i depends on (seed, length, i) alone and has depth `DEPTHS[i % len(DEPTHS)]`.

    Raises:
        OptionError: `length` is too short (says the minimum) or `num_samples` is below 1.
    """
    if num_samples < 1:
        raise OptionError(f"num_samples={num_samples}: give at least 1")

    def count(text: str) -> int:
        # verbose=False: a tokenizer's own warning about long inputs says nothing about the model at hand.
        return len(tokenizer(text, verbose=False)["input_ids"])

    return [
        build_passkey(count, length, rng=random.Random(f"passkey/{seed}/{length}/{i}"), depth=DEPTHS[i % len(DEPTHS)])
        for i in range(num_samples)
    ]


def passkey_score(text: str, key: str) -> bool:
    """Whether the first integer of a continuation is the key; digits alone count, so "12345." is right."""
    first = re.search(r"\d+", text)
    return first is not None and first.group() == key
