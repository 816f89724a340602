"""Questions over documents, RULER's `qa_1` and `qa_2`: the ones that answer lie among others of a set of the user's.

Prompt as in Hsieh et al., "RULER", 2024 (arXiv 2404.06654), where qa_1 is SQuAD and qa_2 is HotpotQA. The documents
that answer stand together at the depth of the grid; the last of the others is cut so that the size fits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

from .passkey import Counter
from .sizing import Answer, Document, Place, Stream, finish
from .sources import Question

MAX_NEW_TOKENS = 32
_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_HEAD = f"{_TASK}\n\nThe following are given documents.\n\n"


def build(place: Place, count: Counter, *, rng: random.Random, depth: float, questions: Sequence[Question]) -> Document:
    """One document on the question of its index in the set, modulo the set's size; references are its answers."""
    asked = questions[place.index % len(questions)]
    others = sorted({text for question in questions for text in question.documents} - set(asked.documents))
    rng.shuffle(others)
    stream = Stream(cycle(others))

    def render(n: int) -> str:
        texts = stream.take(n)
        at = round(depth * len(texts))
        texts = [*texts[:at], *asked.documents, *texts[at:]]
        context = "\n\n".join(f"Document {i}:\n{text.strip()}" for i, text in enumerate(texts, 1))
        return f"{_HEAD}{context}\n\n{_TASK}\n\nQuestion: {asked.question}"

    answer = Answer("\nAnswer:", asked.answers, f" {asked.answers[0]}", MAX_NEW_TOKENS)
    return finish(place, answer, render, count, depth)
