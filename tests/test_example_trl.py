"""examples/trl_sft: TRL's trainer over a patched model, run as its README says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_ids

import hf_posenc

ROOT = Path(hf_posenc.__file__).resolve().parents[1]
README = ROOT / "examples" / "trl_sft" / "README.md"


@pytest.mark.extended
def test_the_command_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text((ROOT / "benchmarks" / "prose.txt").read_text()[:20_000])
    found = re.search(r"^```sh\n(.*?)^```$", README.read_text(), re.S | re.M)
    assert found is not None
    python, script, *rest = shlex.split(found[1].replace("\\\n", " "))
    assert python == "python"
    command = [sys.executable, "-W", "ignore", str(ROOT / script), *rest, "--steps", "2", "--max-length", "300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "saved to run" in done.stdout
    model = hf_posenc.from_pretrained(tmp_path / "run")
    encoding = hf_posenc.get_encoding(model)
    assert encoding is not None and encoding.name == "yarn" and encoding.options()["factor"] == 4
    trained = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert any(bool(rows.abs().max() > 0) for name, rows in trained.items() if "lora_B" in name)
    with torch.no_grad():
        assert model(tiny_ids(300)).logits.isfinite().all(), "past the 256 tokens that it was trained on"
