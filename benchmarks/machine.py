"""The conditions of a measurement, as JSON values: what a reader needs to judge it or to repeat it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_posenc


def cpu_model() -> str:
    """The processor's name: Linux keeps it in /proc/cpuinfo, elsewhere `platform` has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def conditions() -> dict[str, Any]:
    """Processor, threads, load, versions and date."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {
            "hf_posenc": hf_posenc.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
