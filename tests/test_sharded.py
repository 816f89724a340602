"""FSDP2 in one process and in two: a patched model trains and reads as a whole one, whichever came first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import torch
import torch.distributed as dist

import hf_posenc

HERE = Path(__file__).parent
ROOT = Path(hf_posenc.__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7),
    reason="FSDP2 of this torch asks a CPU for CUDA's streams",
)


def test_one_process() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded.main("llama-yarn,llama-alibi,llama-learned,gpt2-rope,bloom-dynamic_yarn")
    finally:
        dist.destroy_process_group()


@pytest.mark.extended
@pytest.mark.parametrize("processes", [1, 2])
def test_every_pair(processes: int) -> None:
    command = [*TORCHRUN, "--nproc_per_node", str(processes), str(HERE / "sharded.py"), "all"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == processes
