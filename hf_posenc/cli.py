"""The command `hf-posenc`: list, patch, verify, compare, eval, finetune, export, search, demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_posenc.evaluate.cli_compare import compare_command
from hf_posenc.evaluate.cli_eval import SETTINGS, eval_command
from hf_posenc.exporting.cli_export import export_command
from hf_posenc.finetuning.cli_finetune import finetune_command
from hf_posenc.search.cli_search import search_command

# Nothing here imports torch at the top: `--help` and completion must answer at once.


class _OneLineErrors(TyperGroup):
    """A `PosencError` is the user's to mend: one line on stderr and exit status 2, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        from hf_posenc.errors import PosencError

        try:
            return super().invoke(ctx)
        except PosencError as error:
            typer.echo(f"hf-posenc: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    help="Replace the position encoding of a Transformers model, prove that it applied, and measure what it does.",
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a hub id, or an embedded model: demo:llama, demo:gpt2, demo:bloom."
    ),
]
Factor = Annotated[
    float | None, typer.Option(help="Target length / length the model was pretrained on, for encodings that take one.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the encoding, as often as needed: beta_fast=16."),
]
Gguf = Annotated[str | None, typer.Option(metavar="NAME", help="Read the model from this GGUF file of the folder.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU where there is one.")]


def _print(*items: Any) -> None:
    from hf_posenc import report

    console = report.console()
    for item in items:
        console.print(item)


@app.command("list")
def list_command(
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Which encoding works on which architecture.")
    ] = False,
) -> None:
    """The encodings and their options; with `--architectures`, which of them works on which architecture.

    Example: `hf-posenc list --architectures`
    """
    from hf_posenc import report

    if not architectures:
        return _print(*report.encodings_table())
    table, reasons = report.support_table()
    return _print(table, *reasons)


@app.command()
def patch(
    model: Model,
    encoding: Annotated[str, typer.Argument(metavar="ENCODING", help="A name from `hf-posenc list`.")],
    out: Annotated[Path, typer.Option(help="Folder for the patched model and its tokenizer.")],
    factor: Factor = None,
    option: Options = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    gguf_file: Gguf = None,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Run `verify` before anything is saved.")] = True,
) -> None:
    """Patch a checkpoint, prove that the patch is in effect, and save it with its tokenizer.

    Example: `hf-posenc patch demo:llama yarn --factor 4 --out llama-yarn`

    Example: `hf-posenc patch DIR yarn --factor 2 --option beta_fast=16 --gguf-file model.gguf --out DIR2`
    """
    import hf_posenc
    from hf_posenc import report
    from hf_posenc.evaluate.loading import load_model, load_tokenizer
    from hf_posenc.evaluate.specs import gather_options
    from hf_posenc.registry import create

    options = gather_options(factor, option)
    create(encoding, **options)  # a misspelt name is met before a large model is loaded
    folder = report.prepare_folder(out)
    tokenizer = load_tokenizer(model, gguf_file=gguf_file)
    held = _held(model)
    if held:
        typer.echo(f"hf-posenc: {model} holds {held}: out it goes, {encoding} comes in, from the trained length")
    how: dict[str, Any] = {"dtype": dtype, "device": "cpu", "gguf_file": gguf_file, "own_head": True}
    loaded = load_model(model, encoding=encoding, options=options, **how)
    if check:
        _require(hf_posenc.verify(loaded, tokenizer))
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _print(f"saved to {folder}", *_readers(loaded, folder))


def _held(model: str) -> str | None:
    """The encoding that a local folder was saved with, if any, in words."""
    from hf_posenc.evaluate.loading import resolve_model

    file = Path(resolve_model(model), "config.json")
    raw = json.loads(file.read_text()).get("hf_posenc") if file.is_file() else None
    return f"{raw.get('encoding')} {raw.get('options')}" if isinstance(raw, dict) else None


def _require(verification: Any) -> None:
    """Print the table of checks; exit status 1 where one failed."""
    _print(verification.table())
    if not verification.passed:
        typer.echo("hf-posenc: a check failed (see the table)", err=True)
        raise typer.Exit(1)


def _readers(model: Any, folder: Path) -> list[str]:
    """Who reads the saved folder back with its encoding, and who does not."""
    from hf_posenc import record

    saved = record.read(model.config)
    if saved is not None and saved.native:
        return [f"plain Transformers reads it with its encoding: AutoModelForCausalLM.from_pretrained({str(folder)!r})"]
    return [
        f"read it with hf_posenc.from_pretrained({str(folder)!r})",
        f"plain Transformers cannot express {saved.name if saved else 'it'}, and refuses the folder; `hf-posenc "
        "export` writes one that it loads with no hf_posenc installed",
    ]


@app.command()
def verify(
    model: Model,
    encoding: Annotated[
        str | None, typer.Option(help="Patch with this first; by default the patch that the folder holds.")
    ] = None,
    factor: Factor = None,
    option: Options = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Device = None,
    gguf_file: Gguf = None,
) -> None:
    """Did the patch apply? Checks it on your own model, prints a table with figures; exit status 1 on any failure.

    Example: `hf-posenc verify llama-yarn`

    Example: `hf-posenc verify demo:gpt2 --encoding alibi`
    """
    import hf_posenc
    from hf_posenc.errors import OptionError
    from hf_posenc.evaluate.loading import load_model, load_tokenizer
    from hf_posenc.evaluate.specs import gather_options
    from hf_posenc.registry import create

    options = gather_options(factor, option)
    if encoding is not None:
        create(encoding, **options)
    elif options:
        raise OptionError(f"{', '.join(options)} without --encoding: name the encoding that takes it")
    tokenizer = load_tokenizer(model, gguf_file=gguf_file)
    place: dict[str, Any] = {"dtype": dtype, "device": device, "gguf_file": gguf_file}
    loaded = load_model(model, encoding=encoding, options=options, **place)
    if hf_posenc.get_encoding(loaded) is None:
        raise OptionError(f"{model} holds no patch of hf_posenc; name one to try: --encoding yarn --factor 4")
    _require(hf_posenc.verify(loaded, tokenizer))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the tables, the plots and the figures as JSON.")] = Path(
        "demo-results"
    ),
) -> None:
    """The whole story in about a minute: three embedded models, at up to four times the length they were trained on.

    Example: `hf-posenc demo --out demo-results`
    """
    from hf_posenc import report
    from hf_posenc.demo.run import run_demo

    if not report.can_plot():
        typer.echo(f"hf-posenc: {report.NO_PLOT}", err=True)
    run_demo(out)


app.command("compare")(compare_command)
app.command("eval", context_settings=SETTINGS)(eval_command)
app.command("finetune")(finetune_command)
app.command("export")(export_command)
app.command("search")(search_command)


def main() -> None:
    """The entry point `hf-posenc`."""
    app(prog_name="hf-posenc")
