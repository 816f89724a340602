"""What a search leaves in its folder beside its state: the curve, and the model with its result."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from hf_posenc.encodings import LongRope
from hf_posenc.patching import patched

from .state import State, perplexity

MODEL = "model"
CURVE = "curve"


def write_curve(folder: Path, state: State, found: str) -> None:
    """`curve.csv`, one line a generation, and `curve.png` where matplotlib is there."""
    from hf_posenc import report

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("generation", "measured", "best_nll", "best_ppl"))
    for number, measured, best, _ in state.history():
        writer.writerow((number, measured, f"{best:.6f}", f"{perplexity(best):.6f}"))
    report.write_atomically(folder / f"{CURVE}.csv", text.getvalue().encode())
    if report.can_plot():
        report.write_atomically(folder / f"{CURVE}.png", report.figure_bytes([lambda axes: draw(axes, state)], 1))


def draw(axes: Any, state: State) -> None:
    """Every candidate, the best so far, and the seeds as lines across."""
    losses = list(state.losses.values())  # in the order in which they were measured
    axes.plot(range(1, len(losses) + 1), losses, ".", color="#56B4E9", markersize=3, label="a candidate")
    best = [min(losses[: i + 1]) for i in range(len(losses))]
    axes.plot(range(1, len(best) + 1), best, color="#0072B2", label="the best so far")
    seeds = {name: loss for name, key in state.seeds.items() if math.isfinite(loss := state.losses[key])}
    for (name, loss), line in zip(seeds.items(), ("-", "--", "-.", ":")):
        axes.axhline(loss, color="#7F5B3A", linestyle=line, linewidth=1, label=name)
    # as high as the seed that is next to the best: the worst ones would press all else together
    top = sorted(seeds.values())[:2][-1] if seeds else best[0]
    room = 0.1 * max(top - best[-1], 0.01)
    axes.set_ylim(best[-1] - room, top + room)
    axes.set_xlabel("candidates measured")
    axes.set_ylabel("nats a token, on the search's texts")
    axes.legend()


def write_model(folder: Path, model: Any, tokenizer: Any, encoding: LongRope, weights: bool) -> None:
    """`model`: what plain Transformers loads with the result in its config; without `weights` the config alone."""
    place = folder / MODEL
    with patched(model, encoding):
        if weights:
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
        else:
            model.config.save_pretrained(place)
