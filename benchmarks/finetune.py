"""Memory and speed of fine-tuning beside the plain Trainer's, on the CPU; writes JSON.

    python benchmarks/finetune.py                     # minutes; let nothing else run
    python benchmarks/finetune.py --quick --out FILE  # tiny shapes, seconds: does it run? the figures mean nothing

One Llama in SmolLM2-135M's shape with fewer layers (--layers), random weights, patched with yarn, LoRA on attention and
norms, the same batch, float32. "Plain" is `transformers.Trainer` with the same arguments, the model's own loss, and
the same adapter. Memory: growth of the resident set over one step at 8192 tokens with gradient checkpointing, each in a
process of its own. Speed: both in one process by turns, without gradient checkpointing; a ratio is that of medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import conditions
from speed import give_back_at_once, in_child
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_posenc import patch_model
from hf_posenc.evaluate.memory import peak_memory
from hf_posenc.finetuning.collator import Collator
from hf_posenc.finetuning.lora import add_lora
from hf_posenc.finetuning.prepare import make_arguments
from hf_posenc.finetuning.settings import LoraSettings
from hf_posenc.finetuning.trainer import PosencTrainer

RESULTS = Path(__file__).resolve().parent / "results"
MEMORY_GOAL, SPEED_GOAL = 3.0, 0.97


@dataclass(frozen=True)
class Sizes:
    """Shapes of the model and of the two measurements."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    key_heads: int = 3
    vocabulary: int = 49152
    layers: int = 4
    memory_tokens: int = 8192
    speed_tokens: int = 1024
    steps: int = 2
    repeats: int = 5


QUICK = Sizes(64, 96, 4, 2, 2048, 2, 256, 64, 1, 2)


def make_model(sizes: Sizes) -> Any:
    """A seeded model with its adapter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.memory_tokens // 2,
        tie_word_embeddings=True,
    )
    model = patch_model(LlamaForCausalLM(config), "yarn", factor=2)
    model.config._name_or_path = "benchmark"
    model.name_or_path = "benchmark"
    return add_lora(model, LoraSettings())


def make_trainer(sizes: Sizes, tokens: int, steps: int, folder: str, ours: bool, **training: Any) -> Trainer:
    """A Trainer of either kind on rows of random tokens."""
    ids = torch.randint(0, sizes.vocabulary, (64, tokens), generator=torch.Generator().manual_seed(1))
    arguments = make_arguments(
        {
            "max_steps": steps,
            "per_device_train_batch_size": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "logging_steps": 1000,
            "learning_rate": 1e-4,
            "logging_nan_inf_filter": not ours,
            "include_num_input_tokens_seen": "all" if ours else "no",
            **training,
        },
        Path(folder),
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    kind: Any = PosencTrainer if ours else Trainer
    return kind(model=make_model(sizes), args=arguments, train_dataset=rows, data_collator=Collator())


def step_bytes(sizes: Sizes, ours: bool) -> int | None:
    """Growth of the resident set over one step."""
    give_back_at_once()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(QUICK, QUICK.memory_tokens, 1, folder, ours, gradient_checkpointing=True).train()
        trainer = make_trainer(sizes, sizes.memory_tokens, 1, folder, ours, gradient_checkpointing=True)
        with peak_memory(torch.device("cpu")) as peak:
            trainer.train()
    return peak.bytes


def measure_memory(sizes: Sizes) -> dict[str, Any] | None:
    """Both kinds, each in a process of its own."""
    ours, plain = (in_child(partial(step_bytes, sizes, kind)) for kind in (True, False))
    if not ours or not plain:
        return None
    return {
        "tokens": sizes.memory_tokens,
        "bytes": ours,
        "plain_bytes": plain,
        "ratio": plain / ours,
        "goal": MEMORY_GOAL,
    }


def measure_speed(sizes: Sizes) -> dict[str, Any]:
    """Seconds of `steps` steps of both kinds by turns, after one round that does not count; and both kinds' losses."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = [make_trainer(sizes, sizes.speed_tokens, sizes.steps, folder, kind) for kind in (True, False)]
        seconds: list[list[float]] = [[], []]
        losses = [trainer.train().training_loss for trainer in kinds]
        for _ in range(sizes.repeats):
            for times, trainer in zip(seconds, kinds):
                start = time.perf_counter()
                trainer.train()
                times.append(time.perf_counter() - start)
    ours, plain = (median(times) for times in seconds)
    tokens = sizes.speed_tokens * sizes.steps
    return {
        "tokens": sizes.speed_tokens,
        "tokens_per_second": tokens / ours,
        "plain_tokens_per_second": tokens / plain,
        "ratio": plain / ours,
        "ratio_of_fastest": min(seconds[1]) / min(seconds[0]),
        "goal": SPEED_GOAL,
        "repeats": sizes.repeats,
        "loss_difference": abs(losses[0] - losses[1]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the runner work?")
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="of the model; SmolLM2-135M has 30")
    parser.add_argument("--out", type=Path, default=RESULTS / "finetune-cpu.json", help="the JSON file to write")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes(layers=arguments.layers)
    header = conditions() | {"sizes": asdict(sizes), "dtype": "float32", "quick": arguments.quick}
    memory = measure_memory(sizes)  # first what forks, then what starts threads here
    if memory is not None:
        print(f"memory: plain / ours {memory['ratio']:.2f} (goal {MEMORY_GOAL})", flush=True)
    speed = measure_speed(sizes)
    print(f"tokens/s: ours / plain {speed['ratio']:.3f} (goal {SPEED_GOAL}), {speed['tokens_per_second']:.0f} tokens/s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"conditions": header, "memory": memory, "speed": speed}
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
