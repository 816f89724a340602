"""What a comparison found: rows of perplexity, rows of task scores, and the conditions they were measured under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hf_posenc.evaluate.specs import EncodingSpec

PERPLEXITY = "perplexity"
"""The name of the measure whose rows are `CompareRow`s; every other measure is a task's name."""


@dataclass(frozen=True)
class CompareRow:
    """One cell: an encoding at one length. Perplexities are None where `error` says why there is none."""

    encoding: str
    options: Mapping[str, Any]
    length: int
    tokens: int
    """Tokens that were scored."""
    ppl: float | None = None
    ppl_tail: float | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None
    nll_by_position: list[tuple[int, float]] = field(default_factory=list)
    """(last position of a bin, mean nll in nats of the tokens in it), positions from 1, in windows of `length`."""

    @property
    def label(self) -> str:
        """The encoding with its options, for a table or a legend."""
        return EncodingSpec(self.encoding, self.options).label


@dataclass(frozen=True)
class TaskRow:
    """One cell of a task: an encoding at one length. Scores are None where `error` says why there are none."""

    encoding: str
    options: Mapping[str, Any]
    length: int
    task: str
    """Without the suffix of its form: `passkey`, `niah_single_1`."""
    form: str
    """`generate` or `loglikelihood`."""
    samples: int
    acc: float | None = None
    """Mean score of the documents, 0 to 1."""
    nll: float | None = None
    """Nats a token of the right answer, in the form loglikelihood."""
    gain: float | None = None
    """Of copy_distance: nats a token that an earlier copy saves."""
    by_depth: Mapping[float, float] = field(default_factory=dict)
    """{depth 0 to 1: mean score}."""
    seconds: float | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """The encoding with its options, for a table or a legend."""
        return EncodingSpec(self.encoding, self.options).label


@dataclass(frozen=True)
class Comparison:
    """What was measured (`rows`, `task_rows`) and under which conditions (`header`, JSON values only)."""

    header: Mapping[str, Any]
    rows: list[CompareRow] = field(default_factory=list)
    task_rows: list[TaskRow] = field(default_factory=list)
    complete: bool = False
    """Whether every cell that was asked for is there."""

    def add(self, row: CompareRow | TaskRow) -> None:
        """One more cell."""
        if isinstance(row, TaskRow):
            self.task_rows.append(row)
        else:
            self.rows.append(row)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """The comparison that `as_json` wrote. Raises `KeyError` or `TypeError` for anything else."""
        rows = [_row(CompareRow, row) for row in data["rows"]]
        for row in rows:
            row.nll_by_position[:] = [(int(at), float(nll)) for at, nll in row.nll_by_position]
        tasks = [
            _row(TaskRow, {**row, "by_depth": {float(depth): score for depth, score in row["by_depth"].items()}})
            for row in data["task_rows"]
        ]
        return cls(dict(data["header"]), rows, tasks, bool(data["complete"]))


def _row(cls: type[Any], data: Mapping[str, Any]) -> Any:
    names = {f.name for f in fields(cls)}
    # json_safe writes numbers that are not finite as text
    read = {key: float(value) if value in ("inf", "-inf", "nan") else value for key, value in data.items()}
    return cls(**{key: value for key, value in read.items() if key in names})
