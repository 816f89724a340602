"""The project's own little language: seeded English-like prose that states facts and recalls them later.

Everything here draws from `random.Random` seeded with a string, whose stream Python fixes on every machine, so
a document is named by its split, seed and size alone. Text is plain ASCII: one byte a character.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hf_posenc.errors import OptionError

Split = Literal["train", "held-out"]


def _words(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


NAMES = _words(
    "Ada Anton Bela Boris Carla Cyril Dora Edgar Elin Felix Flora Gustav Hana Hugo Ida Ivan Jana Jonas Karin Karl "
    "Lena Lukas Mara Milo Nadia Nils Olga Oskar Paula Pavel Petra Rosa Ruben Selma Simon Tilda Tomas Vera Viktor Zora"
)
PLACES = _words(
    "Alder Bay, Birch Hill, Cold Ford, Crow Lake, Dry Creek, East Mill, Fox Hollow, Glass Town, Grey Harbor, "
    "High Moor, Iron Bridge, Kite Rock, Long Meadow, Moss Gate, North Well, Oak Shore, Pine Ridge, Red Quarry, "
    "Salt Marsh, Stone Pass, Swan Island, Thorn Field, West Port, Wolf Valley",
    ", ",
)
THINGS = _words("anchor basket bell candle chest clock compass drum key ladder lantern map mirror piano ring saddle")
# Few words, and in none of them does "is" go on: a tiny model then reads them alike under every encoding, so that
# what a changed encoding costs is seen in recall rather than in spelling.
ADJECTIVES = _words("bright cold dark green little long old pale quiet warm")
NOUNS = _words("bird boat child cloud dog door farmer field garden horse lamp moon river road tree wind")
VERBS = _words("burns falls glows grows hides moves sleeps turns waits wakes")
WHERE = _words("all day, at night, before dawn, in winter, near the road", ", ")


@dataclass(frozen=True)
class Fact:
    """One fact: how it is first stated, and sentences that later say the same value again."""

    statement: str
    recalls: tuple[str, ...]


def filler_sentence(rng: random.Random) -> str:
    """A short sentence that states nothing: no digits, no names, 18 to 39 characters."""
    sentence = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)}"
    if rng.random() < 0.4:
        sentence += f" {rng.choice(WHERE)}"
    return sentence + "."


def new_fact(rng: random.Random, name: str) -> Fact:
    """A fact about `name`; mostly a number, which no reader can guess, else a place or a thing."""
    kind = rng.random()
    if kind < 0.75:
        number = str(rng.randrange(10000, 100000))
        return Fact(
            f"The number of {name} is {number}.",
            (
                f"The number of {name} is {number}.",
                f"{name} has the number {number}.",
                f"What is the number of {name}? It is {number}.",
            ),
        )
    if kind < 0.9:
        place = rng.choice(PLACES)
        return Fact(
            f"{name} lives in {place}.",
            (f"{name} lives in {place}.", f"Where does {name} live? In {place}."),
        )
    thing = f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"
    return Fact(
        f"{name} owns a {thing}.",
        (f"{name} owns a {thing}.", f"What does {name} own? A {thing}."),
    )


def sentences(rng: random.Random, max_facts: int) -> Iterator[str]:
    """The endless sentences of one document: at most `max_facts` facts, each recalled again and again.

    The first sentences state more than they recall; once `max_facts` are out, six sentences in ten recall and the
    others are filler, so that a reader who can look far back guesses the digits and one who cannot does not.
    """
    names = list(NAMES)
    facts: list[Fact] = []
    while True:
        draw = rng.random()
        if len(facts) < max_facts and (not facts or draw < 0.3):
            name = names.pop(rng.randrange(len(names)))
            facts.append(new_fact(rng, name))
            yield facts[-1].statement
        elif draw < 0.75:
            yield rng.choice(rng.choice(facts).recalls)
        else:
            yield filler_sentence(rng)


def document(seed: int, n_bytes: int, *, split: Split = "train") -> str:
    """One document of exactly `n_bytes` ASCII characters, cut where the size is reached.

    Shape: sentences joined by one space. The same (split, seed) gives the same beginning at every size, so a
    longer document continues the shorter one. `split="held-out"` draws from seeds that training never uses.

    Raises:
        OptionError: `n_bytes` is below 1 or the split is unknown.
    """
    if n_bytes < 1:
        raise OptionError(f"n_bytes={n_bytes}: a document has at least 1 byte")
    if split not in ("train", "held-out"):
        raise OptionError(f"split={split!r}: allowed are 'train' and 'held-out'")
    rng = random.Random(f"document/{split}/{seed}")
    stream = sentences(rng, max_facts=rng.randrange(1, 7))
    parts = [next(stream)]
    size = len(parts[0])
    while size < n_bytes:
        parts.append(next(stream))
        size += 1 + len(parts[-1])
    return " ".join(parts)[:n_bytes]


def ledger(rng: random.Random, n_bytes: int) -> str:
    """`n_bytes` characters of bare `name: number.` entries, each said again and again: dense recall in little room."""
    facts = [f"{rng.choice(NAMES)}: {rng.randrange(10000, 100000)}." for _ in range(max(1, n_bytes // 40))]
    lines = [rng.choice(facts) for _ in range(n_bytes // 11 + 1)]
    return " ".join(lines)[:n_bytes]


def repeated_segment(rng: random.Random, n_bytes: int) -> str:
    """`n_bytes` characters in which one random segment comes back until the end: the plainest lesson in copying."""
    alphabet = "0123456789" if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz 0123456789"
    period = rng.randrange(max(4, n_bytes // 16), max(5, n_bytes // 2))
    segment = "".join(rng.choice(alphabet) for _ in range(period))
    return (segment * (n_bytes // period + 1))[:n_bytes]
