"""What is searched: one rescale factor a pair, never falling from fast pairs to slow ones, and one temperature.

After Ding et al. 2024 (LongRoPE, 2402.13753, section 3.3 and algorithm 1): mutation and crossover of the best, with the
monotone order kept. Other than there, the temperature is searched with the factors, changes are drawn on a logarithmic
scale around the parent, and there is no number of first tokens that are left unscaled.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

from hf_posenc.encodings import Linear, LongRope, Ntk, Rotation, ScaledRotation, Yarn
from hf_posenc.patches.native_rope import rescale_factors

from .settings import SearchSettings

ROOM = 1.25  # the largest rescale factor, as a multiple of `factor`: the paper's search space
HOTTEST = 2.0
STEPS = (0.03, 0.1, 0.3)  # standard deviations of the logarithm of a change
SHORT = 8  # YaRN's beta_fast for a model of a few hundred tokens, in which hardly a pair turns 32 times


@dataclass(frozen=True)
class Candidate:
    """Rescale factors lambda_i, one a pair, the fastest first, and the factor on cos and sin."""

    rescale: tuple[float, ...]
    attention_factor: float

    @property
    def key(self) -> str:
        """The candidate as text, by which it is known on disk."""
        return " ".join(f"{value:.6g}" for value in (self.attention_factor, *self.rescale))

    @classmethod
    def of(cls, key: str) -> Candidate:
        """The candidate that has this key."""
        factor, *rescale = map(float, key.split())
        return cls(tuple(rescale), factor)

    def encoding(self, like: Rotation, factor: float) -> LongRope:
        """The host library's own longrope, with the same list on both sides of the trained length."""
        return LongRope(
            rope_theta=like.theta,
            original_max_position_embeddings=like.length,
            factor=factor,
            short_factor=self.rescale,
            long_factor=self.rescale,
            attention_factor=self.attention_factor,
            schedule="whole",
        )


def tidy(rescale: list[float], attention_factor: float, factor: float) -> Candidate:
    """The nearest candidate that keeps to the search space, with numbers of six digits."""
    within = (min(max(value, 1.0), ROOM * factor) for value in itertools.accumulate(rescale, max))
    return Candidate.of(Candidate(tuple(within), min(max(attention_factor, 1.0), HOTTEST)).key)


def seeds(like: Rotation, dim: int, factor: float) -> dict[str, Candidate]:
    """The known encodings of this `factor`, by name, from which a search starts."""
    host: dict[str, Any] = {"rope_theta": like.theta, "original_max_position_embeddings": like.length}
    kinds: dict[str, type[ScaledRotation]] = {"linear": Linear, "ntk": Ntk, "yarn": Yarn}
    known: dict[str, Rotation] = {name: kind(factor=factor, **host) for name, kind in kinds.items()}
    known[f"yarn, beta_fast={SHORT}"] = known["yarn"].but(beta_fast=SHORT)
    found = {}
    for name, encoding in known.items():
        inv_freq, attention_factor = encoding.inv_freq(dim)
        rescale = tuple(rescale_factors(inv_freq, like.theta).tolist())
        found[name] = Candidate.of(Candidate(rescale, attention_factor).key)
    return found


def mutated(parent: Candidate, rng: random.Random, settings: SearchSettings) -> Candidate:
    """Some pairs moved by a random step, or all of them along their whole curve; now and then the temperature, too."""
    step = rng.choice(STEPS)
    if rng.random() < settings.probability:
        power = math.exp(rng.gauss(0, step))
        rescale = [value**power for value in parent.rescale]
    else:
        moves = [rng.gauss(0, step) if rng.random() < settings.probability else 0.0 for _ in parent.rescale]
        rescale = [value * math.exp(move) for value, move in zip(parent.rescale, moves)]
    hotter = rng.gauss(0, step / 3) if rng.random() < settings.probability else 0.0
    return tidy(rescale, parent.attention_factor * math.exp(hotter), settings.factor)


def crossed(one: Candidate, other: Candidate, rng: random.Random, settings: SearchSettings) -> Candidate:
    """Each number from one of two parents, or all of them between the two."""
    if rng.random() < 0.5:
        share = rng.random()
        pairs = zip((one.attention_factor, *one.rescale), (other.attention_factor, *other.rescale))
        attention_factor, *rescale = [a ** (1 - share) * b**share for a, b in pairs]
        return tidy(rescale, attention_factor, settings.factor)
    rescale = [rng.choice(values) for values in zip(one.rescale, other.rescale)]
    return tidy(rescale, rng.choice((one.attention_factor, other.attention_factor)), settings.factor)


def children(parents: list[Candidate], number: int, settings: SearchSettings) -> list[Candidate]:
    """The new candidates of one generation: a function of the parents, best first, and of the seed."""
    rng = random.Random(f"search/{settings.seed}/{number}")
    weights = [1 / (1 + rank) for rank in range(len(parents))]
    found = []
    for kind in ["mutation"] * settings.mutations + ["crossover"] * settings.crossovers:
        one, other = rng.choices(parents, weights, k=2)
        found.append(
            mutated(one, rng, settings) if kind == "mutation" or one == other else crossed(one, other, rng, settings)
        )
    return found
