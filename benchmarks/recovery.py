"""Recovery: a changed encoding, a brief fine-tuning, and what is left of the difference to the model's own perplexity.

    python benchmarks/recovery.py                        # all rows, minutes each on two cores
    python benchmarks/recovery.py --only alibi --quick   # a few steps: does it run? the figures mean nothing

The three embedded models, trained on 256 bytes of the project's own language; full fine-tuning on fresh documents of it
(never those that are scored), windows of 256 bytes. Perplexity: mean nll of bytes 2 to 256 of 24 held-out documents, in
float32. `linear` × 4 is trained and scored at 1024 bytes, beside `yarn` × 4 trained in the very same way.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import conditions

import hf_posenc
from hf_posenc import demo, finetune
from hf_posenc.demo.train import byte_tokenizer, training_row
from hf_posenc.eval_tasks.text import document
from hf_posenc.evaluate.perplexity import token_nll

RESULTS = Path(__file__).resolve().parent / "results" / "recovery-cpu.json"
TRAINED = 256
SCORED = 24


@dataclass(frozen=True)
class Row:
    """One row of the table: `within` is the share by which the final perplexity may exceed that of `against`."""

    host: demo.ModelName
    encoding: str
    options: dict[str, Any]
    length: int = TRAINED
    steps: int = 250
    rate: float = 1e-3
    within: float = 0.15
    against: str = "native"


ROWS = (
    Row("llama", "alibi", {}),
    Row("llama", "nope", {}, steps=1600, rate=1.5e-3),  # which has to learn to count by its mask alone
    Row("llama", "sinusoidal", {}),
    Row("gpt2", "yarn", {"factor": 4}),
    Row("bloom", "rope", {"original_max_position_embeddings": TRAINED}),
    Row("llama", "yarn", {"factor": 4}, length=1024, within=math.inf),
    Row("llama", "linear", {"factor": 4}, length=1024, within=0.10, against="yarn"),
)


def perplexity(model: Any, length: int) -> float:
    """exp of the mean nll, nats a byte, of bytes 2 to `length` of the held-out documents."""
    rows = [document(i, length, split="held-out") for i in range(SCORED * TRAINED // length)]
    nll = [token_nll(model, torch.tensor(list(row.encode()))) for row in rows]
    return float(torch.cat(nll).double().mean().exp())


def texts(length: int, count: int) -> list[str]:
    """The mixture that the models were trained on: half of it prose, a quarter dense recall, a quarter passkeys."""
    made = []
    for seed in range(count):
        kind = seed % 4
        ids = training_row(10**6 + 4 * seed + (kind if kind else 2), length)
        made.append(bytes(i for i in ids if i < 256).decode("ascii"))
    return made


def run(row: Row, steps: int, batch_bytes: int) -> dict[str, Any]:
    """Native, patched and trained perplexity of one row."""
    folder = demo.model_path(row.host)
    native = perplexity(hf_posenc.from_pretrained(folder), TRAINED)
    model = hf_posenc.from_pretrained(folder, encoding=row.encoding, options=row.options)
    patched, start = perplexity(model, row.length), time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        result = finetune(
            model,
            byte_tokenizer(),
            texts(row.length, max(64, steps * batch_bytes // row.length // 4)),
            out=out,
            max_length=row.length,
            steps=steps,
            lora={"full": True},
            data={"shuffle": 256},
            training={
                "learning_rate": row.rate,
                "lr_scheduler_type": "cosine",
                "per_device_train_batch_size": max(1, batch_bytes // row.length),
                "save_strategy": "no",
                "disable_tqdm": True,
                "logging_steps": 50,
                "bf16": True,
                "use_cpu": not torch.cuda.is_available(),
                "adam_beta2": 0.98,
            },
        )
    return {
        **asdict(row),
        "within": None if math.isinf(row.within) else row.within,
        "steps": steps,
        "native": native,
        "patched": patched,
        "trained": perplexity(result.model, row.length),
        "minutes": (time.perf_counter() - start) / 60,
    }


def judge(found: list[dict[str, Any]]) -> None:
    """Add to each row the perplexity that it is measured against, and whether it is within reach."""
    for row in found:
        other = next(
            (r["trained"] for r in found if r["encoding"] == row["against"] and r["length"] == row["length"]), None
        )
        goal = row["native"] if row["against"] == "native" else other
        row["ratio"] = None if goal is None else row["trained"] / goal
        row["passed"] = None if goal is None or row["within"] is None else row["ratio"] <= 1 + row["within"]


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    ratio = "" if row.get("ratio") is None else f"  {row['ratio']:.3f} × {row['against']}"
    passed = {None: "", True: "  ok", False: "  NOT within reach"}[row.get("passed")]
    return (
        f"{row['host']:6} {row['encoding']:11} at {row['length']:5}: native {row['native']:.3f} (at {TRAINED})  "
        f"patched {row['patched']:.3f}  trained {row['trained']:.3f}{ratio}{passed}  {row['minutes']:.1f} min"
    )


def main() -> None:
    """Command line; exit status 1 where a row is not within reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="WORD", default="", help="rows with one of these in 'host encoding': alibi,gpt2"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps a row")
    parser.add_argument("--batch-bytes", type=int, default=4096, help="bytes of one step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file to write")
    arguments = parser.parse_args()
    header, found = conditions() | {"quick": arguments.quick}, []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    words = arguments.only.split(",")
    for row in ROWS:
        if any(word in f"{row.host} {row.encoding}" for word in words):
            found.append(
                run(row, 3 if arguments.quick else row.steps, 512 if arguments.quick else arguments.batch_bytes)
            )
            judge(found)
            print(line(found[-1]), flush=True)
            arguments.out.write_text(json.dumps({"conditions": header, "rows": found}, indent=2) + "\n")
    if not arguments.quick and any(row["passed"] is False for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
