"""The command `hf-posenc eval`: long-context tasks on one model, here or through lm-eval's own command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_posenc.evaluate.run_tasks import EvalResults

# Nothing here imports torch or lm-eval at the top: `--help` and completion must answer at once.

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For the command's context: what is not known here is lm-eval's."""


def results_tables(results: EvalResults) -> list[Any]:
    """One table a metric, a row a task, a column a length; then what was not run, and why."""
    from rich.table import Table

    titles = {
        "acc": "score, 0 to 1",
        "nll": "nll of the right answer, nats a token",
        "gain": "gain by an earlier copy, nats a token",
    }
    rows = dict(results.tasks)
    for name, group in results.groups.items():
        rows[f"{name}, mean of {len(results.members[name])}"] = group
    made: list[Any] = []
    for metric, title in titles.items():
        shown = {name: getattr(scores, metric) for name, scores in rows.items() if getattr(scores, metric)}
        if not shown:
            continue
        lengths = sorted({length for values in shown.values() for length in values})
        table = Table(title=title)
        table.add_column("task")
        for length in lengths:
            table.add_column(str(length), justify="right")
        for name, values in shown.items():
            table.add_row(name, *[f"{values[n]:.3f}" if n in values else "" for n in lengths])
        made.append(table)
    others = [f"{name}: {key} {value}" for name, scores in results.tasks.items() for key, value in scores.other.items()]
    return made + others + results.notes + [f"not run: {name}: {reason}" for name, reason in results.not_run.items()]


def lm_eval_arguments(
    model: str,
    tasks: list[str],
    model_args: dict[str, Any],
    metadata: dict[str, Any],
    more: list[str],
    *,
    theirs: bool = False,
) -> list[str]:
    """The arguments of lm-eval's own command for the same run."""
    from hf_posenc.evaluate.task_plan import harness_folder

    given = {key: value for key, value in metadata.items() if value is not None}
    return [
        "run",
        *("--model", "hf-posenc"),
        *("--model_args", json.dumps({"pretrained": model, **model_args})),
        *("--tasks", ",".join(tasks)),
        *(() if theirs else ("--include_path", str(harness_folder()))),
        *("--metadata", json.dumps(given)),
        *more,
    ]


def check_flags(context: typer.Context) -> None:
    """Raise for a flag that is neither ours nor lm-eval's, with the nearest: lm-eval would print its whole usage."""
    import argparse

    from hf_posenc.errors import unknown

    try:
        from lm_eval._cli.run import Run
    except ImportError:  # a later release that keeps it elsewhere: it says itself what it does not know
        return
    parser = Run(argparse.ArgumentParser().add_subparsers())._parser
    theirs = {flag for action in parser._actions for flag in action.option_strings}
    ours = {flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("-")}
    for argument in context.args:
        flag = argument.partition("=")[0]
        known = flag in theirs or any(other.startswith(flag) for other in theirs)  # argparse takes a beginning
        if flag.startswith("-") and not flag.lstrip("-")[:1].isdigit() and not known:
            raise unknown("flag", flag, theirs | ours)


def run_lm_eval(arguments: list[str]) -> None:
    """lm-eval's own command, with `hf-posenc` among its models."""
    from lm_eval.__main__ import cli_evaluate

    import hf_posenc.evaluate.harness  # noqa: F401 (registers the model)

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def eval_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, an adapter's folder, a hub id, or demo:llama.")
    ],
    encoding: Annotated[
        str | None, typer.Option(help="A name from `hf-posenc list`; by default the model's own.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="Target length / length the model was pretrained on.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the encoding: beta_fast=16.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="passkey, copy_distance, ruler, ruler_no_files, a task of these, or of lm-eval's own.")
    ] = "passkey",
    lengths: Annotated[str, typer.Option(help="In tokens, prompt and answer together: 4096,16384.")] = "4096",
    form: Annotated[
        str, typer.Option(help="generate: score the greedy answer; loglikelihood: the right one, in one forward.")
    ] = "generate",
    num_samples: Annotated[int, typer.Option(help="Documents a task and length.")] = 20,
    seed: Annotated[int, typer.Option(help="Which documents.")] = 0,
    batch_size: Annotated[str, typer.Option(help="Documents at a time; it does not move a score.")] = "1",
    haystack: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text of yours, for RULER's essay tasks.")
    ] = None,
    qa: Annotated[str | None, typer.Option(metavar="FILE", help="Questions of yours, for qa_1 and qa_2.")] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include_path", "--include-path", help="A folder of tasks of yours.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="The most tokens a request may have; by default what the positions reach.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if any.")] = None,
    gguf_file: Annotated[str | None, typer.Option(metavar="NAME", help="Read this GGUF file of the folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json.")] = None,
) -> None:
    """Long-context tasks (passkey, RULER, copy at a distance) by length, through lm-eval; no download.

    Flags that are not listed here are lm-eval's: with one of them its own command does the run, and prints its tables.

    Example: `hf-posenc eval demo:llama --encoding yarn --factor 4 --tasks passkey --lengths 256,512 --out results`

    Example: `hf-posenc eval MODEL --tasks ruler_no_files --lengths 4096,16384 --log_samples --output_path runs`
    """
    from hf_posenc import report
    from hf_posenc.errors import OptionError
    from hf_posenc.eval_tasks.tasks import parse_lengths
    from hf_posenc.evaluate.harness import options_of
    from hf_posenc.evaluate.loading import parse_dtype
    from hf_posenc.evaluate.run_tasks import run_tasks
    from hf_posenc.evaluate.specs import gather_options
    from hf_posenc.evaluate.task_plan import parse_tasks

    options = gather_options(factor, option)
    check_flags(context)
    if dtype != "auto":
        parse_dtype(dtype)
    if include_path is not None and context.args:
        raise OptionError("--include_path goes with no other flag of lm-eval's own, which knows one folder: ours")
    options_of(encoding, dict(options))  # a misspelt name is met before a large model is loaded
    place = {"max_length": max_length, "dtype": dtype, "device": device, "gguf_file": gguf_file}
    model_args = {key: value for key, value in place.items() if value is not None}
    files = {"haystack": haystack, "qa": qa}
    folder = report.prepare_folder(out) if out is not None else None
    documents: dict[str, Any] = {"num_samples": num_samples, "seed": seed, **files}
    if context.args:
        patch = {"encoding": encoding, **options} if encoding else {}
        metadata = {"max_seq_lengths": parse_lengths(lengths), **documents}
        more = ["--batch_size", batch_size, *([] if out is None else ["--output_path", str(out)]), *context.args]
        names, theirs = parse_tasks(tasks, form)  # type: ignore[arg-type]  # checked there
        return run_lm_eval(lm_eval_arguments(model, names, {**patch, **model_args}, metadata, more, theirs=theirs))
    how: dict[str, Any] = {
        "form": form,
        "batch_size": batch_size,
        "include_path": include_path,
        **documents,
        **model_args,
    }
    results = run_tasks(model, tasks, lengths, encoding=encoding, options=options, **how)
    if results is None:  # another process of a data-parallel run reports
        return None
    console = report.console()
    for item in results_tables(results):
        console.print(item)
    if folder is not None:
        report.write_atomically(folder / "results.json", report.json_bytes(results.as_json()))
        console.print(f"written to {folder}")
    return None
