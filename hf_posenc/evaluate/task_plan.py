"""From the names a user gives to the tasks of a run: ours, those of a folder of the user's, lm-eval's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_posenc import eval_tasks
from hf_posenc.errors import OptionError, unknown
from hf_posenc.eval_tasks.tasks import SUFFIX, TASKS, missing_file

Form = Literal["generate", "loglikelihood"]
THEIRS = "lm_eval:"
"""Before a task's name: lm-eval's own of that name, not ours."""


def need_lm_eval() -> Any:
    """The package lm_eval, or the error that says how to install it."""
    try:
        import lm_eval.evaluator
        import lm_eval.tasks
    except ImportError as error:
        raise OptionError(
            f"the tasks run through lm-eval, which is not installed ({error}); pip install 'hf-posenc[eval]'"
        ) from error
    return lm_eval


def harness_folder() -> Path:
    """The folder of our tasks' YAML files: what lm-eval calls an include path."""
    return Path(eval_tasks.__file__).parent / "harness"


def check_folder(folder: str | Path) -> str:
    """A folder of tasks, each of its YAML files readable; lm-eval would leave a broken one out without a word."""
    need_lm_eval()
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise OptionError(f"no such folder of tasks: {folder}")
    for file in sorted(path.rglob("*.yaml")):
        try:
            load_yaml(file, resolve_func=False)
        except Exception as error:  # whatever yaml or lm-eval make of a file that is not theirs
            raise OptionError(f"{file} cannot be read as a task: {' '.join(str(error).split())}") from error
    return str(path)


def task_manager(
    names: Iterable[str], include_path: str | Path | None, metadata: dict[str, Any], *, theirs: bool = False
) -> Any:
    """lm-eval's manager over our tasks and the user's; over its own (7 s) only for a name that is in neither.

    With `theirs`, over its own and the user's: `passkey` and `ruler` are names of both.
    """
    from lm_eval.tasks import TaskManager

    paths: list[str | Path] = [] if theirs else [str(harness_folder())]
    if include_path is not None:
        paths.append(check_folder(include_path))
    manager = TaskManager(include_path=paths, include_defaults=theirs, metadata=metadata)
    for name in names:
        if name in manager.all_tasks:
            continue
        if not theirs and not difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.8):
            manager = TaskManager(include_path=paths, metadata=metadata)
        if name not in manager.all_tasks:
            raise _unknown_task(name, manager.all_tasks)
    return manager


def _unknown_task(name: str, known: list[str]) -> Exception:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    shown = known if len(known) < 100 else [*near, "... (lm-eval ls tasks)"]
    return unknown("task", name, shown)


def parse_tasks(tasks: str | Iterable[str], form: Form) -> tuple[list[str], bool]:
    """`passkey,ruler` or a sequence, each once, in the asked form; and whether they are all `lm_eval:...`."""
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks) if name.strip()]
    if not names:
        raise OptionError("no tasks given (for example passkey,ruler)")
    if form not in ("generate", "loglikelihood"):
        raise unknown("form", form, ("generate", "loglikelihood"))
    theirs = [name.startswith(THEIRS) for name in names]
    if all(theirs):
        return list(dict.fromkeys(name.removeprefix(THEIRS) for name in names)), True
    if any(theirs):
        raise OptionError(f"tasks {', '.join(names)}: either all or none may begin with {THEIRS}")
    ours = {*TASKS, "ruler", "ruler_no_files"}
    suffix = SUFFIX if form == "loglikelihood" else ""
    return list(dict.fromkeys(name + suffix if name in ours else name for name in names)), False


@dataclass(frozen=True)
class Plan:
    """The tasks of a run by name, the groups they came from, and those that lack a file."""

    tasks: list[str]
    groups: dict[str, list[str]]
    not_run: dict[str, str]
    ours: frozenset[str] = frozenset()
    """Those built to a length, whose metrics have a key a length."""


def make_plan(manager: Any, names: list[str], files: Mapping[str, Any]) -> Plan:
    """Groups opened into their tasks; one that lacks the user's file is left out of a group, and by name it raises."""
    wanted: dict[str, None] = {}
    groups: dict[str, list[str]] = {}
    not_run: dict[str, str] = {}
    ours: set[str] = set()
    for name in names:
        entry = manager.task_index[name]
        is_ours = entry.yaml_path is not None and Path(entry.yaml_path).parent.resolve() == harness_folder().resolve()
        members = list(entry.cfg["task"]) if is_ours and entry.kind.name == "GROUP" else [name]
        for member in members:
            generator = member.removesuffix(SUFFIX)
            reason = missing_file(generator, **files) if is_ours and generator in TASKS else None
            if reason is None:
                wanted[member] = None
                ours |= {member} if is_ours and generator in TASKS else set()
            elif member == name:
                raise OptionError(reason)
            else:
                not_run[member] = reason
        if members != [name]:
            groups[name] = [member for member in members if member in wanted]
    return Plan(list(wanted), groups, not_run, frozenset(ours))
