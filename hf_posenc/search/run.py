"""`search`: evolution of rescale factors on one model, from known encodings on, and never to less than the best."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_posenc.encodings import Linear, LongRope, Rotation
from hf_posenc.errors import OptionError, UnsupportedError
from hf_posenc.eval_tasks.cache import tokenizer_hash
from hf_posenc.evaluate.conditions import config_digest, weights_digest
from hf_posenc.evaluate.resume import held
from hf_posenc.patching import check_state, find_backbone

from .candidates import Candidate, children, seeds
from .fitness import Samples, Text, loss, make_samples
from .output import write_curve, write_model
from .progress import search_progress
from .settings import GENERATIONS, SearchSettings, check_generations, parse_budget
from .state import State, perplexity, take_up

FOUND = "search"
"""The name of what the search found, beside those of its seeds."""


@dataclass(frozen=True)
class SearchResult:
    """What a search ended with: an encoding for `patch_model`, and how it was judged.

    `winner`: `search`, or the name of the seed that was better on the judgement's texts; `searched`, `judged`: mean nll
    in nats, by name, on the texts of the search and on others; `measured`: candidates.
    """

    encoding: LongRope
    winner: str
    searched: dict[str, float]
    judged: dict[str, float]
    generations: int
    measured: int
    seconds: float
    state: State

    @property
    def perplexities(self) -> dict[str, float]:
        """exp of `judged`."""
        return {name: perplexity(value) for name, value in self.judged.items()}


def search(
    model: Any,
    tokenizer: Any,
    text: Text | None = None,
    *,
    factor: float,
    fitness: Any = "perplexity",
    budget: str | float | None = None,
    generations: int | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    save_weights: bool = True,
    original_max_position_embeddings: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> SearchResult:
    """Search the rescale factor of each pair of channels for `factor` × the trained length L (LongRoPE, 2402.13753).

    From linear, ntk and yarn (with its own `beta_fast` and with 8) on, by mutation and crossover of the best; factors
    rise from fast pairs to slow ones. `fitness`: mean nll of `text` in pieces of factor × L tokens, or of the answers
    of passkey documents of that length. `text`: a text, a Path, or a list of texts; its later half only judges. It ends
    after `budget` (`30m`, or seconds; all runs in one folder together) or `generations`, by default 20, whichever is
    first; the seeds are always measured. Then the best candidate and the seeds are judged on texts that the search has
    not seen, and the best of all is the result: it is never worse there than the best seed.

    `out`: a folder for `search.json`, `curve.csv`, `curve.png` and `model`, the model with its result as plain
    Transformers loads it (without `save_weights`: its config alone). Given again it goes on: every candidate is on disk
    as soon as it is measured. `settings`: fields of `SearchSettings`. The model is left as it was.

    Raises `OptionError` for options, texts and folders that will not do, `UnsupportedError` for a host without a
    rotation that its config could hold, `StateError` for a model that is patched already.
    """
    limit = parse_budget(budget)
    check_generations(generations)
    chosen = SearchSettings(factor=factor, fitness=fitness, **known(settings))
    like, dim = host_rotation(model, factor, original_max_position_embeddings)
    samples = make_samples(tokenizer, text, int(like.length * factor), chosen)
    if generations is None and limit is None:
        generations = GENERATIONS
    folder = None
    if out is not None:
        from hf_posenc.report import prepare_folder

        folder = prepare_folder(out)
    with held(folder):
        state = take_up(folder, conditions(model, tokenizer, samples, like, chosen), resume)
        shown = sys.stderr.isatty() if progress is None else progress
        evolution = Evolution(model, like, dim, chosen, samples, state, folder)
        evolution.run(limit, generations, shown)
        result = evolution.judge()
        if folder is not None:
            write_curve(folder, state, FOUND)
            write_model(folder, model, tokenizer, result.encoding, save_weights)
    return result


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they are; `UnknownNameError` for one that there is not."""
    from hf_posenc.errors import unknown

    names = [name for name in SearchSettings.__dataclass_fields__ if name not in ("factor", "fitness")]
    for name in settings:
        if name not in names:
            raise unknown("setting of a search", name, names)
    return settings


def host_rotation(model: Any, factor: float, length: int | None) -> tuple[Rotation, int]:
    """The host's own rotation, with theta and the trained length, and the channels that it turns."""
    patch, backbone = find_backbone(model)
    check_state(model, backbone)
    kind, geometry = backbone.config.model_type, patch.geometry(backbone)
    trial = Linear(factor=factor, original_max_position_embeddings=length)
    if geometry.rope_theta is None:
        raise UnsupportedError(f"{kind} has no rotation of its own, so there are no frequencies to search")
    if not patch.holds(trial, backbone.config):
        raise UnsupportedError(f"the config of {kind} holds no rope parameters, so a result could not be written")
    complete = patch.complete(trial, backbone)
    assert isinstance(complete, Rotation)
    return complete, geometry.rotary_dim


def conditions(
    model: Any, tokenizer: Any, samples: Samples, like: Rotation, settings: SearchSettings
) -> dict[str, Any]:
    """All that a search's figures depend on: a run goes on in a folder only where all of it is the same."""
    return {
        "model": model.config.model_type,
        "weights": weights_digest(model),
        "config": config_digest(model.config),
        "tokenizer": tokenizer_hash(tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope_theta": like.theta,
        "original_max_position_embeddings": like.length,
        **asdict(settings),
        "texts": samples.sha256(),
    }


@dataclass
class Evolution:
    """A search under way."""

    model: Any
    like: Rotation
    dim: int
    settings: SearchSettings
    samples: Samples
    state: State
    folder: Path | None

    def encoding(self, key: str) -> LongRope:
        """What a candidate puts into the model."""
        return Candidate.of(key).encoding(self.like, self.settings.factor)

    def run(self, limit: float | None, generations: int | None, shown: bool) -> None:
        """Go on until time or generations are used up; the seeds are measured whatever there is."""
        a_generation = self.settings.mutations + self.settings.crossovers
        expected = 4 + a_generation * (generations or 0)
        state, start, before = self.state, time.perf_counter(), self.state.seconds
        if not state.generations:
            state.seeds = {name: seed.key for name, seed in seeds(self.like, self.dim, self.settings.factor).items()}
            state.generations = [list(state.seeds.values())]
        with search_progress(expected, limit, shown) as advance:

            def measure(key: str) -> None:
                state.losses[key] = loss(self.model, self.encoding(key), self.samples.searched)
                state.seconds = before + time.perf_counter() - start
                state.result = None
                state.write(self.folder)
                advance(len(state.generations) - 1, len(state.losses), state.seconds, state.losses[state.best(1)[0]])

            self.evolve(measure, limit, generations)

    def evolve(self, measure: Callable[[str], None], limit: float | None, generations: int | None) -> None:
        """Generation after generation; one that was stopped in the middle goes on first."""
        state = self.state
        while True:
            for key in state.missing():
                if len(state.generations) > 1 and limit is not None and state.seconds + self.judgement() >= limit:
                    return
                measure(key)
            done = len(state.generations) - 1
            spent = limit is not None and state.seconds + self.judgement() >= limit
            if spent or (generations is not None and done >= generations):
                return
            parents = [Candidate.of(key) for key in state.best(self.settings.population)]
            state.generations.append([child.key for child in children(parents, done + 1, self.settings)])

    def judgement(self) -> float:
        """The seconds that the judgement will take, from those that a candidate has taken."""
        each = self.state.seconds / max(len(self.state.losses), 1)
        share = len(self.samples.judged) / len(self.samples.searched)
        return (len(self.state.seeds) + 1) * each * share

    def judge(self) -> SearchResult:
        """The best candidate and all seeds, on texts that the search has not seen; the best of these is the result."""
        state = self.state
        keys = {**state.seeds, FOUND: state.best(1)[0]}
        if state.result is None or state.result["candidates"] != keys:
            start = time.perf_counter()
            losses = {key: loss(self.model, self.encoding(key), self.samples.judged) for key in set(keys.values())}
            judged = {name: losses[key] for name, key in keys.items()}
            winner = min(judged, key=lambda name: judged[name])  # of equals the seed, which comes first
            state.result = {"winner": winner, "judged": judged, "candidates": keys}
            state.seconds += time.perf_counter() - start
            state.write(self.folder)
        found = state.result
        if not any(value < float("inf") for value in map(float, found["judged"].values())):
            raise OptionError("no encoding gives this model a finite loss at the target length; give a smaller factor")
        return SearchResult(
            encoding=self.encoding(keys[found["winner"]]),
            winner=found["winner"],
            searched={name: state.losses[key] for name, key in keys.items()},
            judged={name: float(value) for name, value in found["judged"].items()},
            generations=len(state.generations) - 1,
            measured=len(state.losses),
            seconds=state.seconds,
            state=state,
        )
