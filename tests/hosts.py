"""Tiny configs of the architectures beyond Llama, GPT-2 and BLOOM, each with what is its own switched on."""

from dataclasses import dataclass
from typing import Any

import oracle_host
import pytest
import torch
from pairs import _OPTIONS, DYNAMIC, ENCODINGS, ROTATIONS, Pair
from tiny import LENGTH, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc.errors import UnsupportedError

WINDOW = 20  # shorter than every text of the tests, and than the trained length

_DECODER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
_WIDE = {**_DECODER, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LOCAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

ROPE_HOSTS: dict[str, dict[str, Any]] = {
    "mistral": {**_WIDE, "sliding_window": WINDOW},
    "mixtral": {**_DECODER, "num_local_experts": 4, "sliding_window": None},
    "qwen2": {**_DECODER, **_LOCAL, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _WIDE,
    "qwen3_moe": {**_WIDE, **_EXPERTS},
    "olmo2": _DECODER,
    "olmoe": {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": _WIDE,
    "gemma2": {**_WIDE, **_LOCAL, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 12},
    "gemma3_text": {
        **_WIDE,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 12,
    },
    "glm": _WIDE,
    "glm4": _WIDE,
    "phi": {**_DECODER, "hidden_size": 64, "qk_layernorm": True},
    "phi3": {**_DECODER, "original_max_position_embeddings": LENGTH, "sliding_window": 3 * LENGTH},
    "stablelm": {**_DECODER, "hidden_size": 64, "qk_layernorm": True},
    "starcoder2": {**_DECODER, "sliding_window": WINDOW},
    "cohere": {**_DECODER, "use_qk_norm": True},
    "smollm3": {**_DECODER, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "gpt_oss": {
        **_WIDE,
        **_LOCAL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "gpt_neox": {**_DECODER, "hidden_size": 64},
    "deepseek_v2": {**_DECODER, **_MLA, "q_lora_rank": None, "n_shared_experts": 1},
    "deepseek_v3": {**_DECODER, **_MLA, "q_lora_rank": 12},
}

# in 5.4.0 its sdpa, the default there, left the soft-cap out
ATTENTION = {"gemma2": {"attn_implementation": "eager"}}


def is_present(model_type: str) -> bool:
    """Whether this release of Transformers has the architecture, and can make a config of it (5.4.0: no OLMo's)."""
    try:
        return (
            model_type in CONFIG_MAPPING
            and AutoConfig.for_model(model_type, bos_token_id=None, eos_token_id=None) is not None
        )
    except Exception:
        return False


PRESENT = tuple(name for name in ROPE_HOSTS if is_present(name))


def host_model(model_type: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """A seeded causal language model in float32 and eval mode, in the way of `tiny.tiny_model`."""
    values = {
        "vocab_size": VOCAB,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        **ROPE_HOSTS[model_type],
        **config_overrides,
    }
    config = AutoConfig.for_model(model_type, **values)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **ATTENTION.get(model_type, {}))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
            elif "router" in name or name.endswith("gate.weight"):
                parameter.normal_(std=0.5)
            elif parameter.ndim == 1:
                centred = "gemma" in model_type  # whose norms multiply by 1 + weight
                parameter.uniform_(-0.5, 0.5) if centred else parameter.uniform_(0.5, 1.5)
    return model.eval()


@dataclass(frozen=True)
class HostPair(Pair):
    """An encoding with options, and one of the hosts of this file."""

    def stock(self, **config: Any) -> Any:
        return host_model(self.host, **{**self.config, **config})

    @property
    def native(self) -> bool:
        return self.name in ROTATIONS and self.name not in DYNAMIC

    def reference(self, ids: torch.Tensor, **given: Any) -> torch.Tensor:
        """The oracle's logits (1, n, vocabulary)."""
        return oracle_host.host_logits(self.stock(), self.name, self.options, ids, **given)


def rotary_width(host: str) -> int:
    """The channels of a head that turn."""
    facts = oracle_host.FACTS.get(host, oracle_host.Facts())
    return facts.width(host_model(host).config)


def host_pair(host: str, name: str, second: bool = False) -> HostPair:
    """A pair with the options that `pairs` has for its encoding, of which there are two sets."""
    options = dict(_OPTIONS[name][second])
    if options.pop("lists", None):
        half = range(rotary_width(host) // 2)
        options["short_factor"] = [1 + (0.15 if second else 0.05) * i for i in half]
        options["long_factor"] = [1 + (0.9 if second else 0.5) * i for i in half]
    return HostPair(host, name, options, note="other" if second else "")


def not_held() -> set[tuple[str, str]]:
    """The pairs that this release of Transformers cannot hold: 5.4.0 has neither YaRN nor longrope a layer type."""
    pairs = [
        host_pair("gemma3_text", name)
        for name in ("yarn", "ntk_by_parts", "ntk_mixed", "p_rope")
        if "gemma3_text" in PRESENT
    ]
    found = set()
    for pair in pairs:
        try:
            pair.patched()
        except UnsupportedError:
            found.add((pair.host, pair.name))
    return found


NOT_HELD = not_held()
# one encoding for each way into a host: its own rotary module, late turning, scores, the embedding
FAST = ("yarn", "dynamic_yarn", "alibi", "sinusoidal")


def host_pairs(fast: int, *names: str) -> Any:
    """Parametrise a test over all pairs of `names` (default: every encoding): `fast` a host now, the rest in test-all.

    The `fast` ones are taken from `FAST`, another of them for each host in turn.
    """
    found = []
    for i, host in enumerate(PRESENT):
        now = (
            {FAST[(i + j) % len(FAST)] for j in range(fast)} if fast < len(ENCODINGS) else {*ENCODINGS} - {"ntk_mixed"}
        )
        for name in names or ENCODINGS:
            if (host, name) in NOT_HELD:
                continue
            marks = [] if name in now else [pytest.mark.extended]
            found.append(pytest.param(host_pair(host, name), marks=marks, id=f"{host}-{name}"))
    return pytest.mark.parametrize("pair", found)
