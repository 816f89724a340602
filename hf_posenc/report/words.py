"""What a comparison says, in words made from its own figures: which encoding to choose, and at what cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.report.measures import (
    CLOSE,
    all_rows,
    at_length,
    highest,
    labels,
    lowest,
    mean_scores,
    perplexities,
    short_names,
    task_scores,
)

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import Comparison


def spoken(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def number(value: float) -> str:
    """Three significant digits, without an exponent where that can be read."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}" if value < 1e7 else f"{value:.1e}"


def share(value: float) -> str:
    """A score, 0 to 1."""
    return f"{value:.2f}"


def summary(comparison: Comparison) -> list[str]:
    """The sentences of the report's first paragraph, the verdict first."""
    tail, scores = perplexities(comparison.rows, "ppl_tail"), mean_scores(comparison.task_rows)
    said = _verdict(comparison) if tail or scores else ["No cell could be measured; the reasons are at the end."]
    if tail:
        said.append(_by_length(comparison))
    if scores:
        said.append(_by_task(comparison))
    elif tail and comparison.task_rows:
        said.append("No task could be scored.")
    elif tail:
        said.append("No task was run: perplexity alone does not show whether a model finds what it has read.")
    failed = sum(row.error is not None for row in all_rows(comparison))
    if failed and len(said) > 1:
        cells = len(comparison.rows) + len(comparison.task_rows)
        said.append(f"Not measured: {failed} of {cells} cells, listed at the end with the reasons.")
    not_run = comparison.header.get("not_run") or {}
    if not_run:
        said.append(f"Not run: {spoken(not_run)}; the reasons are at the end.")
    long = {label: name for label, name in short_names(labels(comparison)).items() if name != label}
    return [functools.reduce(lambda text, pair: text.replace(*pair), long.items(), sentence) for sentence in said]


@dataclass(frozen=True)
class _Lead:
    """Who leads at the longest length that has figures: `values` {label: figure} there, `leaders` best first."""

    length: int
    values: dict[str, float]
    leaders: list[str]

    def told(self, label: str, form: Callable[[float], str]) -> str:
        return form(self.values[label]) if label in self.values else "not measured"


def _fluency(comparison: Comparison) -> _Lead:
    length, values = _furthest(perplexities(comparison.rows, "ppl_tail"))
    return _Lead(length, values, lowest(values))


def _recall(comparison: Comparison) -> _Lead:
    length, values = _furthest(mean_scores(comparison.task_rows))
    return _Lead(length, values, highest(values, document_share(comparison)) if any(values.values()) else [])


def _verdict(comparison: Comparison) -> list[str]:
    """Which encoding to choose at the longest length that was measured; and why."""
    measured = list(dict.fromkeys(row.label for row in all_rows(comparison)))
    if len(measured) == 1:
        return [f"Only {_named(measured[0])} was measured: there is nothing to choose between."]
    fluency, recall = _fluency(comparison), _recall(comparison)
    both = [label for label in fluency.leaders if label in recall.leaders]
    leaders = both or fluency.leaders or recall.leaders
    if not leaders:
        return [f"No choice: at {recall.length} tokens no encoding scores above 0 on the tasks."]
    if fluency.leaders and recall.leaders and not both:
        return ["No single choice: perplexity and tasks disagree.", _disagreement(fluency, recall, comparison)]
    chosen, cost = _cheapest(leaders, comparison)
    start = f"Choose {_named(chosen)}{_but_within(chosen, comparison)}."
    if len(leaders) > 1:
        start = f"Too close to call between {spoken(leaders)}; {_named(chosen)} will do."
    return [start, _reasons(chosen, fluency, recall, comparison) + cost]


def _disagreement(fluency: _Lead, recall: _Lead, comparison: Comparison) -> str:
    first, second = fluency.leaders[0], recall.leaders[0]
    there = "there" if recall.length == fluency.length else f"at {_of_trained(recall.length, comparison)}"
    return (
        f"At {_of_trained(fluency.length, comparison)} {_close(fluency.leaders)} the lowest tail perplexity "
        f"({fluency.told(first, number)}; mean task score {recall.told(first, share)}); {there} "
        f"{_close(recall.leaders)} the best mean task score ({recall.told(second, share)}; tail perplexity "
        f"{fluency.told(second, number)}). Take the former to go on with a text, the latter to find what stands in it."
        f"{_costs([first, second], comparison)}"
    )


def _reasons(chosen: str, fluency: _Lead, recall: _Lead, comparison: Comparison) -> str:
    found = []
    if fluency.leaders:
        lead = (
            "the only tail perplexity that could be measured"
            if len(fluency.values) == 1
            else "the lowest tail perplexity"
            if fluency.leaders == [chosen]
            else "a tail perplexity within 1 % of the lowest"
        )
        beside = f" (unpatched {fluency.told('none', number)})" if "none" in fluency.values and chosen != "none" else ""
        where = _of_trained(fluency.length, comparison)
        found.append(f"at {where} it has {lead}, {fluency.told(chosen, number)}{beside}")
    if recall.leaders:
        lead = "the best mean task score" if recall.leaders == [chosen] else "a mean task score with the best"
        there = f"at {_of_trained(recall.length, comparison)}"
        there = "there" if found and recall.length == fluency.length else there
        found.append(f"{there} it has {lead}, {recall.told(chosen, share)}")
    elif recall.values:
        found.append(f"at {recall.length} tokens no encoding scores above 0 on the tasks")
    reasons = "; ".join(found)
    return f"{reasons[:1].upper()}{reasons[1:]}."


def _named(label: str) -> str:
    """An encoding in a sentence, where the bare word `none` would be misread."""
    return "none (the unpatched model)" if label == "none" else label


def _furthest(values: Mapping[str, Mapping[int, float]]) -> tuple[int, dict[str, float]]:
    """The longest length at which there is a value, and {label: value} there."""
    longest = max((length for row in values.values() for length in row), default=0)
    return longest, at_length(values, longest)


def document_share(comparison: Comparison) -> float:
    """The difference of mean scores that a single document makes, at least 1 %: less is no finding."""
    samples = [row.samples for row in comparison.task_rows if row.acc is not None and row.samples]
    tasks = max(len(task_scores(comparison.task_rows)), 1)
    return max(CLOSE, 1 / (min(samples) * tasks)) if samples else CLOSE


def _close(leaders: Sequence[str]) -> str:
    return f"{_named(leaders[0])} has" if len(leaders) == 1 else f"{spoken(leaders)}, too close to tell apart, have"


def _of_trained(length: int, comparison: Comparison) -> str:
    """A length in tokens, as a multiple of the trained length where that is known."""
    trained = comparison.header.get("trained_length")
    if not trained:
        return f"{length} tokens"
    place = f"{length / trained:.3g} times the trained length" if length > trained else "within the trained length"
    return f"{length} tokens ({place})"


def near_length(comparison: Comparison) -> int | None:
    """The length at which a cost is told: the longest measured one that the model was trained on."""
    trained = comparison.header.get("trained_length")
    lengths = [row.length for row in comparison.rows if trained and row.length <= trained]
    return max(lengths, default=None)


def _but_within(chosen: str, comparison: Comparison) -> str:
    """What the headline adds where the chosen encoding costs more than 1 % within the trained length."""
    near, trained = near_length(comparison), comparison.header.get("trained_length")
    tail = perplexities(comparison.rows, "ppl_tail")
    there, (far, _) = at_length(tail, near or 0), _furthest(tail)
    best = lowest(there)
    if not trained or far <= trained or chosen not in there or chosen in best:
        return ""
    better = "none" if "none" in best else best[0]
    return f" for texts past the trained length; within it {_named(better)} is better"


def _cheapest(leaders: Sequence[str], comparison: Comparison) -> tuple[str, str]:
    """The leader that costs least at the trained length, and that cost in words."""
    near = near_length(comparison)
    there = {} if near is None else at_length(perplexities(comparison.rows, "ppl_tail"), near)
    known = {label: there[label] for label in leaders if label in there}
    if not known:
        return leaders[0], ""
    chosen = leaders[0] if leaders[0] in lowest(known) else lowest(known)[0]
    yardstick = "none" if "none" in there else lowest(there)[0]
    if chosen == yardstick:
        return chosen, f" At {near} tokens, within the trained length, it has {number(there[chosen])}."
    ratio = there[chosen] / there[yardstick]
    change = (
        "the same within 1 %" if abs(ratio - 1) <= CLOSE else f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}"
    )
    change = f"{ratio:.1f} times as much" if ratio >= 2 else change
    beside = "the unpatched model" if yardstick == "none" else yardstick
    return chosen, (
        f" The cost at {near} tokens, within the trained length: {number(there[chosen])}, against "
        f"{number(there[yardstick])} of {beside}: {change}."
    )


def _costs(chosen: Sequence[str], comparison: Comparison) -> str:
    """What each of `chosen` and the unpatched model have within the trained length."""
    near = near_length(comparison)
    there = {} if near is None else at_length(perplexities(comparison.rows, "ppl_tail"), near)
    told = [f"{_named(label)} {number(there[label])}" for label in dict.fromkeys([*chosen, "none"]) if label in there]
    return f" Tail perplexity at {near} tokens, within the trained length: {', '.join(told)}." if told else ""


def _by_length(comparison: Comparison) -> str:
    """The best at each length by tail perplexity."""
    tail = perplexities(comparison.rows, "ppl_tail")
    told = []
    for length in sorted({row.length for row in comparison.rows}):
        values = at_length(tail, length)
        if values:
            told.append(f"{length}: {_names(lowest(values))} ({number(values[lowest(values)[0]])})")
    return f"Lowest tail perplexity by length (“or”: within 1 %): {'; '.join(told)}."


def _names(leaders: Sequence[str]) -> str:
    return " or ".join(leaders)


def _by_task(comparison: Comparison) -> str:
    """The best of each task at the longest length at which it was scored."""
    told = []
    for task, by_label in task_scores(comparison.task_rows).items():
        longest = max(length for row in by_label.values() for length in row)
        values = at_length(by_label, longest)
        if max(values.values()) == 0:
            told.append(f"{task} at {longest}: no encoding scores above 0")
            continue
        leaders = highest(values)
        told.append(f"{task} at {longest}: {_names(leaders)} ({share(values[leaders[0]])})")
    return f"Best by task: {'; '.join(told)}."
