"""The LongRoPE search on the embedded Llama, 8 times as far as it was trained: its curve, and what it is worth.

    python benchmarks/search.py                       # four minutes of search, and one of judging
    python benchmarks/search.py --quick --out x.json  # one generation at 4 times: does it run? the figures mean nothing

The model was trained on 256 bytes. Candidates are measured on two held-out documents of the project's own language at
2048 bytes and judged on two others; the figures are of six more, that neither has seen: perplexity of bytes 2 to 2048,
and of the last 64, in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from machine import conditions

import hf_posenc
from hf_posenc import demo
from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.eval_tasks.text import document
from hf_posenc.evaluate.perplexity import ppl, token_nll
from hf_posenc.search import SearchResult, search

RESULTS = Path(__file__).resolve().parent / "results" / "search-cpu.json"
TRAINED = 256
TAIL = 64
FIRST = 100  # number of the first document of the search


def texts(length: int, first: int, count: int) -> list[str]:
    """Held-out documents of `length` bytes."""
    return [document(first + i, length, split="held-out") for i in range(count)]


def scored(model: Any, encoding: Any, documents: list[torch.Tensor]) -> dict[str, float]:
    """Perplexity under an encoding, of everything and of the last bytes."""
    with hf_posenc.patched(model, encoding):
        found = [token_nll(model, ids) for ids in documents]
    return {"ppl": ppl(torch.cat(found)), "ppl_tail": ppl(torch.cat([nll[-TAIL:] for nll in found]))}


def figures(model: Any, result: SearchResult, factor: float, documents: list[torch.Tensor]) -> dict[str, Any]:
    """The result beside YaRN, on documents that no part of the search has seen."""
    from hf_posenc.registry import create

    encodings = {
        "yarn": create("yarn", factor=factor),
        "yarn, beta_fast=8": create("yarn", factor=factor, beta_fast=8),
        "search": result.encoding,
    }
    return {name: scored(model, encoding, documents) for name, encoding in encodings.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    factor, seen = (4, 2) if given.quick else (8, 6)
    length = factor * TRAINED
    tokenizer, model = byte_tokenizer(), hf_posenc.from_pretrained(demo.model_path("llama"))
    how: dict[str, Any] = {"budget": given.budget}
    if given.quick:
        how = {"generations": 1, "mutations": 1, "crossovers": 1}
    made = conditions()
    result = search(model, tokenizer, texts(length, FIRST, 4), factor=factor, samples=2, **how)
    documents = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts(length, 0, seen)]
    report = {
        "conditions": {**made, "quick": given.quick, "factor": factor, "length": length, **how},
        "winner": result.winner,
        "encoding": result.encoding.options(),
        "measured": result.measured,
        "generations": result.generations,
        "seconds": result.seconds,
        "judged_ppl": result.perplexities,
        "curve": [
            {"generation": number, "measured": measured, "best_nll": best}
            for number, measured, best, _ in result.state.history()
        ],
        "seeds_nll": {name: result.state.losses[key] for name, key in result.state.seeds.items()},
        "unseen": figures(model, result, factor, documents),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    for name, row in report["unseen"].items():
        print(f"{name:20} {row['ppl']:.4f}  last {TAIL}: {row['ppl_tail']:.4f}")


if __name__ == "__main__":
    main()
