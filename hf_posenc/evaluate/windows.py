"""Windows that move over a text, and the mean of a figure by a token's position in its window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, unknown

Spacing = Literal["log", "linear"]


class Window(NamedTuple):
    """Tokens begin ... end - 1 of a text (from 0), the last `new` of which are scored."""

    begin: int
    end: int
    new: int


def windows(n: int, window: int, stride: int | None = None) -> list[Window]:
    """The windows over a text of `n` tokens; every token but the first is scored in exactly one of them.

    The first window scores its tokens 2 ... `window`; it then moves by `stride`, and each later one scores the `stride`
    tokens that are new in it. The last moves only as far as the text goes: fewer new tokens, but as many before them.
    Without a stride it moves by `window` - 1, the most that leaves no token out: a window's first token has nothing
    before it, so that token must be the last of the window before. A text shorter than `window` is one window.

    Raises:
        OptionError: `n` or `window` below 2, or `stride` not from 1 to `window` - 1.
    """
    if n < 2:
        raise OptionError(f"a text of {n} tokens has nothing to score: at least 2 are needed")
    if isinstance(window, bool) or not isinstance(window, int) or window < 2:
        raise OptionError(f"window must be a whole number of tokens, at least 2; got {window!r}")
    step = window - 1 if stride is None else stride
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < window:
        raise OptionError(
            f"stride must be a whole number of tokens from 1 to {window - 1}, one less than the window of {window} "
            f"(the first token of a window has nothing before it and is not scored); got {stride!r}"
        )
    found = [Window(0, min(window, n), min(window, n) - 1)]
    while (end := found[-1].end) < n:
        following = min(end + step, n)
        found.append(Window(following - window, following, following - end))
    return found


def positions_in_window(n: int, window: int, stride: int | None = None) -> Tensor:
    """Position, from 1, of each of tokens 2 ... `n` in the window that scores it: int64, (n - 1,)."""
    places = (torch.arange(w.end - w.begin - w.new, w.end - w.begin) + 1 for w in windows(n, window, stride))
    return torch.cat(list(places))


def bin_edges(last: int, bins: int | Sequence[int], spacing: Spacing = "log") -> list[int]:
    """The last position of each bin of the positions 2 ... `last`, ascending; the last edge is at least `last`.

    `bins` is their number, evenly spaced on a logarithmic or a linear scale (fewer where two would be one), or the
    edges themselves.
    """
    if spacing not in ("log", "linear"):
        raise unknown("spacing", spacing, ("log", "linear"))
    if isinstance(bins, int):
        if bins < 1:
            raise OptionError(f"bins must be at least 1; got {bins}")
        shares = [k / bins for k in range(1, bins + 1)]
        exact = [last**share if spacing == "log" else 1 + (last - 1) * share for share in shares]
        # Rounded first: last ** 1.0 must not become last + 1 for a bit in its last place.
        return sorted({max(2, math.ceil(round(edge, 6))) for edge in exact[:-1]} | {last})
    edges = list(bins)
    if not edges or any(a >= b for a, b in zip([1, *edges], edges)):
        raise OptionError(f"the edges of bins must be positions from 2 on, ascending; got {edges}")
    return edges if edges[-1] >= last else [*edges, last]


def by_position(
    nll: Tensor | Sequence[Tensor],
    *,
    window: int | None = None,
    stride: int | None = None,
    bins: int | Sequence[int] = 16,
    spacing: Spacing = "log",
) -> list[tuple[int, float]]:
    """(last position of a bin, mean nll of the tokens in it): where in its window a model begins to fail.

    A token's position is counted from 1 in the window that scored it (`windows`); every token is in exactly one bin,
    and a bin without tokens is left out. Weighted by their tokens, the means make up the mean of all.

    Args:
        nll: nats of tokens 2 ... n of a text, (n - 1,), or several texts' of any lengths.
        window, stride: as the texts were scored; without a window each text was one.
        bins: their number, or their last positions; the last position of all is always an edge.
        spacing: of a number of bins.
    """
    texts = [nll] if isinstance(nll, Tensor) else list(nll)
    if not texts:
        raise OptionError("no text was scored: there is no nll to sort by position")
    sizes = [len(text) + 1 for text in texts]
    places = torch.cat([positions_in_window(n, window or n, stride if window else None) for n in sizes])
    values = torch.cat([text.detach().double().cpu() for text in texts])
    edges = bin_edges(int(places.max()), bins, spacing)
    which = torch.bucketize(places, torch.tensor(edges))
    counts = torch.bincount(which, minlength=len(edges))
    sums = torch.zeros(len(edges), dtype=torch.float64).index_add_(0, which, values)
    return [(edge, float(total / count)) for edge, total, count in zip(edges, sums, counts) if count]
