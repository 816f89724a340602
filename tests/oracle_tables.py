"""Longer position tables once more, in float64 and as literally as their sources have them; a part of `oracle`."""

import math

import numpy as np
from oracle import Array


def keys_kernel(x: float) -> float:
    """The cubic convolution kernel with a = -1/2 (Keys 1981, IEEE TASSP 29(6), equation 15)."""
    a, x = -0.5, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


def resized_row(table: Array, rule: str, p: int, factor: float, alpha: float = 0.4) -> Array:
    """Row p of a learned table made longer by one of the rules of `resize`."""
    n = len(table)
    x = p / factor
    k = math.floor(x)
    if rule == "interpolate":
        low, high = table[min(k, n - 1)], table[min(k + 1, n - 1)]
        return (1 - (x - k)) * low + (x - k) * high
    if rule == "cubic":
        taps = range(k - 1, k + 3)
        return sum((keys_kernel(x - tap) * table[min(max(tap, 0), n - 1)] for tap in taps), np.zeros(table.shape[1]))
    if rule == "group":
        return table[k]
    if rule == "repeat":
        return table[p % n]
    if rule == "hierarchical":
        u = (table - alpha * table[0]) / (1 - alpha)
        return alpha * u[p // n] + (1 - alpha) * u[p % n]
    raise ValueError(f"unknown rule {rule!r}")


def resize(table: Array, rule: str, new_len: int, factor: float, alpha: float = 0.4) -> Array:
    """A learned table (n, width) made into (new_len, width).

    interpolate: linearly at p/s. cubic: Keys' convolution at p/s, edge rows repeated. group: row floor(p/s). repeat:
    row p mod n. hierarchical: Su 2020 (kexue.fm/archives/7947), n^2 rows of which the first n are the old ones.
    """
    return np.stack([resized_row(table, rule, p, factor, alpha) for p in range(new_len)])
