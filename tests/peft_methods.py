"""PEFT's methods on the three hosts, with weights as if they had been trained; what tests of them share."""

from __future__ import annotations

from typing import Any

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

METHODS = ("lora", "dora", "ia3")
PREFIX = 5  # virtual tokens

_TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "bloom": ["query_key_value"]}
_FEEDFORWARD = {"llama": ["down_proj"], "gpt2": ["c_fc"], "bloom": []}


def config(method: str, host: str) -> Any:
    given: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "target_modules": _TARGETS[host],
        "fan_in_fan_out": host == "gpt2",
    }
    if method == "prefix":
        return PrefixTuningConfig(num_virtual_tokens=PREFIX, task_type="CAUSAL_LM")
    if method == "ia3":
        return IA3Config(feedforward_modules=_FEEDFORWARD[host], **given)
    return LoraConfig(r=4, use_dora=method == "dora", **given)


def wrap(model: Any, method: str, host: str) -> Any:
    """The model within PEFT's wrapper; the same weights for the same method and host."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        wrapped = get_peft_model(model, config(method, host))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if not parameter.requires_grad:
            continue
        if "ia3" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif "magnitude" in name:
            parameter.data.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
        else:
            parameter.data.normal_(std=0.3, generator=generator)
    return wrapped.eval()
