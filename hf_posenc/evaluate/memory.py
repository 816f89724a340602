"""Peak memory of a block of code, and telling an exhausted memory from other errors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_MEANING = "growth of the resident set from the start of the cell to its highest point (weights not counted)"
CUDA_MEANING = "highest allocation on the device during the cell (weights counted)"


@dataclass
class Peak:
    """Filled in when the block of `peak_memory` ends; None where this machine cannot tell."""

    bytes: int | None = None


def _status_bytes(field: str) -> int | None:
    """A field of Linux' /proc/self/status, kB there, in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _reset_high_water() -> bool:
    """Give freed heap back, then set the kernel's mark of the highest resident set to the present one."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # What the allocator keeps from an earlier cell would be used again unseen.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Peak memory of the block, in bytes: see `CPU_MEANING` and `CUDA_MEANING`.

    The kernel keeps the mark on the CPU (exact, no sampling); on systems other than Linux the figure is None.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    before = _status_bytes("VmRSS") if _reset_high_water() else None
    try:
        yield peak
    finally:
        highest = _status_bytes("VmHWM")
        if before is not None and highest is not None:
            peak.bytes = max(0, highest - before)


def free_memory(device: torch.device) -> None:
    """Let go of what a failed cell held, so that the next has all there is."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a device or on the CPU (where torch raises a bare RuntimeError)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in str(error).lower() for mark in ("can't allocate memory", "not enough memory", "out of memory")
    )
