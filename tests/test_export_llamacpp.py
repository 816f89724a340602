"""Exported models run in llama.cpp itself, which gives the same perplexity at twice the trained length.

`make test-all` builds llama-cpp-python in an environment of its own and names it in HF_POSENC_LLAMACPP.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc import demo, export
from hf_posenc.demo.run import held_out
from hf_posenc.exporting import gguf_file

HOME = Path(os.environ.get("HF_POSENC_LLAMACPP", "/nowhere"))
HERE = Path(__file__).parent / "llamacpp"
LENGTH = 512  # of the embedded Llama, which was trained on 256

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not (HOME / ".installed").is_file(), reason="HF_POSENC_LLAMACPP names no built llama.cpp"),
]

LISTS = {"short_factor": [1.0] * 24, "long_factor": [1 + 0.08 * i for i in range(24)]}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "rope", {}),
    ("llama", "linear", {"factor": 2}),
    ("llama", "ntk", {"factor": 2}),
    ("llama", "yarn", {"factor": 2}),
    ("llama", "yarn", {"factor": 2, "attention_factor": 1.3}),
    ("llama", "yarn", {"factor": 4, "truncate": False}),
    ("llama", "ntk_by_parts", {"factor": 2}),
    ("llama", "llama3", {"factor": 2}),
    ("llama", "longrope", {"factor": 2, **LISTS}),
    ("llama", "longrope", {"factor": 2, **LISTS, "attention_factor": 0.9}),
    ("gpt2", "learned", {"resize": "interpolate", "factor": 2}),
    ("bloom", "alibi", {}),
]


def score_here(model: Any, rows: list[list[int]]) -> float:
    """Mean nll of all tokens but the first of each row."""
    ids = torch.tensor(rows)
    with torch.no_grad():
        logs = torch.log_softmax(model(ids).logits.double(), dim=-1)
    return float(-logs[:, :-1].gather(-1, ids[:, 1:, None]).mean())


def run(*arguments: Any) -> str:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("host", "name", "options"), CASES, ids=str)
def test_perplexity(host: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = demo.model_path(host)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [row.reshape(-1).tolist() for row in held_out(tokenizer, 2, LENGTH)]
    model = hf_posenc.from_pretrained(path, encoding=name, options=options).eval()
    if name == "longrope":  # llama.cpp has one list for all tokens, as the host library has
        whole = hf_posenc.from_pretrained(path, encoding=name, options={**options, "schedule": "whole"}).eval()
    ours = score_here(whole if name == "longrope" else model, rows)
    made = export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    file = tmp_path / "model.gguf"
    run(sys.executable, HERE / "convert.py", HOME / "source" / "vendor" / "llama.cpp", made.path, file)
    completed = gguf_file.complete(file, made.path)
    assert completed == (len(made.load) > 1)
    theirs = float(run(HOME / "bin" / "python", HERE / "score.py", file, json.dumps(rows), LENGTH))
    print(f"{host} {name}: perplexity {math.exp(ours):.5f} here, {math.exp(theirs):.5f} in llama.cpp")
    assert abs(math.exp(theirs - ours) - 1) < 0.02  # what is promised
    assert abs(theirs - ours) < 2e-3  # what was found: 3e-4
