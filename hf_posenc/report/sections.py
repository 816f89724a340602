"""The sections that hold figures of perplexity, and of the encodings themselves."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

from hf_posenc.report import anatomy_plots, plots
from hf_posenc.report.measures import (
    at_length,
    lowest,
    perplexities,
    short_names,
)
from hf_posenc.report.page import Cell, Picture, Pictures, Section, Table, length_grid, text_row
from hf_posenc.report.words import number, spoken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_posenc.evaluate.results import CompareRow, Comparison

Figure = Literal["ppl", "ppl_tail"]
POSITIONS = 12
"""Columns of the table of nll by position; the figure shows all bins."""


def perplexity(comparison: Comparison) -> Section:
    """Perplexity by length, whole and over the tail."""
    name, title = "perplexity", "Perplexity by length"
    if not comparison.rows:
        return Section(name, title, missing="no text was given, so no perplexity was measured.")
    tail = comparison.header.get("tail")
    whats: dict[Figure, str] = {"ppl_tail": f"last {tail} tokens", "ppl": "all tokens"}
    tables = [_perplexity_table(comparison.rows, figure, f"Perplexity, {what}") for figure, what in whats.items()]
    drawn = [
        picture(
            partial(plots.plot_rows, comparison=comparison, figure=figure, title=f"perplexity, {what}"),
            f"perplexity-{figure.replace('_', '-')}",
            f"Perplexity, {what}, over length, one line an encoding; numbers in the table below",
            list(perplexities(comparison.rows, figure)),
        )
        for figure, what in whats.items()
        if perplexities(comparison.rows, figure)
    ]
    words = [
        "Lower is better; both axes are logarithmic. The last tokens of a length are those that can look back the "
        "furthest: they show best whether the far context is used. Bold: within 1 % of the lowest of its column."
    ]
    return Section(name, title, words, [Pictures(drawn)] if drawn else [], tables)


def picture(
    draw: plots.Draw, name: str, alt: str, legend: Sequence[str] = (), size: plots.Size = plots.PANEL
) -> Picture:
    return Picture(plots.svg(draw, name, alt, plots.legend_room(legend, size) if legend else size))


def _perplexity_table(rows: Sequence[CompareRow], figure: Figure, caption: str) -> Table:
    lengths = sorted({row.length for row in rows})
    best = {n: lowest(at_length(perplexities(rows, figure), n)) for n in lengths}
    cells: dict[str, dict[int, Cell]] = {}
    for row in rows:
        value = getattr(row, figure)
        cell = Cell("failed", failed=True, note=row.error or "")
        if row.error is None:
            cell = Cell(number(value) if value is not None else "–", best=row.label in best[row.length])
        cells.setdefault(row.label, {})[row.length] = cell
    return length_grid(caption, cells, lengths)


def by_position(comparison: Comparison) -> Section:
    """Negative log-likelihood by position, of the longest length."""
    name, title = "positions", "Where in the context it breaks"
    lines = plots.nll_lines(comparison)
    if not any(lines.values()):
        return Section(name, title, missing="no negative log-likelihood by position was recorded.")
    longest = max(row.length for row in comparison.rows if row.nll_by_position)
    drawn = picture(
        partial(plots.plot_nll, comparison=comparison),
        "positions-figure",
        f"Negative log-likelihood by position in {longest} tokens, one line an encoding; numbers in the table below",
        list(lines),
    )
    ends = sorted({int(at) for points in lines.values() for at, _ in points})
    kept = ends[:: max(1, math.ceil(len(ends) / POSITIONS))]
    kept = [*kept, ends[-1]] if kept[-1] != ends[-1] else kept
    cells = {label: {int(at): Cell(f"{nll:.3f}") for at, nll in points} for label, points in lines.items()}
    caption = "Nll (nats a token) of the bin that ends at each position"
    words = [
        f"Mean negative log-likelihood of the tokens at each position, in windows of {longest} tokens; lower is "
        "better. A line that turns up past the trained length shows where an encoding stops working, long before the "
        "mean does."
    ]
    return Section(name, title, words, [Pictures([drawn])], [length_grid(caption, cells, kept, folded=True)])


def anatomy(comparison: Comparison) -> Section:
    """Wavelengths, and how a score falls with distance."""
    name, title, found = "anatomy", "What each encoding does to distance", anatomy_plots.anatomy_of(comparison)
    if not found:
        return Section(name, title, missing="the encodings' numbers were not recorded.")
    drawn, words = [], []
    legend = anatomy_plots.names_in(comparison, None)
    if legend:
        draw = partial(anatomy_plots.plot_spectra, comparison=comparison)
        drawn.append(picture(draw, "spectra", "Wavelength in tokens of each pair, one line an encoding", [*legend, ""]))
        words.append(
            "Rotations: pair j of a head's channels turns once in 2π/ω_j tokens. A pair whose wavelength lies above "
            "the trained length never made a full turn in training: past that length it meets angles it has not seen. "
            "Of an encoding that follows the length, the first and the last segment are drawn."
        )
    whats = _curve_words({made["seam"] for made in found.values()})
    for unit, what in whats.items():
        if legend := anatomy_plots.names_in(comparison, unit):
            draw = partial(anatomy_plots.plot_curves, comparison=comparison, unit=unit)
            drawn.append(picture(draw, f"curve-{unit}", f"{what.partition(':')[0]}, one line an encoding", legend))
            words.append(what)
    silent = [label for label, made in found.items() if not made.get("curve")]
    if silent:
        words.append(f"Nothing to draw for {spoken(silent)}: no positions, or ones that are not known here.")
    tables = [_anatomy_table(comparison)] if anatomy_plots.names_in(comparison, None) else []
    return Section(name, title, words, [Pictures(drawn)] if drawn else [], tables)


def _curve_words(seams: set[str]) -> dict[str, str]:
    """What the curves of each unit are, for the seams that are there."""
    kinds = {
        "rotation": "mean over pairs of cos(ω_j·Δ) times the square of the factor on cos and sin (RoFormer's long-term "
        "decay)",
        "embedding": "of added vectors, the cosine of those of i and i + Δ",
    }
    return {
        "similarity": f"Decay with distance: {'; '.join(what for seam, what in kinds.items() if seam in seams)}.",
        "score": "Bias with distance: what is added to the score, for the median head; the band reaches from the "
        "steepest to the flattest.",
    }


def _anatomy_table(comparison: Comparison) -> Table:
    trained = comparison.header.get("trained_length")
    rows, found = [], anatomy_plots.anatomy_of(comparison)
    names = short_names(list(found))
    for label, made in found.items():
        what = f"{made['kind']} ({'the host’s own' if made.get('native') else made['seam']})"
        for segment, lambdas in (made.get("wavelengths") or {}).items():
            turns = [number(min(lambdas)), number(max(lambdas))] if lambdas else ["–", "–"]
            slow = f"{sum(w > trained for w in lambdas)} of {len(lambdas)}" if trained and lambdas else "–"
            factor = (made.get("attention_factor") or {}).get(segment)
            rows.append(text_row(names[label], what, segment, *turns, slow, "–" if factor is None else f"{factor:.4g}"))
    head = [
        "encoding",
        "kind",
        "positions",
        "shortest wavelength",
        "longest",
        "longer than trained",
        "factor on cos, sin",
    ]
    return Table("Wavelengths in tokens", head, rows)
