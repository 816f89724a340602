"""The tasks as lm-eval sees them; named by the YAML files in `harness/`, and imported by lm-eval alone.

Metadata: `max_seq_lengths`, `num_samples`, `seed`, `haystack`, `qa`, and `tokenizer` (a name or a tokenizer; by default
the model's). Metrics have a key a length, `acc_8192`; `by_depth` is a dict {length: {depth: score}}.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from hf_posenc.errors import OptionError

from . import tasks

Row = dict[str, Any]
DEFAULT_LENGTHS = (4096,)


def _tokenizer(tokenizer: Any, pretrained: Any) -> Any:
    from hf_posenc.evaluate.harness import find_tokenizer

    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    if not isinstance(tokenizer or pretrained, str):
        raise OptionError("documents are built to size in tokens: name a tokenizer in the metadata, tokenizer=NAME")
    return find_tokenizer(tokenizer or pretrained)


def dataset(
    *,
    generator: str,
    with_controls: bool = False,
    max_seq_lengths: Any = DEFAULT_LENGTHS,
    num_samples: int = tasks.NUM_SAMPLES,
    seed: int = 0,
    haystack: str | None = None,
    qa: str | None = None,
    tokenizer: Any = None,
    pretrained: Any = None,
    **_others: Any,
) -> dict[str, datasets.Dataset]:
    """The split `test`: all lengths, shortest first. lm-eval passes its model arguments and metadata alike."""
    source = _tokenizer(tokenizer, pretrained)
    files: dict[str, Any] = {"haystack": haystack, "qa": qa}
    rows = [
        asdict(document)
        for length in tasks.parse_lengths(max_seq_lengths)
        for document in tasks.documents(generator, source, length, num_samples=num_samples, seed=seed, **files)
        if with_controls or not document.control
    ]
    for row in rows:
        row["outputs"] = list(row["outputs"])
    return {"test": datasets.Dataset.from_list(rows)}


def _present(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def mean(values: Sequence[float | None]) -> float:
    """Mean of the documents of one length; those of other lengths are None. NaN where lm-eval's --limit left none."""
    present = _present(values)
    return sum(present) / len(present) if present else math.nan


def mean_by_depth(values: Sequence[tuple[int, float | None, float] | None]) -> dict[str, dict[str, float]]:
    """(length, depth, score) of each document as {length: {depth: mean score}}."""
    cells: dict[str, dict[str, list[float]]] = {}
    for length, depth, score in sorted(v for v in _present(values) if v[1] is not None):
        cells.setdefault(str(length), {}).setdefault(str(depth), []).append(score)
    return {length: {d: sum(s) / len(s) for d, s in row.items()} for length, row in cells.items()}


def gain(values: Sequence[tuple[bool, float] | None]) -> float:
    """Mean nll of the controls minus that of the copies, nats a token; values are (is a control, nll)."""
    controls = mean([nll for control, nll in _present(values) if control])
    return controls - mean([nll for control, nll in _present(values) if not control])


class LengthTask(ConfigurableTask):
    """A task whose metrics have a key a length, and whose documents say themselves how long an answer may be."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.generator: str = config["metadata"]["generator"]
        self.lengths: list[int] = []
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, *_: Any, **__: Any) -> None:
        """Build the documents."""
        build: Any = self.config.custom_dataset
        self.dataset = build(**(self.config.metadata or {}))
        self.lengths = sorted(set(self.dataset["test"]["length"]))

    def build_all_requests(self, **kwargs: Any) -> None:
        """As lm-eval's; without its bar, which is over at once and would break into the run's own."""
        with redirect_stderr(io.StringIO()):
            super().build_all_requests(**kwargs)

    def construct_requests(self, doc: Row, ctx: Any, **kwargs: Any) -> Any:
        """lm-eval's requests, the room for the answer being the document's own."""
        made = super().construct_requests(doc, ctx, **kwargs)
        if self.OUTPUT_TYPE == "generate_until":
            assert isinstance(made, Instance)
            made.arguments = (ctx, {**made.arguments[1], "max_gen_toks": doc["max_new_tokens"]})
        return made

    def _at(self, doc: Row, name: str, value: Any) -> Row:
        """One key a length: every process of a data-parallel run must hold the same keys."""
        return {f"{name}_{length}": value if length == doc["length"] else None for length in self.lengths}

    def process_results(self, doc: Row, results: Sequence[Any]) -> Row:
        """The metrics of one document."""
        metrics: Row = {}
        if self.OUTPUT_TYPE == "generate_until":
            score = tasks.TASKS[self.generator].score(results[0], doc["outputs"])
        else:
            loglikelihood, is_greedy = results[0]
            score, nll = float(is_greedy), -loglikelihood / doc["target_tokens"]
            metrics |= self._at(doc, "nll", None if doc["control"] else nll)
            if self.config.metadata and self.config.metadata.get("with_controls"):
                metrics |= self._at(doc, "gain", (doc["control"], nll))
        metrics |= self._at(doc, "acc", None if doc["control"] else score)
        metrics["by_depth"] = None if doc["control"] else (doc["length"], doc["depth"], score)
        return metrics

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        """A function for each metric of `process_results`."""
        named: dict[str, Callable[..., Any]] = {"acc": mean, "nll": mean, "gain": gain}
        keys = {f"{name}_{length}": function for name, function in named.items() for length in self.lengths}
        return {**keys, "by_depth": mean_by_depth}

    def higher_is_better(self) -> dict[str, bool]:
        """Of each metric."""
        return {key: not key.startswith("nll") for key in self.aggregation()}
