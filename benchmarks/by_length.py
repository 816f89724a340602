"""Prefill, decode, training step and peak memory by length, all sides of a host by turns in one process; writes JSON.

    python benchmarks/by_length.py                     # about four minutes on two cores; let nothing else run
    python benchmarks/by_length.py --quick --out FILE  # tiny shapes: does it run?

A ratio is that of the medians to the stock model of the same host, measured in the same rounds. Memory: each side in a
process of its own, growth over the loaded model of one forward. What is quadratic stops where it would not fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import conditions
from models import FULL, QUICK, Sizes, Step, decode, prefill, train
from sides import FLEX, HOSTS, Side, compiled_flex
from speed import RESULTS, in_child, peak_bytes, seconds

Work = Callable[[Any, Sizes], Step]
WORKS: dict[str, Work] = {"prefill": prefill, "decode": decode, "train": train}
DENSE_LIMIT = 4096  # tokens of a side that is quadratic in memory
LENGTHS = {  # of hosts beside Llama, `speed.py` measures 4096 in larger models
    "prefill": {"llama": (512, 2048, 4096, 16384), "others": (512, 2048)},
    "decode": {"llama": (4096,), "others": (4096,)},
    "train": {"llama": (512, 2048), "others": (512,)},
}
ONCE = 16384  # tokens from which on a prefill is measured once, after one that does not count
MEMORY = {"llama": (2048, 8192), "bloom": (512, 2048, 4096, 32768), "mpt": (4096,), "gpt2": (4096,)}
SMALL = {kind: {"llama": (64, 128), "others": (64,)} for kind in LENGTHS}
FAR = 1_000_000  # a position


def measure_time(sides: tuple[Side, ...], kind: str, sizes: Sizes) -> dict[str, Any]:
    """Seconds and ratios of all sides at one length, by turns, after one step of each that does not count."""
    steps = {side.name: side.step(WORKS[kind], sizes) for side in sides}
    for step in steps.values():
        step()
    repeats = sizes.decode_repeats if kind == "decode" else sizes.repeats if sizes.tokens < ONCE else 1
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step))
    first = times[sides[0].name]
    return {
        name: {"seconds": median(own), "ratio": median(own) / median(first), "ratio_of_fastest": min(own) / min(first)}
        for name, own in times.items()
    }


def measured_sides(host: str, kind: str, sizes: Sizes, flex: bool) -> tuple[Side, ...]:
    """Who takes part: FlexAttention where it compiles and has a backward, no dense mask beyond its limit."""
    sides = (*HOSTS[host], FLEX) if host == "llama" and flex and kind == "prefill" else HOSTS[host]
    return tuple(
        side
        for side in sides
        if (sizes.tokens <= DENSE_LIMIT or not side.quadratic) and (kind != "train" or side.trains)
    )


def measure_memory(host: str, sizes: Sizes) -> dict[str, Any]:
    """Peak bytes of a prefill for each side, None where the system does not tell."""
    rows: dict[str, Any] = {}
    for side in HOSTS[host]:
        if side.quadratic and sizes.tokens > DENSE_LIMIT:
            need = sizes.heads * sizes.tokens**2 * 4
            rows[side.name] = {"bytes": None, "not_run": f"its bias alone would take {need / 2**30:.0f} GiB a layer"}
        else:
            rows[side.name] = {"bytes": in_child(partial(peak_bytes, partial(side.step, prefill), sizes))}
    return rows


@torch.inference_mode()
def far_bytes(side: Side, sizes: Sizes) -> int:
    """Bytes of tensors that a model holds more of after a step at position one million."""
    model = side.build(sizes)

    def held() -> int:
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    before = held()
    model(input_ids=torch.ones(1, 1, dtype=torch.long), position_ids=torch.tensor([[FAR]]), use_cache=False)
    return held() - before


def measure(sizes: Sizes, quick: bool) -> dict[str, Any]:
    """Everything: first what forks, then what starts threads here."""
    header = conditions() | {"sizes": asdict(sizes), "quick": quick}
    memory = {
        host: {str(n): measure_memory(host, replace(sizes, tokens=n)) for n in ((128,) if quick else MEMORY[host])}
        for host in HOSTS
    }
    far = {side.name: far_bytes(side, sizes) for side in HOSTS["llama"]}
    times: dict[str, Any] = {}
    for kind, lengths in (SMALL if quick else LENGTHS).items():
        for host in HOSTS:
            for n in lengths["llama" if host == "llama" else "others"]:
                given = replace(sizes, tokens=n)
                with compiled_flex(), torch.inference_mode(kind != "train"):
                    found = measure_time(measured_sides(host, kind, given, flex=not quick and n == 2048), kind, given)
                times.setdefault(kind, {}).setdefault(host, {})[str(n)] = found
                print(f"{kind} {host} {n}:", {name: round(row["ratio"], 3) for name, row in found.items()}, flush=True)
    return {"conditions": header, "time": times, "memory": memory, "bytes_held_at_a_million": far}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the runner work?")
    parser.add_argument("--out", type=Path, default=RESULTS / "by-length-cpu.json", help="the JSON file to write")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else replace(FULL, layers=2, decode_repeats=40)
    results = measure(sizes, arguments.quick)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
