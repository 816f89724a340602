"""What a run leaves: the adapter or the weights, the merged model, figures, and what to say about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import CheckpointError
from hf_posenc.modules import quiet_loading

from .measure import Measurement
from .settings import Settings

RESULTS = "results.json"
MERGED = "merged"


@dataclass
class FinetuneResult:
    """A finished run: the trained model, its folder, the losses by step, and what was measured.

    `model` is the caller's own, with the adapter in it; `merged` the merged model's folder, if asked for.
    """

    model: Any = field(repr=False)
    folder: Path
    steps: int
    losses: dict[int, float]
    tokens_per_second: float | None = None
    peak_memory_mib: float | None = None
    trained_parameters: int = 0
    evaluations: list[Measurement] = field(default_factory=list)
    merged: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; folders by name, for a path is the machine's own."""
        return {
            "steps": self.steps,
            "losses": {str(step): loss for step, loss in self.losses.items()},
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_mib": self.peak_memory_mib,
            "trained_parameters": self.trained_parameters,
            "evaluations": [asdict(made) for made in self.evaluations],
        }


def write_results(result: FinetuneResult, settings: Settings) -> None:
    """results.json in the run's folder; and report.html, before and after, where matplotlib and jinja2 are there."""
    from hf_posenc.report import can_plot, write_atomically

    found = result.as_json()
    write_atomically(result.folder / RESULTS, (json.dumps(found, indent=2) + "\n").encode())
    (result.folder / "report.html").unlink(missing_ok=True)  # an earlier part's, where this one can draw none
    if can_plot():
        from hf_posenc.report.training import write_training_report

        write_training_report(result.folder, found, settings.as_dict())


def merge(folder: Path, tokenizer: Any, **how: Any) -> Path:
    """Base, patch and adapter of `folder` as one model in `folder/merged`, which loads without the base.

    The adapter is read from the disk again, so that what is merged is what was saved.
    """
    from transformers import AutoModelForCausalLM

    import hf_posenc

    out = folder / MERGED
    with quiet_loading():
        model = hf_posenc.from_pretrained(folder, auto_class=AutoModelForCausalLM, **how)
        hf_posenc.save_pretrained(model.merge_and_unload(), out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    return out


def prepare(out: str | Path) -> Path:
    """The run's folder, made and writable; unlike a report's it may hold an earlier part of the same run."""
    from hf_posenc.report import prepare_folder

    try:
        return prepare_folder(out)
    except OSError as error:
        raise CheckpointError(f"cannot write to {out}: {error}") from error


@contextmanager
def leaves_nothing(out: str | Path) -> Iterator[None]:
    """A folder that was not there before and is still empty goes when the block is refused."""
    folder = Path(out).expanduser()
    new = not folder.exists()
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):  # it holds something, or was never made
                folder.rmdir()
        raise


def tables(result: FinetuneResult) -> list[Any]:
    """What was measured, a row a step; then speed and memory in one line."""
    from rich.table import Table

    made: list[Any] = []
    rows = result.evaluations
    figures = {"perplexity": [(row.step, row.perplexity) for row in rows if row.perplexity]}
    for task in rows[0].tasks if rows else ():
        figures[f"{task}, score 0 to 1"] = [(row.step, row.tasks[task]) for row in rows if task in row.tasks]
    for title, found in figures.items():
        if not found:
            continue
        table = Table("step", *found[0][1], title=f"{title}, by length")
        for step, values in found:
            table.add_row(str(step), *(f"{value:.4g}" for value in values.values()))
        made.append(table)
    speed = "" if result.tokens_per_second is None else f", {result.tokens_per_second:.0f} tokens/s"
    memory = "" if result.peak_memory_mib is None else f", peak memory {result.peak_memory_mib:.0f} MiB"
    last = "" if not result.losses else f", loss {list(result.losses.values())[-1]:.4f}"
    trained = f"{result.trained_parameters:,} parameters trained"
    return [*made, f"{result.steps} steps, {trained}{last}{speed}{memory}"]
