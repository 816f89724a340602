"""A search on disk: every candidate as soon as it is measured, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import CheckpointError, OptionError

STATE = "search.json"
VERSION = 1
ANEW = "choose another folder, or search anew (resume=False, --restart)"


@dataclass
class State:
    """What has been measured, in order: a search is a function of `conditions`, so the rest follows from these.

    `seeds`: {name: candidate}; `generations`: the candidates of each, in order, the seeds being generation 0; `losses`:
    {candidate: mean nll, nats}; `seconds`: of all runs together; `result`: the judgement, when there is one.
    """

    conditions: dict[str, Any]
    seeds: dict[str, str] = field(default_factory=dict)
    generations: list[list[str]] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    result: dict[str, Any] | None = None

    def best(self, count: int) -> list[str]:
        """The best candidates so far, best first; of equals the one that was found first."""
        return sorted(self.losses, key=lambda key: self.losses[key])[:count]

    def missing(self) -> list[str]:
        """The candidates of the last generation that have not been measured, each once."""
        last = self.generations[-1] if self.generations else []
        return [key for key in dict.fromkeys(last) if key not in self.losses]

    def history(self) -> list[tuple[int, int, float, str]]:
        """(generation, candidates measured up to it, best loss so far, best candidate) of each generation begun."""
        found: list[tuple[int, int, float, str]] = []
        seen: dict[str, float] = {}
        for number, generation in enumerate(self.generations):
            seen |= {key: self.losses[key] for key in generation if key in self.losses}
            if seen:
                best = min(seen, key=lambda key: seen[key])
                found.append((number, len(seen), seen[best], best))
        return found

    def write(self, folder: Path | None) -> None:
        """Write `search.json`, whole at any time."""
        if folder is not None:
            from hf_posenc.report import json_bytes, write_atomically

            write_atomically(folder / STATE, json_bytes({"version": VERSION, **asdict(self)}))


def take_up(folder: Path | None, conditions: dict[str, Any], resume: bool) -> State:
    """The search to go on with: the one in the folder, or a new one.

    Raises `OptionError` for a folder that holds another search, `CheckpointError` for a file that cannot be read.
    """
    if folder is None or not resume or not (folder / STATE).exists():
        return State(conditions)
    file = folder / STATE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw.pop("version") != VERSION:
            raise ValueError("another version")
        state = State(**raw)
        state.losses = {key: float(value) for key, value in state.losses.items()}
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{file} is no search of this version ({type(error).__name__}: {error}); {ANEW}") from error
    how = differing(state.conditions, conditions)
    if how:
        raise OptionError(f"{folder} holds another search ({how}); {ANEW}")
    return state


def differing(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which conditions are not the same, in words; empty where all are."""
    plain = json.loads(json.dumps(now))
    keys = dict.fromkeys([*earlier, *plain])
    return "; ".join(
        f"{key}: {earlier.get(key)!r:.40}, now {plain.get(key)!r:.40}"
        for key in keys
        if earlier.get(key) != plain.get(key)
    )


def perplexity(loss: float) -> float:
    """exp of a mean nll; inf where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
