"""Score a model on long-context tasks: passkey, RULER, copy at a distance, and whatever else lm-eval knows."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import OptionError, unknown
from hf_posenc.eval_tasks.tasks import parse_lengths
from hf_posenc.evaluate.limits import encoding_of, past_aim
from hf_posenc.evaluate.task_plan import Form, make_plan, need_lm_eval, parse_tasks, task_manager
from hf_posenc.evaluate.task_rounds import check_lengths, measure

Scores = dict[int, float]


@dataclass(frozen=True)
class TaskScores:
    """Scores of one task (or the mean of a group's) by length in tokens; `by_depth` is {length: {depth: score}}.

    `acc` is 0 to 1; `nll` (nats a token of the right answer) and `gain` (copy_distance) are of the likelihood form.
    `other` holds the metrics of tasks that are not ours.
    """

    acc: Scores = field(default_factory=dict)
    nll: Scores = field(default_factory=dict)
    gain: Scores = field(default_factory=dict)
    by_depth: dict[int, dict[float, float]] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResults:
    """What was scored, what was not and why, and under which conditions (`header`, JSON values only)."""

    header: Mapping[str, Any]
    tasks: dict[str, TaskScores] = field(default_factory=dict)
    groups: dict[str, TaskScores] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    """The tasks that the mean of a group was taken over: those that were run."""
    not_run: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, for `json.dumps`."""
        return asdict(self)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """lm-eval's warnings about what is meant here (a loaded model, custom metadata) left out."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _scores(metrics: Mapping[str, Any]) -> TaskScores:
    made = TaskScores()
    for key, value in metrics.items():
        name = key.split(",")[0]
        kind, _, length = name.rpartition("_")
        if kind in ("acc", "nll", "gain") and length.isdigit():
            getattr(made, kind)[int(length)] = float(value)
        elif name == "by_depth":
            made.by_depth.update({int(n): {float(d): s for d, s in row.items()} for n, row in value.items()})
        elif "," in key and not name.endswith("_stderr"):
            made.other[name] = value
    return made


def _group_scores(members: list[TaskScores]) -> TaskScores:
    """The plain mean over the group's tasks, as RULER's."""

    def mean(pick: Callable[[TaskScores], Scores]) -> Scores:
        lengths = sorted({length for task in members for length in pick(task)})
        values = {n: [pick(task)[n] for task in members if n in pick(task)] for n in lengths}
        return {n: sum(found) / len(found) for n, found in values.items()}

    return TaskScores(acc=mean(lambda task: task.acc), nll=mean(lambda task: task.nll))


def _make_lm(model: Any, tokenizer: Any, encoding: str | None, options: dict[str, Any], rest: dict[str, Any]) -> Any:
    from hf_posenc.evaluate.harness import PosencLM

    if isinstance(model, str | Path):
        names = {"encoding": encoding, **options} if encoding else dict(options)
        return PosencLM(str(model), tokenizer=tokenizer, **names, **rest)
    if tokenizer is None:
        raise OptionError("a loaded model needs its tokenizer: run_tasks(model, ..., tokenizer=tokenizer)")
    return PosencLM(model, tokenizer=tokenizer, **rest)


def check_arguments(model: Any, batch_size: int | str, model_args: Mapping[str, Any]) -> None:
    """Raise for a batch size that is none, and for a keyword that nobody would read."""
    from lm_eval.models.huggingface import HFLM

    if re.fullmatch(r"auto(:\d+)?|[1-9]\d*", str(batch_size)) is None:
        raise OptionError(f"batch_size={batch_size!r}: give a whole number of at least 1, or auto")
    if isinstance(model, str | Path):
        return  # Transformers reads the others when it loads the model
    for name in model_args:
        known = [*inspect.signature(run_tasks).parameters, *inspect.signature(HFLM.__init__).parameters]
        if name not in known:
            raise unknown("option", name, known)


def run_tasks(
    model: Any,
    tasks: str | Iterable[str] = "passkey",
    lengths: int | str | Iterable[int] = 4096,
    *,
    tokenizer: Any = None,
    encoding: str | None = None,
    options: dict[str, Any] | None = None,
    form: Form = "generate",
    num_samples: int = 20,
    seed: int = 0,
    batch_size: int | str = 1,
    haystack: str | Path | None = None,
    qa: str | Path | None = None,
    include_path: str | Path | None = None,
    bars: bool = True,
    **model_args: Any,
) -> EvalResults | None:
    """Scores of `model` on `tasks` at each of `lengths`; None on all but the first process of a data-parallel run.

    Args:
        model: what names one (a folder, an adapter's folder, a hub id, `demo:llama`), or one with its `tokenizer`.
        tasks: names of tasks and groups: passkey, copy_distance, ruler, ruler_no_files, niah_single_1, ...; others are
            looked for in `include_path` and among lm-eval's own (`lm_eval:ruler` is its own of that name).
        lengths: in tokens, prompt and answer together.
        encoding, options: put in for the run; by default the model's own.
        form: `generate` scores the greedy answer; `loglikelihood` the right one, in one forward.
        num_samples, seed: documents a length, and which.
        haystack, qa: the user's files for the tasks that need one. Without, those of a group are in `not_run`.
        bars: show lm-eval's own progress bars.
        model_args: to the model class: max_length, dtype, device, ...

    Raises:
        PosencError: anything above is missing, misspelt or too short; a length that the model's positions do not reach.
    """
    from hf_posenc.patching import patched
    from hf_posenc.registry import create

    need_lm_eval()
    check_arguments(model, batch_size, model_args)
    (names, theirs), sizes = parse_tasks(tasks, form), parse_lengths(lengths)
    files = {"haystack": str(haystack) if haystack else None, "qa": str(qa) if qa else None}
    metadata: dict[str, Any] = {"max_seq_lengths": sizes, "num_samples": num_samples, "seed": seed, **files}
    given = options or {}
    with quiet_lm_eval():
        plan = make_plan(task_manager(names, include_path, metadata, theirs=theirs), names, files)
        if not plan.tasks:
            raise OptionError("; ".join(plan.not_run.values()))
        loaded = not isinstance(model, str | Path)
        if encoding is not None:
            create(encoding, **given)
        with patched(model, encoding, **given) if loaded and encoding else nullcontext():
            lm = _make_lm(model, tokenizer, encoding, given, {"batch_size": batch_size, "bars": bars, **model_args})
            check_lengths(lm, plan.tasks, sizes)
            notes = past_aim(lm.model, sizes)
            metadata["tokenizer"] = lm.tokenizer

            def managed(lengths: list[int]) -> Any:
                return task_manager(names, include_path, {**metadata, "max_seq_lengths": lengths}, theirs=theirs)

            found = measure(lm, managed, plan, names, sizes)
            header = _header(lm, model, metadata, form=form, batch_size=batch_size)
    if found is None:
        return None
    scores = {name: _scores(found[name]) for name in plan.tasks if name in found}
    members = {name: [m for m in asked if m in scores] for name, asked in plan.groups.items()}
    groups = {name: _group_scores([scores[m] for m in ran]) for name, ran in members.items() if ran}
    return EvalResults(header, scores, groups, members, plan.not_run, notes)


def _header(lm: Any, model: Any, metadata: dict[str, Any], **more: Any) -> dict[str, Any]:
    import lm_eval
    import torch
    import transformers

    import hf_posenc
    from hf_posenc.evaluate.loading import public_name, trained_length

    encoding = encoding_of(lm.model)
    name = str(model) if isinstance(model, str | Path) else model.config._name_or_path
    files = {key: Path(metadata[key]).name if metadata[key] else None for key in ("haystack", "qa")}
    return {
        "model": public_name(name),
        "model_type": lm.config.model_type,
        "trained_length": trained_length(lm.config),
        "encoding": encoding.name if encoding else None,
        "options": encoding.options() if encoding else {},
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "processes": lm.world_size,
        **{key: value for key, value in metadata.items() if key != "tokenizer"},
        **files,
        **more,
        "versions": {
            "hf_posenc": hf_posenc.__version__,
            "lm_eval": lm_eval.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
