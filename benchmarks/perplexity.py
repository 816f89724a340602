"""Time and memory of perplexity in one pass, beside the bare forward it needs, on the CPU; writes JSON.

    python benchmarks/perplexity.py                     # minutes; let nothing else run
    python benchmarks/perplexity.py --layers 6          # the same with fewer layers
    python benchmarks/perplexity.py --quick --out FILE  # tiny shapes, seconds: does it run? the figures mean nothing

The model is random, in float32, of SmolLM2-135M's shape. Time: `token_nll` against the backbone and the head, which
makes the same blocks of logits and drops them: no log-softmax, no check, no result. Both in one process, by turns; the
ratio is that of the medians. Memory: growth of the resident set from the loaded model to the highest point of one
`token_nll`, in a process of its own. Activations do not grow with the number of layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import conditions
from speed import RESULTS, in_child
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc.evaluate.memory import peak_memory
from hf_posenc.evaluate.perplexity import CHUNK_BYTES, ppl, token_nll

TIME_GOAL = 1.05
MEMORY_GOAL = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """The shape of the model, and of the work."""

    width: int = 576
    inner: int = 1536
    layers: int = 30
    heads: int = 9
    key_value_heads: int = 3
    vocab: int = 49152
    time_tokens: int = 4096
    memory_tokens: int = 32768
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes(48, 64, layers=1, heads=3, key_value_heads=1, vocab=97, time_tokens=64, memory_tokens=128, repeats=2)


def build(sizes: Sizes) -> Any:
    """A random Llama with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    return LlamaForCausalLM(config).eval()


def tokens(sizes: Sizes, count: int) -> Tensor:
    """Random tokens (count,)."""
    return torch.randint(0, sizes.vocab, (count,), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def bare(model: Any, ids: Tensor) -> None:
    """Backbone and head over all positions, in the blocks of `token_nll`."""
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state
    for block in hidden.split(max(1, CHUNK_BYTES // (4 * model.config.vocab_size)), dim=1):
        model.lm_head(block)


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_time(sizes: Sizes) -> dict[str, Any]:
    """Both by turns, after one of each that does not count."""
    model, ids = build(sizes), tokens(sizes, sizes.time_tokens)
    measured, stock = partial(token_nll, model, ids), partial(bare, model, ids)
    measured(), stock()
    pairs = [(seconds(measured), seconds(stock)) for _ in range(sizes.repeats)]
    ours, theirs = (sorted(times) for times in zip(*pairs))
    return {
        "tokens": sizes.time_tokens,
        "seconds": median(ours),
        "bare_seconds": median(theirs),
        "ratio": median(ours) / median(theirs),
        "ratio_of_fastest": ours[0] / theirs[0],
        "goal": TIME_GOAL,
        "repeats": sizes.repeats,
    }


def measure_memory(sizes: Sizes) -> dict[str, Any]:
    """Growth over the loaded model in bytes; None where the system does not tell."""
    token_nll(build(QUICK), tokens(QUICK, 16))  # threads and kernels are set up on a small model
    model, ids = build(sizes), tokens(sizes, sizes.memory_tokens)
    with peak_memory(torch.device("cpu")) as peak:
        nll = token_nll(model, ids)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {
        "tokens": sizes.memory_tokens,
        "bytes": peak.bytes,
        "goal": MEMORY_GOAL,
        "model_bytes": weights,
        "all_logits_would_be": 4 * sizes.memory_tokens * sizes.vocab,
        "ppl": ppl(nll),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the runner work?")
    parser.add_argument("--layers", type=int, help=f"by default {FULL.layers}")
    parser.add_argument("--only", choices=["time", "memory"], help="one of the two")
    parser.add_argument("--out", type=Path, default=RESULTS / "perplexity-cpu.json", help="the JSON file to write")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    sizes = replace(sizes, layers=arguments.layers or sizes.layers)
    header = conditions() | {"sizes": asdict(sizes), "dtype": "float32", "quick": arguments.quick}
    # What forks comes before what starts threads here.
    memory = in_child(partial(measure_memory, sizes)) if arguments.only != "time" else None
    if memory and memory["bytes"] is not None:
        print(f"memory {memory['bytes'] / 2**20:.0f} MiB over the model (goal {MEMORY_GOAL >> 20})", flush=True)
    timed = measure_time(sizes) if arguments.only != "memory" else None
    if timed:
        print(f"time x {timed['ratio']:.3f} (goal {TIME_GOAL}), {timed['seconds']:.2f} s", flush=True)
    results = {"conditions": header, "chunk_bytes": CHUNK_BYTES, "time": timed, "memory": memory}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
