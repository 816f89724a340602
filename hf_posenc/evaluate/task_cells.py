"""Task cells of a comparison: which tasks and documents there are, and one task under one encoding at one length."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_posenc.errors import OptionError, PosencError, unknown
from hf_posenc.eval_tasks.sizing import Document
from hf_posenc.eval_tasks.sources import read_text
from hf_posenc.eval_tasks.tasks import SUFFIX, TASKS, documents
from hf_posenc.evaluate.results import TaskRow
from hf_posenc.evaluate.specs import EncodingSpec
from hf_posenc.evaluate.task_plan import Form, make_plan, parse_tasks, task_manager


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are scored: in which form, over which documents."""

    form: Form = "generate"
    num_samples: int = 20
    seed: int = 0
    haystack: str | Path | None = None
    qa: str | Path | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.form not in ("generate", "loglikelihood"):
            raise unknown("form", self.form, ("generate", "loglikelihood"))
        for option in ("num_samples", "batch_size"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{option}={value!r}: give a whole number of at least 1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TaskSettings:
        """From keywords; one that is not known is named with the nearest."""
        known = [f.name for f in fields(cls)]
        for key in options:
            if key not in known:
                raise unknown("option", key, known)
        return cls(**options)

    def described(self) -> dict[str, Any]:
        """For a report's header; a batch size moves no score and is left out."""
        values: dict[str, Any] = {"form": self.form, "num_samples": self.num_samples, "seed": self.seed}
        for key in ("haystack", "qa"):
            file = getattr(self, key)
            if file:
                path = Path(file).expanduser()
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
                values[key] = f"{path.name} (sha256 {digest[:16]})"
        return values


@dataclass(frozen=True)
class TaskPlan:
    """The tasks of a comparison, without the suffix of their form; those asked for by name; what is not run."""

    tasks: list[str] = field(default_factory=list)
    named: frozenset[str] = frozenset()
    not_run: dict[str, str] = field(default_factory=dict)


def plan_tasks(tasks: str | Iterable[str], settings: TaskSettings) -> TaskPlan:
    """The tasks of a comparison, groups opened; those of a group that lack a file are not run.

    Raises:
        PosencError: a name that is not known (names the nearest), or that has no lengths; a file that a task needs.
    """
    names, theirs = parse_tasks(tasks, settings.form)
    suffixed = [name for name in names if name.endswith(SUFFIX)]
    if settings.form != "loglikelihood" and suffixed:
        raise OptionError(f"{', '.join(suffixed)}: name the task without {SUFFIX} and give form='loglikelihood'")
    for option in ("haystack", "qa"):
        if (file := getattr(settings, option)) is not None:
            read_text(file, option)
    files = {key: str(value) if (value := getattr(settings, key)) else None for key in ("haystack", "qa")}
    plan = make_plan(task_manager(names, None, {}, theirs=theirs), names, files)
    found = list(dict.fromkeys(name.removesuffix(SUFFIX) for name in plan.tasks))
    foreign = [name for name in found if theirs or name not in TASKS]
    if foreign:
        raise OptionError(
            f"{', '.join(foreign)}: a comparison scores the tasks that are built to a length: {', '.join(TASKS)}, or "
            "the groups ruler and ruler_no_files; hf-posenc eval runs lm-eval's own"
        )
    if not found:
        raise OptionError("; ".join(plan.not_run.values()))
    not_run = {name.removesuffix(SUFFIX): reason for name, reason in plan.not_run.items()}
    return TaskPlan(found, frozenset(name.removesuffix(SUFFIX) for name in names), not_run)


def build_documents(
    tokenizer: Any, plan: TaskPlan, lengths: Sequence[int], settings: TaskSettings
) -> dict[tuple[str, int], list[Document]]:
    """The documents of every cell, kept in the user's cache.

    A length too short for a task raises; of a task that came with a group it is noted in `plan.not_run`.
    """
    made: dict[tuple[str, int], list[Document]] = {}
    how: dict[str, Any] = {"num_samples": settings.num_samples, "seed": settings.seed}
    how |= {"haystack": settings.haystack, "qa": settings.qa}
    for task in plan.tasks:
        for length in lengths:
            try:
                made[task, length] = documents(task, tokenizer, length, **how)
            except OptionError as error:
                if task in plan.named:
                    raise
                plan.not_run[f"{task} at {length}"] = str(error)
    if plan.tasks and not made:
        raise OptionError("; ".join(plan.not_run.values()))
    return made


def measure_task(
    model: Any, tokenizer: Any, spec: EncodingSpec, task: str, length: int, settings: TaskSettings
) -> TaskRow:
    """One cell, through lm-eval, on a model that already has the encoding; why it has no score is its `error`."""
    from hf_posenc.evaluate.run_tasks import run_tasks

    row: dict[str, Any] = {"encoding": spec.name, "options": spec.options, "length": length}
    row |= {"task": task, "form": settings.form}
    how: dict[str, Any] = {"tokenizer": tokenizer, "bars": False, **vars(settings)}
    start = time.perf_counter()
    try:
        results = run_tasks(model, task, length, **how)
    except PosencError as error:
        return TaskRow(**row, samples=0, error=str(error))
    if results is None or results.header["processes"] > 1:
        raise OptionError("a comparison runs in one process; hf-posenc eval shares its documents among several")
    scores = next(iter(results.tasks.values()), None)
    if scores is None or length not in {**scores.acc, **scores.nll}:
        return TaskRow(**row, samples=0, error="; ".join(results.not_run.values()) or "lm-eval gave no score")
    return TaskRow(
        **row,
        samples=settings.num_samples,
        acc=scores.acc.get(length),
        nll=scores.nll.get(length),
        gain=scores.gain.get(length),
        by_depth=scores.by_depth.get(length, {}),
        seconds=time.perf_counter() - start,
    )
