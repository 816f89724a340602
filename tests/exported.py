"""Exported folders, loaded where there is no hf_posenc: what tests of them share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_ids

LONG = 80

ALONE = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_posenc":
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Nowhere())
import json, torch
from safetensors.torch import load_file, save_file
import transformers

def auto_class(folder):
    # the one that the card names
    line = next(line for line in open(folder + "/README.md") if ".from_pretrained(" in line and "model =" in line)
    return getattr(transformers, line.split("model = ")[1].split(".from_pretrained")[0])

def positions(model, mask):
    # these count padding as well unless they are told
    tables = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "BertForMaskedLM", "BertLMHeadModel")
    own_table = type(model).__name__ in tables
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if own_table else {}

folders, inputs, out = json.loads(sys.argv[1]), load_file(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
found = {}
for name, folder in folders.items():
    torch.manual_seed(0)
    remote = {"trust_remote_code": True} if folder.endswith("code") else {}
    model = auto_class(folder).from_pretrained(folder, **remote).eval()
    ids, short = inputs["ids"], inputs["short"]
    encoder = not hasattr(model, "generate")
    padding = model.config.pad_token_id if encoder else 3
    plain = {} if encoder else {"use_cache": False}
    with torch.no_grad():
        found[name] = model(ids, **plain).logits
        padded = torch.cat((short.new_full((1, 9), padding), short), dim=1)
        mask = (torch.arange(padded.shape[1]) >= 9).long()[None]
        where = positions(model, mask)
        found[name + " padded"] = model(padded, attention_mask=mask, **plain, **where).logits[:, 9:]
    if encoder:
        continue
    given = {"do_sample": False, "pad_token_id": 0}
    new = 12
    with_cache = model.generate(padded, attention_mask=mask, max_new_tokens=new, **given)
    without = model.generate(padded, attention_mask=mask, max_new_tokens=new, use_cache=False, **given)
    assert torch.equal(with_cache, without), name
    found[name + " new"] = with_cache[:, -new:]
    assert not any(module.split(".")[0] == "hf_posenc" for module in sys.modules)
save_file({key: value.contiguous() for key, value in found.items()}, out)
"""


def inputs() -> dict[str, torch.Tensor]:
    """A long row and a short one, without the numbers that some hosts have for padding."""
    return {"ids": tiny_ids(LONG) % 90 + 5, "short": tiny_ids(20, seed=1) % 90 + 5}


@torch.no_grad()
def here(model: Any) -> dict[str, torch.Tensor]:
    """What the same model gives in this process: logits, and 12 greedy tokens after the short row where it has them."""
    given, found = inputs(), {}
    plain = {"use_cache": False} if hasattr(model, "generate") else {}
    found[""] = model(given["ids"], **plain).logits
    found[" padded"] = model(given["short"], **plain).logits
    if not plain:
        return found
    new = model.generate(
        given["short"],
        attention_mask=torch.ones_like(given["short"]),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    found[" new"] = new[:, -12:]
    return found


def alone(folders: dict[str, str], tmp_path: Path, *, python: str = sys.executable) -> dict[str, torch.Tensor]:
    """The same for exported folders in a new process that cannot see hf_posenc; names ending in `code` are trusted."""
    save_file(inputs(), tmp_path / "inputs")
    arguments = [json.dumps(folders), str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-I", "-W", "ignore", "-c", ALONE, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(tmp_path / "outputs")
