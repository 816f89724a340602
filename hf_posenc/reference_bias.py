"""The score biases once more, by their definitions, one pair of positions at a time and in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .encodings import Bias, Fire, Kerple, Sandwich, T5Bias
from .offload import execution_device, held

Parameters = dict[str, list[Any]]
Reference = Callable[[Any, Parameters, int, int, int, bool], float]
KEYS = (0, 1, 2, 5, 15, 16, 17, 31, 40, 63, 100, 127, 128, 500, 777, 2048, 32_767)
"""Positions, from one token on and to the end of any bucket."""


def check_bias(backbone: Any, encoding: Bias, both_ways: bool) -> tuple[str, bool, float | None, float | None, str]:
    """(name, passed, figure, limit, detail): what the model's module gives against the formula with its parameters."""
    module = active(backbone.posenc)
    parameters = {name: held(module, name).detach().double().tolist() for name, _ in module.named_parameters()}
    device = execution_device(backbone.posenc) if parameters else torch.device("cpu")
    places = torch.tensor([KEYS], device=device)
    found = backbone.posenc(places, places)[0].double().cpu()
    reference = next((function for kind, function in REFERENCES.items() if isinstance(encoding, kind)), None)
    if reference is None:
        finite = bool(found.isfinite().all())
        return "numbers = formula", finite, None, None, "a bias with no reference here: all of its numbers are finite"
    worst, heads = 0.0, len(found)
    parameters["heads"] = [heads]
    for at_i, i in enumerate(KEYS):
        for at_j, j in enumerate(KEYS):
            if j > i and not both_ways:
                continue
            for head in range(heads):
                wanted = reference(encoding, parameters, head, i, j, both_ways)
                worst = max(worst, abs(float(found[head, at_i, at_j]) - wanted) / max(1.0, abs(wanted)))
    return "numbers = formula", worst < 1e-4, worst, 1e-4, f"largest error of a bias, relative, {heads} heads"


def active(module: Any) -> Any:
    """The module in effect: PEFT keeps the trained one beside the one that it found."""
    copies = getattr(module, "modules_to_save", None)
    return module if copies is None else copies[module.active_adapters[0]]


def t5(encoding: T5Bias, parameters: Parameters, head: int, i: int, j: int, both_ways: bool) -> float:
    count, row, distance = encoding.num_buckets, 0, i - j
    if both_ways:
        count //= 2
        row = count if distance < 0 else 0
    distance, exact = abs(distance), count // 2
    if distance < exact:
        row += distance
    else:
        share = math.log(distance / exact) / math.log(encoding.max_distance / exact)
        row += min(count - 1, exact + int(share * (count - exact)))
    return parameters["weight"][row][head]


def kerple(encoding: Kerple, parameters: Parameters, head: int, i: int, j: int, both_ways: bool) -> float:
    a, p = max(parameters["a"][head], 0.01), max(parameters["p"][head], 0.01)
    if encoding.variant == "power":
        return -a * abs(i - j) ** min(p, 2.0)
    return -p * math.log(1 + a * abs(i - j))


def fire(encoding: Fire, parameters: Parameters, head: int, i: int, j: int, both_ways: bool) -> float:
    [c], [m] = parameters["c"], parameters["m"]
    furthest = max(abs(m * encoding.initial_length), i, j)
    x = math.log(abs(c * (i - j)) + 1) / max(math.log(abs(c * furthest) + 1), 1e-6)
    units = zip(parameters["hidden_weight"], parameters["hidden_bias"], parameters["weight"][head], strict=True)
    return sum(out * max(weight * x + bias, 0.0) for weight, bias, out in units) + parameters["bias"][head]


def sandwich(encoding: Sandwich, parameters: Parameters, head: int, i: int, j: int, both_ways: bool) -> float:
    half, heads = encoding.bar_d // 2, parameters["heads"][0]
    total = sum(math.cos((i - j) / 10_000 ** (k / half)) for k in range(1, half + 1)) - half
    return total * heads / (8 * (head + 1))


REFERENCES: dict[type[Bias], Reference] = {T5Bias: t5, Kerple: kerple, Fire: fire, Sandwich: sandwich}
