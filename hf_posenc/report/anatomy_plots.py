"""What each encoding does, drawn: wavelengths by pair, and how a score falls with distance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.report.measures import short_names
from hf_posenc.report.plots import legend_below, log_axis, plain, spaced, styles

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import Comparison

Anatomy = Mapping[str, Mapping[str, Any]]


def anatomy_of(comparison: Comparison) -> dict[str, Mapping[str, Any]]:
    """{label: what `hf_posenc.evaluate.anatomy.describe` said of it}; empty where the header holds none."""
    return dict(comparison.header.get("anatomy") or {})


def longest_distance(anatomy: Anatomy) -> int:
    """The longest length for which the anatomy was made, in tokens; 0 where nobody has a curve."""
    return max((curve["distance"][-1] for made in anatomy.values() if (curve := made.get("curve"))), default=0)


def spectra(anatomy: Anatomy) -> Iterator[tuple[str, str | None, float, list[float]]]:
    """(label, segment or None, opacity, wavelengths) of each line: of segments the first, fainter, and the last."""
    for label, made in anatomy.items():
        found = list((made.get("wavelengths") or {}).items())
        if len(found) > 1:
            yield label, found[0][0], 0.45, found[0][1]
        if found:
            yield label, found[-1][0] if len(found) > 1 else None, 0.9, found[-1][1]


def plot_spectra(axes: Any, comparison: Comparison) -> None:
    """Wavelength 2π/ω_j in tokens (log axis) over the pair j; the trained and the longest length as lines."""
    anatomy = anatomy_of(comparison)
    style, names = styles(comparison), short_names(list(anatomy))
    for label, segment, alpha, wavelengths in spectra(anatomy):
        look = {**style[label], "markersize": 3 if len(wavelengths) <= 32 else 0}
        name = names[label] if segment is None else f"{names[label]}, {segment}"
        axes.plot(range(len(wavelengths)), wavelengths, alpha=alpha, label=plain(name), **look)
    trained, longest = comparison.header.get("trained_length"), longest_distance(anatomy)
    if trained:
        axes.axhline(trained, color="black", linestyle=(0, (4, 3)), linewidth=1, label=f"trained on {trained}")
    if longest:
        axes.axhline(longest, color="black", linestyle=":", linewidth=1, label=f"longest length {longest}")
    log_axis(axes)
    axes.grid(alpha=0.3)
    axes.set_xlabel("pair j")
    axes.set_ylabel("wavelength (tokens)")
    legend_below(axes)


def plot_curves(axes: Any, comparison: Comparison, unit: str) -> None:
    """The curves of one unit, `similarity` or `score`, over the distance in tokens (log axis)."""
    from matplotlib.ticker import StrMethodFormatter

    anatomy = anatomy_of(comparison)
    style, names = styles(comparison), short_names(list(anatomy))
    for label, made in anatomy.items():
        curve = made.get("curve")
        if not curve or curve["unit"] != unit:
            continue
        at, look = curve["distance"], {**style[label], "marker": ""}
        middle = curve["mean"] if "mean" in curve else curve["median"]
        axes.plot(at[1:], middle[1:], label=plain(names[label]), **look)
        if "low" in curve:
            axes.fill_between(at[1:], curve["low"][1:], curve["high"][1:], color=look["color"], alpha=0.12, linewidth=0)
    longest, trained = longest_distance(anatomy), comparison.header.get("trained_length")
    axes.set_xscale("log", base=2)
    ticks = spaced([2**k for k in range(int(math.log2(max(longest, 2))) + 1)])
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    if trained and trained <= longest:
        axes.axvline(trained, color="black", linestyle=(0, (4, 3)), linewidth=1, label=f"trained on {trained}")
    if unit == "score":
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(top=0.2)
    axes.grid(alpha=0.3)
    axes.set_xlabel("distance Δ (tokens)")
    axes.set_ylabel("mean cos, or cosine" if unit == "similarity" else "added to the score")
    legend_below(axes)


def names_in(comparison: Comparison, unit: str | None) -> list[str]:
    """Legend entries of a figure, to leave room for: of the spectra (None), or of the curves of a unit."""
    anatomy = anatomy_of(comparison)
    names = short_names(list(anatomy))
    if unit is None:
        return [f"{names[label]}, {segment}" if segment else names[label] for label, segment, _, _ in spectra(anatomy)]
    return [names[label] for label, made in anatomy.items() if (made.get("curve") or {}).get("unit") == unit]
