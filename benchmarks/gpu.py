"""Everything that a GPU shows, in one run of at most six minutes: time, memory and correctness; writes JSON.

    python benchmarks/gpu.py                     # a Llama of 1.1 billion parameters, bfloat16, 8k to 128k tokens
    python benchmarks/gpu.py --small --out FILE  # tiny, on any device: does it run?

First what must be right: each side in bfloat16 against the same weights in float32, at a length past the trained one.
Then prefill, decode and peak memory, short lengths first; what the time no longer allows is written down as not run,
and so is what does not fit. The file is written after every figure, so that a run that is cut short leaves its part.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import conditions
from models import Sizes, decode, prefill
from sides import FLEX, HOSTS, LLAMA, Side, compiled_flex
from speed import RESULTS

from hf_posenc.evaluate.memory import free_memory, is_out_of_memory, peak_memory

SHAPE = Sizes(layers=16, width=2048, heads=32, vocab=32000, repeats=3, decode_repeats=20, dtype="bfloat16")
TINY = Sizes(layers=1, width=64, heads=2, vocab=97, repeats=1, decode_repeats=1, dtype="bfloat16")
LENGTHS = (8192, 32768, 131072)
DENSE_LIMIT = 8192  # 32 heads × 8192² in float32 are 8 GiB
CLOSE = 0.1  # root mean square of the difference over that of the logits; a wrong position gives a share near 1


class Budget:
    """Seconds left of the run."""

    def __init__(self, limit: float) -> None:
        self.end = time.monotonic() + limit

    def left(self) -> float:
        return self.end - time.monotonic()


def waited(device: str) -> float:
    """The time, when the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Any, repeats: int, device: str) -> float:
    """Median seconds of a step; the first was made before."""
    found = []
    for _ in range(repeats):
        start = waited(device)
        step()
        found.append(waited(device) - start)
    return median(found)


def correctness(side: Side, sizes: Sizes) -> dict[str, Any]:
    """How far the 16-bit logits of the last position lie from float32's, with one kernel and with a cache."""
    rough = side.step(prefill, sizes)()
    stepped = side.step(decode, sizes)()
    exact = side.step(prefill, replace(sizes, dtype="float32"))()
    scale = exact.float().pow(2).mean().sqrt()
    off, cached = (float((x.float() - exact).pow(2).mean().sqrt() / scale) for x in (rough, stepped))
    return {"share": off, "share_with_a_cache": cached, "close": off < CLOSE and cached < CLOSE}


def speed(side: Side, sizes: Sizes) -> dict[str, Any]:
    """Seconds of a prefill and of a step, and the peak memory of the former."""
    step = side.step(prefill, sizes)
    step()
    with peak_memory(torch.device(sizes.device)) as peak:
        step()
    found = {"prefill_seconds": timed(step, sizes.repeats, sizes.device), "prefill_peak_bytes": peak.bytes}
    del step
    step = side.step(decode, sizes)
    step()
    return found | {"decode_seconds": timed(step, sizes.decode_repeats, sizes.device)}


def attempt(work: Any, side: Side, sizes: Sizes, budget: Budget) -> dict[str, Any]:
    """What `work` finds, or why it was not run."""
    if budget.left() <= 0:
        return {"not_run": "no time left"}
    if side.quadratic and sizes.tokens > DENSE_LIMIT:
        return {"not_run": f"its bias alone would take {sizes.heads * sizes.tokens**2 * 4 / 2**30:.0f} GiB a layer"}
    try:
        with torch.inference_mode(), compiled_flex():
            found: dict[str, Any] = work(side, sizes)
            return found
    except Exception as error:  # one side that this device cannot run does not end the others
        return {"not_run": "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"[:300]}
    finally:
        free_memory(torch.device(sizes.device))


def add_ratios(rows: dict[str, Any]) -> None:
    """Each side's figures over those of the first that was run."""
    stock = next(iter(rows.values()))
    for row in rows.values():
        shared = [key for key in ("prefill_seconds", "decode_seconds", "prefill_peak_bytes") if row.get(key)]
        row |= {f"{key}_ratio": row[key] / stock[key] for key in shared if stock.get(key)}


def run(sizes: Sizes, lengths: tuple[int, ...], limit: float, out: Path) -> dict[str, Any]:
    """All figures, written after each."""
    budget = Budget(limit)
    gpu = torch.cuda.get_device_name() if sizes.device == "cuda" else None
    header = conditions() | {"device": sizes.device, "gpu": gpu, "sizes": asdict(sizes), "lengths": lengths}
    results: dict[str, Any] = {"conditions": header, "correctness": {}, "speed": {}}

    def keep() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")

    flex = (FLEX,) if sizes.device == "cuda" else ()  # elsewhere it compiles for a minute
    sides = {"llama": (*LLAMA, *flex), "bloom": HOSTS["bloom"], "mpt": HOSTS["mpt"], "gpt2": HOSTS["gpt2"]}
    small = replace(sizes, layers=min(sizes.layers, 4), tokens=max(lengths[0] // 4, 64))
    for host, chosen in sides.items():
        for side in chosen:
            results["correctness"][f"{host}, {side.name}"] = attempt(correctness, side, small, budget)
            keep()
    for n in lengths:
        for host, chosen in sides.items():
            rows = results["speed"].setdefault(str(n), {}).setdefault(host, {})
            for side in chosen:
                rows[side.name] = attempt(speed, side, replace(sizes, tokens=n), budget)
                print(f"{n} {host} {side.name}: {rows[side.name]}  ({budget.left():.0f} s left)", flush=True)
                keep()
            add_ratios(rows)
            keep()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, on the CPU too: does it run?")
    parser.add_argument("--limit", type=float, default=330, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="the JSON file to write")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.small:
        parser.error("no CUDA device here; --small runs on the CPU")
    sizes, lengths = (TINY, (64,)) if arguments.small else (SHAPE, LENGTHS)
    results = run(replace(sizes, device=device), lengths, arguments.limit, arguments.out)
    wrong = [name for name, row in results["correctness"].items() if row.get("close") is False]
    if wrong:
        raise SystemExit(f"not close to float32: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
