"""The command `hf-posenc search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Nothing here imports torch at the top: `--help` and completion must answer at once.


def search_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or demo:llama.")],
    factor: Annotated[float, typer.Option(help="Target length / length the model was pretrained on.")],
    out: Annotated[Path, typer.Option(help="Folder for search.json, curve.csv, curve.png and the model.")],
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text; its first half is searched on, the other judges.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for all runs in this folder: 30m, 2h, 90s.")] = None,
    generations: Annotated[int | None, typer.Option(help="Without a budget 20.")] = None,
    fitness: Annotated[str, typer.Option(help="perplexity of the text, or passkey, which needs none.")] = "perplexity",
    samples: Annotated[int, typer.Option(help="Texts of the target length a candidate is measured on.")] = 4,
    population: Annotated[int, typer.Option(help="The best so far, from which the next are made.")] = 16,
    mutations: Annotated[int, typer.Option(help="New candidates a generation by mutation.")] = 8,
    crossovers: Annotated[int, typer.Option(help="New candidates a generation by crossover.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the random stream.")] = 0,
    trained_length: Annotated[
        int | None, typer.Option(help="original_max_position_embeddings, where the config already scales.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--config-only", help="Write the whole model, or its config alone.")
    ] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Search anew in a folder that holds one.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
) -> None:
    """Search one rescale factor a pair of channels (LongRoPE) for a longer context, from linear, ntk and yarn on.

    A run that was stopped goes on where it was: give the same command again. The result is judged on text that the
    search has not seen, and is the best seed where no candidate is better there. Plain Transformers loads OUT/model.

    Example: `hf-posenc search demo:llama --factor 8 --text book.txt --budget 10m --out found`

    Example: `hf-posenc search MODEL --factor 4 --fitness passkey --generations 30 --dtype bfloat16 --out found`
    """
    from hf_posenc import report
    from hf_posenc.evaluate.loading import load_model, load_tokenizer

    from .run import search
    from .settings import SearchSettings, check_generations, parse_budget

    chosen: dict[str, Any] = {
        "samples": samples,
        "population": population,
        "mutations": mutations,
        "crossovers": crossovers,
        "seed": seed,
    }
    parse_budget(budget)  # what is wrong with these is met before a large model is loaded
    check_generations(generations)
    SearchSettings(factor=factor, fitness=fitness, **chosen)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    loaded = load_model(model, dtype=dtype, device=device)
    try:
        result = search(
            loaded,
            tokenizer,
            text,
            factor=factor,
            fitness=fitness,
            budget=budget,
            generations=generations,
            out=out,
            resume=not restart,
            save_weights=weights,
            original_max_position_embeddings=trained_length,
            **chosen,
        )
    except KeyboardInterrupt:
        typer.echo(f"hf-posenc: stopped; what was measured is in {out}, and the same command goes on there", err=True)
        raise typer.Exit(130) from None
    console = report.console()
    for item in (verdict_table(result), *said(result, out)):
        console.print(item)


def verdict_table(result: Any) -> Any:
    """What was compared in the end, on either part of the texts."""
    from rich.table import Table

    from .state import perplexity

    table = Table(title="perplexity (of the answers alone with passkeys), on what was searched on and on others")
    for column in ("encoding", "searched", "held out"):
        table.add_column(column, justify="left" if column == "encoding" else "right")
    for name, value in result.perplexities.items():
        mark = " ←" if name == result.winner else ""
        table.add_row(f"{name}{mark}", f"{perplexity(result.searched[name]):.4g}", f"{value:.4g}")
    return table


def said(result: Any, out: Path) -> list[str]:
    """Who won, at what cost, and where it lies."""
    ran = f"{result.measured} candidates, {result.generations} generations, {result.seconds:.0f} s"
    won = (
        f"the search won ({ran})"
        if result.winner == "search"
        else f"no candidate beat {result.winner} on what was held out, so that is the result ({ran})"
    )
    return [won, f"written to {out}; plain Transformers reads {out / 'model'}"]
