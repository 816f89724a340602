"""Tiny random models whose weights are large enough that a wrong position encoding shows in the logits."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)  # at this size a second thread costs more than it does: tenfold where cores are shared

LENGTH = 32
VOCAB = 97

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    },
    "gpt2": {
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 4},
}


def tiny_model(model_type: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """A seeded causal language model in float32 and eval mode; `config_overrides` go to its config.

    Original length 32 (BLOOM's config states none), vocabulary 97, no end-of-text token. Transformers starts biases at
    zero and norm weights at one, where a forgotten one would not be noticed: here all of them are random.
    Typed Any, since a checker knows nothing of the submodules that tests reach into.
    """
    values = {
        "vocab_size": VOCAB,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        **CONFIGS[model_type],
        **config_overrides,
    }
    config = AutoConfig.for_model(model_type, **values)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def tiny_ids(n: int, *, seed: int = 0) -> torch.Tensor:
    """Random token ids (1, n)."""
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))
