"""Scores of an answer, 0 to 1: RULER's two rules, the passkey's and the copy's.

Rules: Hsieh et al., "RULER", 2024 (arXiv 2404.06654), as its evaluation defines them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .passkey import passkey_score

Rule = Callable[[str, Sequence[str]], float]


def clean(prediction: str) -> str:
    """A prediction without control characters and outer blanks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def share_of_references(prediction: str, references: Sequence[str]) -> float:
    """Mean over references of (reference in prediction), whatever the case: every RULER task but qa."""
    text = clean(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def any_reference(prediction: str, references: Sequence[str]) -> float:
    """Maximum over references of (reference in prediction), whatever the case: qa, whose references are aliases."""
    text = clean(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def first_integer(prediction: str, references: Sequence[str]) -> float:
    """Whether the first integer is the key."""
    return float(passkey_score(prediction, references[0]))


def words_in_place(prediction: str, references: Sequence[str]) -> float:
    """Share of the reference's words that the prediction has in the same place."""
    wanted, given = references[0].split(), prediction.split()
    return sum(a == b for a, b in zip(wanted, given)) / len(wanted)
