"""The report of a fine-tuning: what it changed by length, the way there, and the settings that repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_posenc.report import plots
from hf_posenc.report.files import write_atomically
from hf_posenc.report.html import flat
from hf_posenc.report.page import Cell, Page, Picture, Pictures, Section, Table, render, text_row
from hf_posenc.report.words import number, spoken

PERPLEXITY = "perplexity"
Points = list[tuple[float, float]]


def write_training_report(folder: Path, found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """report.html in `folder`: `found` as `FinetuneResult.as_json` has it, `settings` as finetune.yaml has them."""
    write_atomically(folder / "report.html", training_html(found, settings).encode())


def training_html(found: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The page: one file that needs no network, no script and no other file."""
    encoding = dict(settings.get("encoding") or {})
    name = encoding.pop("name", "the model's own encoding")
    with_options = ", ".join(f"{key}={value}" for key, value in encoding.items())
    speed, memory = found.get("tokens_per_second"), found.get("peak_memory_mib")
    facts = {
        "encoding": f"{name} ({with_options})" if with_options else name,
        "steps": f"{found['steps']}",
        "trained parameters": f"{found['trained_parameters']:,}",
        **({"speed": f"{speed:.0f} tokens/s"} if speed else {}),
        **({"peak memory": f"{memory:.0f} MiB"} if memory else {}),
    }
    tables = [before_and_after(title, rows) for title, rows in measured(found["evaluations"]).items()]
    model = settings.get("model") or "a loaded model"
    return render(
        Page(
            title=f"Fine-tuning of {model}",
            summary=summary(found["evaluations"]),
            facts=facts,
            sections=[
                figures(found["evaluations"], tables),
                losses(found["losses"]),
                Section(
                    "settings",
                    "Settings, and how to repeat it",
                    tables=[Table("Settings", ["entry", "value"], [text_row(*row) for row in flat(settings)])],
                    code=["hf-posenc finetune --config finetune.yaml --out again"],
                ),
            ],
        )
    )


def measured(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Mapping[str, float]]]]:
    """{figure: [(step, {length: value})]}: perplexity, and the score of each task."""
    rows = {PERPLEXITY: [(row["step"], row["perplexity"]) for row in evaluations if row["perplexity"]]}
    for task in dict.fromkeys(task for row in evaluations for task in row["tasks"]):
        rows[task] = [(row["step"], row["tasks"][task]) for row in evaluations if task in row["tasks"]]
    return {title: steps for title, steps in rows.items() if steps}


def summary(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What changed, in words: each figure at each length, before and after."""
    said = []
    for title, rows in measured(evaluations).items():
        (first, before), (last, after) = rows[0], rows[-1]
        if first == last:
            said.append(f"The {title} was measured once, at step {first}.")
            continue
        moved = [f"{number(before[n])} to {number(after[n])} at {n}" for n in before if n in after]
        what = "Perplexity" if title == PERPLEXITY else f"The score of {title}"
        said.append(f"{what} went from {spoken(moved)} tokens in {last - first} steps.")
    return said or ["Nothing was measured before and after: give lengths and a held-out text, or tasks."]


def before_and_after(title: str, rows: Sequence[tuple[int, Mapping[str, float]]]) -> Table:
    """A row for each length: before, on the way, after, and the ratio of the last to the first."""
    steps = [step for step, _ in rows]
    names = ["before" if step == 0 else "after" if step == steps[-1] else f"step {step}" for step in steps]
    ratio = len(rows) > 1 and title == PERPLEXITY
    table = []
    for length in rows[0][1]:
        values = [by_length.get(length) for _, by_length in rows]
        cells = [Cell("–") if value is None else Cell(number(value)) for value in values]
        first, last = values[0], values[-1]
        change = [Cell(f"{last / first:.3f} ×" if first and last else "–")] if ratio else []
        table.append([Cell(length), *cells, *change])
    caption = "Perplexity of the first tokens" if title == PERPLEXITY else f"{title}, score 0 to 1"
    return Table(caption, ["length", *names, *(["after / before"] if ratio else [])], table)


def figures(evaluations: Sequence[Mapping[str, Any]], tables: Sequence[Table]) -> Section:
    """The measurements by step."""
    name, title = "measured", "Before and after"
    if not tables:
        return Section(name, title, missing="no lengths to measure at were given.")
    pictures: list[Picture] = []
    for what, rows in measured(evaluations).items():
        lines: dict[str, Points] = {f"{n} tokens": [(s, by[n]) for s, by in rows if n in by] for n in rows[0][1]}
        draw = partial(draw_steps, lines=lines, title=what, log=what == PERPLEXITY)
        alt = f"{what} by step, one line a length; numbers in the table below"
        size = plots.legend_room(list(lines))
        pictures.append(Picture(plots.svg(draw, f"measured-{len(pictures)}", alt, size)))
    words = ["One text, held out: its first tokens, up to each length. Step 0 is the patched model before training."]
    return Section(name, title, words, [Pictures(pictures)], tables)


def losses(found: Mapping[str, float]) -> Section:
    """The loss by step."""
    name, title = "loss", "Loss by step"
    if not found:
        return Section(name, title, missing="no loss was logged.")
    points: Points = [(int(step), loss) for step, loss in found.items()]
    draw = partial(draw_steps, lines={"loss": points}, title="loss (nats a token)", log=False)
    drawn = Picture(plots.svg(draw, "loss-figure", "Loss by step; its numbers are in results.json"))
    return Section(name, title, pictures=[Pictures([drawn])])


def draw_steps(axes: Any, lines: Mapping[str, Points], title: str, log: bool) -> None:
    """One line a name through its (step, value)."""
    for i, (name, points) in enumerate(lines.items()):
        look = {"color": plots.COLOURS[i % len(plots.COLOURS)], "marker": plots.MARKERS[i % len(plots.MARKERS)]}
        axes.plot(*zip(*points), label=plots.plain(name), markersize=3.5, **look)
    if log:
        plots.log_axis(axes)
    axes.set_xlabel("step")
    axes.set_title(plots.plain(title))
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        plots.legend_below(axes)
