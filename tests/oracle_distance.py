"""The encodings that change the distance a rotation sees, once more: pair by pair, and as literally as published.

numpy and `math` alone; nothing from the package. `seen` gives what the query at position i and the key at j are turned
apart by; `decay` what their score is multiplied with, a pair of channels; `sharpened` what the query is multiplied by.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracle import Array, Rotation, frequencies

Turn = Callable[[Array, NDArray[Any], Array, Any], Array]


def rerope(i: int, j: int, length: int | None, both_ways: bool, *, window: int | None = None) -> float:
    """Su 2023, kexue.fm/archives/9708: min(i - j, w); a query that looks ahead sees no more than w either."""
    w = min(512, length // 4) if window is None and length else window
    assert w
    d = i - j
    if d >= w:
        return w
    return -w if both_ways and d <= -w else d


def leaky_rerope(
    i: int, j: int, length: int | None, both_ways: bool, *, window: int | None = None, k: float = 16
) -> float:
    """The same article: w + (i - j - w)/k beyond w."""
    w = min(512, length // 4) if window is None and length else window
    assert w
    d = i - j
    if d >= w:
        return w + (d - w) / k
    return -w + (d + w) / k if both_ways and d <= -w else d


def self_extend(
    i: int, j: int, length: int | None, both_ways: bool, *, window_size: int | None = None, group_size: int = 8
) -> float:
    """Jin et al. 2024, arXiv 2401.01325, algorithm 1 and its code: neighbours exactly, groups beyond."""
    w = length // 4 if window_size is None and length else window_size
    assert w
    if i - j < w:
        return i - j
    return (i // group_size + w - w // group_size) - j // group_size


def dual_chunk(
    i: int,
    j: int,
    length: int | None,
    both_ways: bool,
    *,
    chunk_size: int | None = None,
    local_size: int | None = None,
    mscale: float = 1,
) -> float:
    """An et al. 2024, arXiv 2402.17463, 3.2, with the sizes of its code: keys j mod c, queries by chunks in between."""
    assert length
    size = length * 3 // 4 if chunk_size is None else chunk_size
    c = size - (length // 8 if local_size is None else local_size)
    apart = i // c - j // c
    if apart <= 0:
        query = i % c
    elif apart == 1:
        query = min(i % c + c, size)
    else:
        query = min(c - 1 + c, size)
    return query - j % c


def xpos(i: int, j: int, length: int | None, both_ways: bool, *, scale_base: float = 512, gamma: float = 0.4) -> float:
    """Sun et al. 2022, arXiv 2212.10554, 3.2: the rotation is plain."""
    return i - j


DISTANCES: dict[str, Callable[..., float]] = {
    "rerope": rerope,
    "leaky_rerope": leaky_rerope,
    "self_extend": self_extend,
    "dual_chunk": dual_chunk,
    "xpos": xpos,
}


def seen(name: str, i: int, j: int, length: int | None, both_ways: bool = False, **options: Any) -> float:
    """The distance in tokens that the pair is turned apart by."""
    return DISTANCES[name](i, j, length, both_ways, **options)


def decay(name: str, distance: float, dim: int, *, scale_base: float = 512, gamma: float = 0.4, **_: Any) -> Any:
    """xPos: zeta_i^(n/B) · zeta_i^(-m/B), a number a pair of channels; 1 for the others."""
    if name != "xpos":
        return 1.0
    zeta = [(2 * i / dim + gamma) / (1 + gamma) for i in range(dim // 2)]
    return np.array([z ** (distance / scale_base) for z in zeta])


def sharpened(name: str, i: int, length: int | None, *, mscale: float = 1, **_: Any) -> float:
    """Dual chunk, as Qwen2.5-1M is served: a² past the trained length, a = 0.1 ln(n/L) + 1."""
    if name != "dual_chunk" or length is None or i + 1 <= length:
        return 1.0
    return (0.1 * mscale * math.log((i + 1) / length) + 1) ** 2


class Distances:
    """One of these encodings, for all pairs of a row: what an attention needs to make its scores."""

    def __init__(
        self,
        name: str,
        positions: NDArray[Any],
        visible: NDArray[np.bool_],
        *,
        dim: int,
        theta: float,
        length: int | None,
        both_ways: bool = False,
        **options: Any,
    ) -> None:
        self.inv_freq = frequencies(dim, theta)
        at = [int(p) for p in positions]
        self.factor = np.array([sharpened(name, p, length, **options) for p in at])
        pairs: dict[float, list[tuple[int, int]]] = {}
        for row, column in np.argwhere(visible):
            d = seen(name, at[row], at[column], length, both_ways, **options)
            pairs.setdefault(d, []).append((row, column))
        self.pairs = pairs
        self.decay = {d: decay(name, d, dim, **options) for d in pairs}

    def groups(self) -> Iterator[tuple[float, Rotation, NDArray[Any], NDArray[Any]]]:
        """(distance, frequencies and factor on cos and sin, queries, keys) of all visible pairs."""
        for d, pairs in self.pairs.items():
            rows, columns = np.array(pairs).T
            yield d, (self.inv_freq, self.decay[d]), rows, columns

    def scores(self, q: Array, k: Array, turn: Turn) -> Array:
        """(heads, n, n) of queries and keys (heads, n, d): the query turned by the distance, the key not at all."""
        scores = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
        for d, (inv_freq, scale), rows, columns in self.groups():
            turned = turn(q[:, rows], np.full(len(rows), d), inv_freq, scale)
            scores[:, rows, columns] = (turned * k[:, columns]).sum(-1)
        return scores * self.factor[:, None]
