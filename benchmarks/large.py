"""`patch_model` on a Llama with the shape of Llama 3 8B in bfloat16: how long it takes, and that no weight is copied.

The weights are allocated and never written, and Linux gives an allocation no memory before it is touched. So the model
needs a few MB, and the resident set after patching shows that the patch has not even read the 16 GB of weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from models import QUICK, Sizes
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from hf_posenc.evaluate.memory import peak_memory

GOAL_SECONDS = 2.0
ENCODINGS: tuple[tuple[str, dict[str, Any]], ...] = (("yarn", {"factor": 4}), ("alibi", {}))


def large_llama(sizes: Sizes) -> Any:
    """Llama 3 8B's shape, its weights allocated only; the rotary module is made anew, for its buffers must be right."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    if sizes is QUICK:
        shape |= {"vocab_size": 128, "hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def identity(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Where each parameter lies, and how often it was written to in place."""
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.named_parameters()}


def patch_large(sizes: Sizes) -> dict[str, Any]:
    """Seconds and growth of the resident set for each encoding; a small model was patched before."""
    hf_posenc.patch_model(large_llama(QUICK), "yarn", factor=4)
    model = large_llama(sizes)
    before, rows = identity(model), []
    for encoding, options in ENCODINGS:
        with peak_memory(torch.device("cpu")) as peak:
            start = time.perf_counter()
            hf_posenc.patch_model(model, encoding, **options)
            seconds = time.perf_counter() - start
        rows.append(
            {
                "encoding": encoding,
                "options": options,
                "seconds": seconds,
                "goal_seconds": GOAL_SECONDS,
                "memory_growth_bytes": peak.bytes,
                "weights_copied_or_written": sum(before[name] != now for name, now in identity(model).items()),
            }
        )
        hf_posenc.unpatch_model(model)
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "weights_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtype": "bfloat16",
        "rows": rows,
    }
