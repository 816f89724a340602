"""Words, numbers and identifiers that no reader can guess: made from syllables by a seeded generator.

The project's own: no word list is shipped, so nothing here is taken from one. `random.Random` seeded with a string
gives the same stream on every machine.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Collection


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _split("b d f g h j k l m n p r s t v z br dr gr kl kr pl st tr")
_VOWELS = _split("a e i o u ai ea oo")
_CODAS = ("", "", "", *_split("l m n r s t"))


def word(rng: random.Random) -> str:
    """Two or three syllables, 4 to 14 lower-case letters; about 10^8 of them."""
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2 + (rng.random() < 0.4))]
    return "".join(syllables) + rng.choice(_CODAS)


def distinct_words(rng: random.Random, n: int, apart_from: Collection[str] = ()) -> list[str]:
    """`n` words, none of which is within another of them or of `apart_from`: answers are found as substrings."""
    found: list[str] = []
    while len(found) < n:
        made = word(rng)
        if not any(made in other or other in made for other in (*found, *apart_from)):
            found.append(made)
    return found


def hyphenated(rng: random.Random) -> str:
    """A key of two words, `talo-miren`."""
    return f"{word(rng)}-{word(rng)}"


def number(rng: random.Random, digits: int = 7) -> str:
    """A number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """A version-4 UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, n: int, k: int, alphabet: str = string.ascii_uppercase) -> list[str]:
    """`n` distinct strings of `k` random letters."""
    found: dict[str, None] = {}
    while len(found) < n:
        found["".join(rng.choice(alphabet) for _ in range(k))] = None
    return list(found)


def sentence(rng: random.Random) -> str:
    """Six to ten unguessable words, a capital and a full stop."""
    text = " ".join(word(rng) for _ in range(rng.randrange(6, 11)))
    return f"{text.capitalize()}."
