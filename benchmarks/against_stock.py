"""An independent check of `compare`: the same perplexities from stock Transformers and a loss of its own.

    python benchmarks/against_stock.py DIR --gguf-file NAME.gguf --text benchmarks/prose.txt

hf_posenc is not imported. `none` is the model as it is; `yarn` is the same file loaded with a config whose
`rope_parameters` say so before the model is built. With --against, the figures are compared with those of a
results.json that `hf-posenc compare` wrote; exit status 1 where one is off by more than 0.001.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-3
HEAD_ROWS = 256  # positions whose logits exist at a time: 256 x 49152 float32 are 48 MiB


def load(folder: str, gguf_file: str | None, factor: float | None) -> Any:
    """The model in float32; with a factor, built from a config that says YaRN."""
    source = {"gguf_file": gguf_file} if gguf_file else {}
    config = AutoConfig.from_pretrained(folder, **source)
    if factor is not None:
        length = config.max_position_embeddings
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": config.rope_parameters["rope_theta"],
            "factor": factor,
            "original_max_position_embeddings": length,
        }
        config.max_position_embeddings = int(length * factor)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **source).eval()
    kind = model.model.rotary_emb.config.rope_parameters["rope_type"]
    if kind != ("default" if factor is None else "yarn"):
        raise RuntimeError(f"the model was built with rope type {kind!r}")
    return model


@torch.inference_mode()
def losses(model: Any, ids: Tensor) -> Tensor:
    """-log p of tokens 2 … n, (n - 1,) float64: logsumexp(z) - z[target], from one forward of the backbone."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    found = []
    for rows, targets in zip(hidden.split(HEAD_ROWS), ids[1:].split(HEAD_ROWS)):
        logits = model.lm_head(rows).double()
        found.append(logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0])
    return torch.cat(found)


def rows(folder: str, gguf_file: str | None, ids: Tensor, lengths: list[int], tail: int, factor: float) -> list[Any]:
    """Perplexity, whole and over the last `tail` tokens, of both models at each length."""
    found = []
    for name, scale in (("none", None), ("yarn", factor)):
        model = load(folder, gguf_file, scale)
        for length in lengths:
            loss = losses(model, ids[:length])
            ppl, ppl_tail = (math.exp(float(part.mean())) for part in (loss, loss[-tail:]))
            found.append({"encoding": name, "length": length, "ppl": ppl, "ppl_tail": ppl_tail})
            print(f"{name:6} {length:6} {ppl:10.5f} {ppl_tail:10.5f}", flush=True)
    return found


def differences(found: list[Any], results: Path) -> list[dict[str, Any]]:
    """Each figure minus that of `compare`; every row must have its counterpart there."""
    theirs = {(row["encoding"], row["length"]): row for row in json.loads(results.read_text())["rows"]}
    keys = ("ppl", "ppl_tail")
    return [
        {
            "encoding": row["encoding"],
            "length": row["length"],
            **{key: row[key] - theirs[row["encoding"], row["length"]][key] for key in keys},
        }
        for row in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR")
    parser.add_argument("--gguf-file", metavar="NAME")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", default="2048,12288")
    parser.add_argument("--tail", type=int, default=1024)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--against", type=Path, metavar="results.json")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON file for the figures")
    given = parser.parse_args()
    source = {"gguf_file": given.gguf_file} if given.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(given.model, **source)
    ids = torch.tensor(tokenizer(given.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    lengths = [int(length) for length in given.lengths.split(",")]
    found = rows(given.model, given.gguf_file, ids, lengths, given.tail, given.factor)
    report: dict[str, Any] = {
        "model": given.gguf_file or Path(given.model).name,
        "text": given.text.name,
        "tail": given.tail,
        "factor": given.factor,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": found,
    }
    if given.against is not None:
        report["minus_compare"] = differences(found, given.against)
        worst = max(abs(row[key]) for row in report["minus_compare"] for key in ("ppl", "ppl_tail"))
        report |= {"largest_difference": worst, "tolerance": TOLERANCE}
        print(f"largest difference from {given.against.name}: {worst:.2e} (allowed {TOLERANCE})")
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(report.get("largest_difference", 0.0) > TOLERANCE)


if __name__ == "__main__":
    assert "hf_posenc" not in sys.modules
    sys.exit(main())
