"""The command `hf-posenc export`: a model as a folder for Transformers, vLLM or llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .api import Exported

# Nothing here imports torch at the top: `--help` and completion must answer at once.


def verdict_table(exported: Exported) -> Any:
    """One line a target: how it holds this model, or why not."""
    from rich.table import Table

    names = {"config": "config alone", "code": "own code", "approximation": "approximation", "refused": "refused"}
    table = Table(title="who can read this model")
    for column in ("target", "how", "in words"):
        table.add_column(column)
    for verdict in exported.row:
        table.add_row(verdict.target, names[verdict.how], verdict.text)
    return table


def export_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or demo:llama.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")],
    target: Annotated[
        str, typer.Option(help="transformers: needs no hf_posenc; vllm; gguf: for llama.cpp's converter.")
    ] = "transformers",
    encoding: Annotated[
        str | None, typer.Option(help="Patch with this first; by default the patch that the folder holds.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="Target length / length the model was pretrained on.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the encoding: beta_fast=16.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder or hub id; by default the tokenizer beside the model.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    gguf_file: Annotated[str | None, typer.Option(metavar="NAME", help="Read this GGUF file of the folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model's folder that is there.")] = False,
) -> None:
    """Write a model so that others load it with its encoding, and say who else could, and who could not.

    Example: `hf-posenc export demo:llama out --encoding alibi`

    Example: `hf-posenc export demo:llama served --encoding yarn --factor 4 --target vllm`
    """
    from hf_posenc import report
    from hf_posenc.errors import OptionError, unknown
    from hf_posenc.evaluate.loading import load_model, load_tokenizer
    from hf_posenc.evaluate.specs import gather_options
    from hf_posenc.registry import create

    from .api import export
    from .folder import check_place
    from .targets import TARGETS

    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    options = gather_options(factor, option)
    if encoding is not None:
        create(encoding, **options)  # a misspelt name is met before a large model is loaded
    elif options:
        raise OptionError(f"{', '.join(options)} without --encoding: name the encoding that takes it")
    check_place(out, overwrite)
    how: dict[str, Any] = {"dtype": dtype, "device": "cpu", "gguf_file": gguf_file, "own_head": True}
    loaded = load_model(model, encoding=encoding, options=options, **how)
    found = None  # the one beside the model, which `export` finds
    if tokenizer or gguf_file:
        found = load_tokenizer(tokenizer or model, gguf_file=None if tokenizer else gguf_file)
    exported = export(loaded, out, target, tokenizer=found, overwrite=overwrite)
    console = report.console()
    for item in (verdict_table(exported), *exported.notes, f"written to {out}; load it with"):
        console.print(item)
    for line in exported.load:
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
