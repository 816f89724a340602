"""Time and memory of patched models beside stock ones, on the CPU; writes JSON.

    python benchmarks/speed.py                     # minutes; let nothing else run
    python benchmarks/speed.py --quick --out FILE  # tiny shapes, seconds: does it run? the figures mean nothing

Time: both models in one process, measured by turns, so that a change of the machine's mood meets both; a ratio is that
of the medians. Memory: each model in a process of its own, growth of the resident set from the loaded model to the
highest point of one forward, with an allocator that gives freed blocks back at once: what is alive, not what is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases import CASES, Case
from large import patch_large
from machine import conditions
from models import FULL, QUICK, Sizes, Step

from hf_posenc.evaluate.memory import peak_memory

RESULTS = Path(__file__).resolve().parent / "results"
M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work` from a forked process: torch is imported already, and its memory is the child's own.

    Only before this process has run torch on several threads, which do not survive a fork.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        sender.send(work())

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the measuring process died; out of memory?") from None
    finally:
        child.join()


def give_back_at_once() -> None:
    """Have glibc map each block of 64 KiB or more on its own, and unmap it when it is freed.

    By default it raises that limit as it goes, and keeps freed blocks: the same forward then reads 119 or 139 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 16)


@torch.inference_mode()
def peak_bytes(build: Callable[[Sizes], Step], sizes: Sizes) -> int | None:
    """Growth of the resident set during one forward, in bytes; None where the system does not tell."""
    give_back_at_once()
    build(QUICK)()  # threads and kernels are set up on a small model
    step = build(sizes)
    with peak_memory(torch.device("cpu")) as peak:
        step()
    return peak.bytes


def seconds(step: Step) -> float:
    """Wall-clock time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@torch.inference_mode()
def measure_time(case: Case, sizes: Sizes) -> dict[str, Any]:
    """Both sides by turns, after one step of each that does not count."""
    measured, stock = (build(sizes) for build in case.build)
    difference = float((measured() - stock()).abs().max())
    repeats = sizes.decode_repeats if case.decode else sizes.repeats
    pairs = [(seconds(measured), seconds(stock)) for _ in range(repeats)]
    ours, theirs = (sorted(times) for times in zip(*pairs))
    return {
        "seconds": median(ours),
        "stock_seconds": median(theirs),
        "ratio": median(ours) / median(theirs),
        "goal": case.time_goal,
        "repeats": repeats,
        "ratio_of_fastest": ours[0] / theirs[0],
        "max_logit_difference": difference if case.same else None,
    }


def measure_memory(case: Case, sizes: Sizes) -> dict[str, Any] | None:
    """Both sides, each in a process of its own."""
    ours, theirs = (in_child(partial(peak_bytes, build, sizes)) for build in case.build)
    if not ours or not theirs:
        return None
    return {"bytes": ours, "stock_bytes": theirs, "ratio": ours / theirs, "goal": case.memory_goal}


def measure(cases: tuple[Case, ...], sizes: Sizes, large: bool) -> dict[str, Any]:
    """Everything: first what forks, then what starts threads here."""
    header = conditions() | {"sizes": asdict(sizes), "dtype": "float32", "quick": sizes is QUICK}
    patching = in_child(partial(patch_large, sizes)) if large else None
    memory = {case.name: measure_memory(case, sizes) for case in cases if not case.decode}
    rows = []
    for case in cases:
        row = {"case": case.name, "measured": case.measured, "stock": case.stock, "tokens": sizes.tokens}
        rows.append(row | {"time": measure_time(case, sizes), "memory": memory.get(case.name)})
        print(line(rows[-1]), flush=True)
    return {"conditions": header, "cases": rows, "patch_large": patching}


def line(row: dict[str, Any]) -> str:
    """One case on one line."""
    parts = [f"{row['case']:30}"]
    for name in ("time", "memory"):
        if row[name] is not None:
            goal = "" if row[name]["goal"] is None else f" (goal {row[name]['goal']})"
            parts.append(f"{name} x {row[name]['ratio']:.3f}{goal}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the runner work?")
    parser.add_argument("--only", metavar="WORD", default="", help="cases with this in their name; or: large")
    parser.add_argument("--out", type=Path, default=RESULTS / "speed-cpu.json", help="the JSON file to write")
    arguments = parser.parse_args()
    chosen = tuple(case for case in CASES if arguments.only in case.name)
    results = measure(chosen, QUICK if arguments.quick else FULL, large=arguments.only in ("", "large"))
    large = results["patch_large"] or {"rows": []}
    for row in large["rows"]:
        size, growth = large["parameters"] / 1e9, (row["memory_growth_bytes"] or 0) / 2**20
        print(f"patch_model {row['encoding']}, {size:.2f} B parameters: {row['seconds']:.3f} s, +{growth:.1f} MiB")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
