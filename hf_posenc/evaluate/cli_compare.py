"""The command `hf-posenc compare`: encodings side by side, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Nothing here imports torch at the top: `--help` and completion must answer at once.


def compare_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or an embedded model: demo:llama.")
    ],
    lengths: Annotated[str, typer.Option(help="Lengths in tokens: 2048,8192,12288.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, results.json, CSV and PNG.")],
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text at least as long as the longest length, for perplexity.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks to score at each length: passkey,niah_single_1 or ruler_no_files.")
    ] = "",
    encodings: Annotated[
        str,
        typer.Option(
            help="none is the unpatched model; options follow a colon: none,linear,yarn:factor=4,beta_fast=16."
        ),
    ] = "none,linear,ntk,yarn",
    factor: Annotated[
        float | None, typer.Option(help="Target length / trained length, for the encodings that take one.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(help="Tokens of the second figure; by default 1024 or half of the shortest length.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Windows of each length move over the whole text by so many tokens; by default one window."),
    ] = None,
    form: Annotated[
        str, typer.Option(help="Of the tasks. generate: the greedy answer; loglikelihood: the right one, one forward.")
    ] = "generate",
    num_samples: Annotated[int, typer.Option(help="Documents a task and length.")] = 20,
    seed: Annotated[int, typer.Option(help="Which documents.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Documents at a time; it does not move a score.")] = 1,
    haystack: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text of yours, for RULER's essay tasks.")
    ] = None,
    qa: Annotated[Path | None, typer.Option(metavar="FILE", help="Questions of yours, for qa_1 and qa_2.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Measure again what the folder already holds.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU where there is one.")
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option(metavar="NAME", help="Read the model from this GGUF file of the folder.")
    ] = None,
) -> None:
    """Encodings side by side: perplexity of a text and scores of tasks by length, and a report in one HTML file.

    The perplexity cell (encoding, L) is one forward over the first L tokens of the text, tokens 2 to L scored. A run
    that was stopped goes on where it was: give the same command again. A cell that could not be measured is listed with
    its reason; the exit status is 0 all the same.

    Example: `hf-posenc compare demo:llama --encodings none,linear,ntk,yarn --factor 4 --lengths 256,512,1024
    --text book.txt --tail 64 --tasks passkey --out report`
    """
    from hf_posenc import report
    from hf_posenc.evaluate.compare import run_comparison

    if not report.can_plot():
        typer.echo(f"hf-posenc: {report.NO_PLOT}", err=True)
    tasks_too = {"form": form, "num_samples": num_samples, "seed": seed, "batch_size": batch_size}
    keywords: dict[str, Any] = tasks_too | {
        "haystack": haystack,
        "qa": qa,
        "factor": factor,
        "tail": tail,
        "stride": stride,
        "resume": not restart,
        "dtype": dtype,
        "device": device,
        "gguf_file": gguf_file,
        "out": out,
    }
    try:
        comparison = run_comparison(model, None, encodings, lengths=lengths, text=text, tasks=tasks, **keywords)
    except KeyboardInterrupt:
        typer.echo(
            f"hf-posenc: stopped; what was measured is in {out}, and the same command goes on from there", err=True
        )
        raise typer.Exit(130) from None
    errors = [*report.error_lines(comparison.rows), *report.error_lines(comparison.task_rows)]
    console = report.console()
    errors += [f"{task} was not run: {reason}" for task, reason in comparison.header["not_run"].items()]
    for item in (*report.comparison_tables(comparison), *errors, f"written to {out}"):
        console.print(item)
