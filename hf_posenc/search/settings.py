"""What decides a search, beside model and text, and what does not: its time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from hf_posenc.errors import OptionError, unknown

Fitness = Literal["perplexity", "passkey"]
FITNESSES: tuple[Fitness, ...] = get_args(Fitness)
GENERATIONS = 20
"""Where neither time nor generations are given."""

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class SearchSettings:
    """What another search would have otherwise: two runs in one folder must agree in it.

    `factor`: target length / trained length L. `samples`: texts of the target length a candidate is measured on, and as
    many others for the judgement. A generation is `mutations` + `crossovers` new candidates; the `population` best of
    all so far are the parents of the next. `probability`: of a pair to be changed by a mutation.
    """

    factor: float
    fitness: Fitness = "perplexity"
    samples: int = 4
    population: int = 16
    mutations: int = 8
    crossovers: int = 8
    probability: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        self.require(number and 1 < self.factor < math.inf, "factor", "target length / trained length, above 1")
        if self.fitness not in FITNESSES:
            raise unknown("fitness", self.fitness, FITNESSES)
        for name, least in (("samples", 1), ("population", 2), ("mutations", 0), ("crossovers", 0), ("seed", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            self.require(whole and value >= least, name, f"a whole number, at least {least}")
        self.require(self.mutations + self.crossovers > 0, "mutations", "a generation at least one new candidate")
        self.require(0 < self.probability <= 1, "probability", "a share above 0, at most 1")

    def require(self, ok: bool, name: str, allowed: str) -> None:
        """Raise `OptionError` for one of the settings unless `ok`."""
        if not ok:
            raise OptionError(f"search: {name}={getattr(self, name)!r}; give {allowed}")


def parse_budget(budget: str | float | None) -> float | None:
    """Seconds of `30m`, `2h`, `90s` or a number of seconds; raises `OptionError` for anything else, and for none."""
    if budget is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(budget))
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found is not None else 0.0
    if isinstance(budget, bool) or not 0 < seconds < math.inf:
        raise OptionError(f"budget={budget!r} leaves no time to search; give a time such as 90s, 30m or 2h")
    return seconds


def check_generations(generations: int | None) -> None:
    """Raise `OptionError` unless this is a number of generations, or None."""
    whole = isinstance(generations, int) and not isinstance(generations, bool)
    if generations is not None and not (whole and generations >= 1):
        raise OptionError(f"generations={generations!r}; give a whole number, at least 1")
