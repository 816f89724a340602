"""The rounds of a run of tasks through lm-eval: ours one length at a time, any other as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_posenc.errors import OptionError, ReachError
from hf_posenc.evaluate.memory import free_memory, is_out_of_memory
from hf_posenc.evaluate.task_plan import Plan, need_lm_eval


def check_lengths(lm: Any, tasks: Iterable[str], lengths: Iterable[int]) -> None:
    """Raise `ReachError` for a length past the model's limit, before any document is built."""
    for length in lengths:
        if length > lm.max_length:
            raise ReachError(
                f"{', '.join(tasks)} at length {length}: the limit of this model is {lm.max_length} tokens; ask "
                "for shorter lengths, give max_length=... if it reaches further, or an encoding without an end (rope, "
                "yarn, alibi)"
            )


def measure(
    lm: Any, managed: Callable[[list[int]], Any], plan: Plan, asked: list[str], lengths: list[int]
) -> dict[str, dict[str, Any]] | None:
    """The metrics of every task; ours one length at a time, so that where memory ends the others still have theirs.

    What cannot be scored goes into `plan.not_run`. None on all but the first process of a data-parallel run.
    """
    apart = plan.ours if lm.world_size == 1 else ()  # several processes share all documents of a task at once
    rounds = [(name, [length]) for length in lengths for name in plan.tasks if name in apart]
    rounds += [(name, lengths) for name in plan.tasks if name not in apart]
    found: dict[str, dict[str, Any]] = {}
    for name, sizes in rounds:
        loaded = _load(managed(sizes), name, plan, asked, sizes, lm.world_size)
        try:
            results = _evaluate(lm, loaded) if loaded else {}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or lm.world_size > 1:
                raise
            free_memory(lm.device)
            plan.not_run[_place(name, sizes)] = f"out of memory at {sizes[-1]} tokens"
            continue
        if results is None:
            continue
        for task, metrics in results.items():
            _merge(found.setdefault(task, {}), metrics)
    return found if lm.rank == 0 else None


def _place(name: str, lengths: list[int]) -> str:
    return f"{name} at {', '.join(map(str, lengths))}"


def _merge(into: dict[str, Any], metrics: Mapping[str, Any]) -> None:
    """Join the metrics of another length: a dict (by depth) is joined, any other key is of one length alone."""
    for key, value in metrics.items():
        into[key] = {**into[key], **value} if isinstance(into.get(key), dict) and isinstance(value, dict) else value


def _load(manager: Any, name: str, plan: Plan, asked: list[str], lengths: list[int], world_size: int) -> dict[str, Any]:
    """A task with its documents; one of a group that cannot be built goes into `plan.not_run`, others raise."""
    try:
        loaded: dict[str, Any] = manager.load([name])["tasks"]
    except OptionError as error:
        if name in asked:
            raise
        plan.not_run[_place(name, lengths)] = str(error)
        return {}
    for made, task in loaded.items():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        if len(task.eval_docs) < world_size:
            raise OptionError(f"{made} has {len(task.eval_docs)} documents for {world_size} processes: num_samples")
    return loaded


def _evaluate(lm: Any, loaded: dict[str, Any]) -> dict[str, Any] | None:
    results = need_lm_eval().evaluator.evaluate(lm, {"tasks": loaded}, bootstrap_iters=0, log_samples=False)
    return None if results is None else results["results"]
