"""The score biases once more, in float64 and as literally as the papers state them; a part of `oracle`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import Array

BIASES = ("t5_bias", "kerple", "fire", "sandwich")


def bias_parameters(name: str, n_heads: int, both_ways: bool = False, **options: Any) -> dict[str, Array]:
    """Parameters for a score bias, large on purpose, by the names that a checkpoint has for them."""
    draw = np.random.default_rng(len(name) + n_heads)
    if name == "t5_bias":
        return {"weight": draw.normal(scale=2, size=(options.get("num_buckets", 32), n_heads))}
    if name == "kerple":
        power = options.get("variant") == "power"
        p = draw.uniform(0.4, 1.6, n_heads) if power else draw.uniform(0.5, 3, n_heads)
        a = draw.uniform(0.05, 0.6, n_heads) if power else draw.uniform(0.1, 2, n_heads)
        return {"a": a, "p": p}
    if name == "fire":
        hidden = {"hidden_weight": draw.normal(scale=2, size=32), "hidden_bias": draw.normal(size=32)}
        out = {"weight": draw.normal(size=(n_heads, 32)), "bias": draw.normal(size=n_heads)}
        return {**hidden, **out, "c": np.array([-0.7]), "m": np.array([-1.3])}
    return {}


def t5_bucket(distance: int, num_buckets: int, max_distance: int, both_ways: bool) -> int:
    """The bucket of i - j (Raffel et al. 2019, arXiv 1910.10683, section 2.1 and the released code)."""
    first = 0
    if both_ways:
        num_buckets //= 2
        first = num_buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + math.floor(share * (num_buckets - exact)), num_buckets - 1)


def kerple(distance: int, p: float, a: float, power: bool) -> float:
    """Chi et al. 2022 (arXiv 2205.09921), the logarithmic and the power variant; parameters held as in its code."""
    p, a = max(p, 0.01), max(a, 0.01)
    if power:
        return -a * abs(distance) ** min(p, 2.0)
    return -p * math.log(1 + a * abs(distance))


def fire(i: int, j: int, parameters: dict[str, Array], length: float) -> Array:
    """(heads,): Li et al. 2023 (arXiv 2310.04418), section 3."""
    c, threshold = float(parameters["c"][0]), abs(float(parameters["m"][0]) * length)
    x = math.log(abs(c * (i - j)) + 1) / math.log(abs(c * max(threshold, i, j)) + 1)
    hidden = np.maximum(parameters["hidden_weight"] * x + parameters["hidden_bias"], 0)
    return parameters["weight"] @ hidden + parameters["bias"]


def sandwich(distance: int, bar_d: int) -> float:
    """The sum before a head's compression (Chi et al. 2022, arXiv 2212.10356, section 5), 0 for a token and itself."""
    return sum(math.cos(distance / 10000 ** (2 * k / bar_d)) for k in range(1, bar_d // 2 + 1)) - bar_d / 2


def score_bias(name: str, positions: Sequence[int], n_heads: int, both_ways: bool = False, **options: Any) -> Array:
    """(heads, n, n): what is added to the score of every pair, under `bias_parameters`."""
    parameters = bias_parameters(name, n_heads, both_ways, **options)

    def one(i: int, j: int) -> Any:
        if name == "t5_bias":
            buckets, most = options.get("num_buckets", 32), options.get("max_distance", 128)
            return parameters["weight"][t5_bucket(i - j, buckets, most, both_ways)]
        if name == "kerple":
            power = options.get("variant") == "power"
            return [kerple(i - j, p, a, power) for p, a in zip(parameters["p"], parameters["a"], strict=True)]
        if name == "fire":
            return fire(i, j, parameters, options.get("initial_length", 512))
        total = sandwich(i - j, options.get("bar_d", 128))
        return [total / (8 * h / n_heads) for h in range(1, n_heads + 1)]

    known: dict[Any, Any] = {}

    def remembered(i: int, j: int) -> Any:
        at = (i, j) if name == "fire" else i - j
        if at not in known:
            known[at] = one(i, j)
        return known[at]

    return np.array([[remembered(int(i), int(j)) for j in positions] for i in positions]).transpose(2, 0, 1)
