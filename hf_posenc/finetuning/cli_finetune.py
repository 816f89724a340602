"""The command `hf-posenc finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Nothing here imports torch at the top: `--help` and completion must answer at once.

INTERRUPTED = 130
"""The exit status of a command that SIGINT ended, as shells have it."""

DATA = "Data"
TRAINED = "What is trained"
TRAINING = "Training"
MEASURED = "Before and after"


def finetune_command(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A folder, a hub id, or demo:llama, demo:gpt2, demo:bloom.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the adapter or the weights, and for checkpoints.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Put in before training; by default what the model was saved with.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="Target length / length the model was pretrained on.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the encoding: beta_fast=16.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings as YAML or JSON (finetune.yaml); flags go before them."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (the checkpoint's own), float32, bfloat16, float16.")] = None,
    gguf_file: Annotated[str | None, typer.Option(metavar="NAME", help="Read this GGUF file of the folder.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Delete the folder's checkpoints and begin anew.")] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, JSON lines, a folder, a name of `datasets`, or task:passkey.", rich_help_panel=DATA
        ),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a window.", rich_help_panel=DATA)] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="concat; packed (no leak between documents); pose, randomized.", rich_help_panel=DATA),
    ] = None,
    target_length: Annotated[
        int | None, typer.Option(help="Of pose, randomized: where positions end.", rich_help_panel=DATA)
    ] = None,
    column: Annotated[str | None, typer.Option(help="Of JSON or a data set: the text's.", rich_help_panel=DATA)] = None,
    split: Annotated[str | None, typer.Option(help="Of a data set; by default train.", rich_help_panel=DATA)] = None,
    full: Annotated[
        bool | None, typer.Option("--full", help="Every parameter instead of LoRA.", rich_help_panel=TRAINED)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of LoRA; by default 8.", rich_help_panel=TRAINED)] = None,
    alpha: Annotated[float | None, typer.Option(help="Of LoRA; by default 16.", rich_help_panel=TRAINED)] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A module for LoRA, instead of attention's projections.", rich_help_panel=TRAINED),
    ] = None,
    norms: Annotated[
        bool | None, typer.Option("--norms/--no-norms", help="Train norms too; the default.", rich_help_panel=TRAINED)
    ] = None,
    embeddings: Annotated[
        bool | None, typer.Option("--embeddings", help="Train embeddings too.", rich_help_panel=TRAINED)
    ] = None,
    quantize: Annotated[
        bool | None, typer.Option("--quantize", help="Base in 4 bits (QLoRA; bitsandbytes).", rich_help_panel=TRAINED)
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="Go on with this adapter.", rich_help_panel=TRAINED)
    ] = None,
    merge: Annotated[
        bool | None, typer.Option("--merge", help="Write OUT/merged, which loads alone.", rich_help_panel=TRAINED)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps; by default 200.", rich_help_panel=TRAINING)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="By default 2e-4, with --full 2e-5.", rich_help_panel=TRAINING)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows a device and step.", rich_help_panel=TRAINING)] = None,
    shifted_group: Annotated[
        int | None,
        typer.Option(help="Attention within groups of N tokens, as LongLoRA.", metavar="N", rich_help_panel=TRAINING),
    ] = None,
    training: Annotated[
        list[str] | None,
        typer.Option(
            "--training",
            metavar="KEY=VALUE",
            help="Any field of TrainingArguments: bf16=true, gradient_checkpointing=true, report_to=wandb.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    eval_lengths: Annotated[
        str | None, typer.Option(help="Measure at these: 256,512.", rich_help_panel=MEASURED)
    ] = None,
    eval_text: Annotated[
        str | None, typer.Option(metavar="FILE", help="A held-out text, for perplexity.", rich_help_panel=MEASURED)
    ] = None,
    eval_tasks: Annotated[str | None, typer.Option(help="For example passkey.", rich_help_panel=MEASURED)] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="And on the way, every so many steps.", rich_help_panel=MEASURED)
    ] = None,
) -> None:
    """Fine-tune a patched model briefly: LoRA or every parameter, on one CPU or many GPUs.

    A run that was stopped goes on where it was: give the same command again. Several processes: the same command under
    `torchrun` or `accelerate launch` (`-m hf_posenc finetune ...`).

    Example: `hf-posenc finetune demo:llama --encoding yarn --factor 4 --data book.txt --max-length 1024 --steps 200
    --out run --merge`

    Example: `hf-posenc finetune MODEL --encoding linear --factor 2 --data corpus.jsonl --mode pose --max-length 4096
    --training bf16=true --eval-lengths 4096,8192 --eval-text held-out.txt --out run`

    Example: `hf-posenc finetune --config run/finetune.yaml --out again`
    """
    from hf_posenc.errors import OptionError
    from hf_posenc.evaluate.specs import gather_options, parse_option
    from hf_posenc.finetuning.settings import Settings, merged, read_settings

    values = read_settings(config) if config is not None else {}
    options = gather_options(factor, option)
    if options and encoding is None and not values.get("encoding"):
        raise OptionError(f"{', '.join(options)} without --encoding: name the encoding that takes it")
    if encoding is not None:  # another encoding's options would not fit
        values["encoding"] = {}
    own = {"max_steps": steps, "learning_rate": learning_rate, "per_device_train_batch_size": batch_size}
    given = training_group(dict(map(parse_option, training or [])), without_none(own))
    flags: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "gguf_file": gguf_file,
        "adapter": adapter,
        "merge": merge,
        "shifted_group": shifted_group,
        "encoding": {"name": encoding, **options},
        "data": {
            "source": data,
            "max_length": max_length,
            "mode": mode,
            "target_length": target_length,
            "column": column,
            "split": split,
        },
        "lora": {
            "full": full,
            "r": rank,
            "alpha": alpha,
            "targets": target,
            "norms": norms,
            "embeddings": embeddings,
            "quantize": quantize,
        },
        "training": given,
        "evaluation": {"lengths": eval_lengths, "text": eval_text, "tasks": eval_tasks, "every": eval_every},
    }
    _finetune(Settings.of(merged(values, without_none(flags))), out, restart)


OWN_FLAGS = {"max_steps": "--steps", "learning_rate": "--learning-rate", "per_device_train_batch_size": "--batch-size"}


def training_group(fields: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The fields of --training and of the flags for some of them; raises `OptionError` where the two disagree."""
    from hf_posenc.errors import OptionError

    for key in own:
        if key in fields and fields[key] != own[key]:
            raise OptionError(
                f"--training {key}={fields[key]} and {OWN_FLAGS[key]} {own[key]} are the same setting; give one of them"
            )
    return {**fields, **own}


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given: what is None is left to the file, or to its default."""
    nested = {key: without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in nested.items() if value is not None}


def _finetune(settings: Any, out: Path | None, restart: bool) -> None:
    from hf_posenc import report
    from hf_posenc.errors import OptionError

    if not settings.model:
        raise OptionError("no model: name one, hf-posenc finetune MODEL ..., or give a file that does (--config)")
    if out is None:
        raise OptionError("no folder: give one, --out DIR")
    if settings.encoding:
        from hf_posenc.registry import create

        create(settings.encoding["name"], **{k: v for k, v in settings.encoding.items() if k != "name"})
    from hf_posenc.finetuning import output
    from hf_posenc.finetuning.run import run

    try:
        result = run(settings, out=out, restart=restart)
    except KeyboardInterrupt as stopped:
        typer.echo(f"hf-posenc: {stopped or 'stopped'}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    console = report.console()
    for item in output.tables(result):
        console.print(item)
    console.print(f"saved to {out}; load it with hf_posenc.from_pretrained({str(out)!r})")
    if result.merged is not None:
        console.print(f"merged: {result.merged}, which loads without the base")
