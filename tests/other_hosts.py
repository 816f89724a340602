"""Tiny hosts that are no rotary decoders: their configs, the pairs with every encoding, and the ways to run them."""

from dataclasses import dataclass, field
from typing import Any

import other_oracles
import pytest
import torch
from pairs import _OPTIONS as OPTIONS
from pairs import DYNAMIC, ENCODINGS, ROTATIONS, tuned
from tiny import LENGTH, VOCAB, tiny_ids
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_posenc import patch_model, support

_ENCODER = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
_FALCON = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# name → model type and config; a name that ends in a number or a word after a dash is a variant of that type
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("mpt", {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": LENGTH}),
    "mpt-other": (
        "mpt",
        {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": LENGTH,
            "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.4, "alibi_bias_max": 5},
        },
    ),
    "opt": (
        "opt",
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": LENGTH,
            "dropout": 0.0,
            "init_std": 0.3,
        },
    ),
    "falcon": ("falcon", {**_FALCON, "bias": True}),
    "falcon-alibi": ("falcon", {**_FALCON, "alibi": True, "num_attention_heads": 6, "parallel_attn": False}),
    "falcon-new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-heads": ("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False}),
    "gptj": ("gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": LENGTH, **_NO_DROPOUT}),
    "openai-gpt": ("openai-gpt", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": LENGTH, **_NO_DROPOUT}),
    "bert": ("bert", _ENCODER),
    "bert-decoder": ("bert", {**_ENCODER, "is_decoder": True}),
    "roberta": ("roberta", {**_ENCODER, "max_position_embeddings": LENGTH + 5, "pad_token_id": 4}),
}
CONFIGS["opt-post"] = ("opt", {**CONFIGS["opt"][1], "do_layer_norm_before": False, "word_embed_proj_dim": 24})

HOSTS = ("mpt", "opt", "falcon", "falcon-alibi", "gptj", "openai-gpt", "bert", "roberta")
VARIANTS = ("mpt-other", "opt-post", "falcon-new", "falcon-heads", "bert-decoder")
ENCODERS = ("bert", "roberta")
NO_CACHE = ("openai-gpt", *ENCODERS)
TABLES = ("opt", "opt-post", "openai-gpt", "bert", "bert-decoder", "roberta")
OWN = dict.fromkeys(TABLES, "learned") | dict.fromkeys(("mpt", "mpt-other", "falcon-alibi"), "alibi")
OWN |= dict.fromkeys(("falcon", "falcon-new", "falcon-heads", "gptj"), "rope")
ROWS = 5 * LENGTH


def width(host: str) -> int:
    """The channels of a head that a rotation turns."""
    return {"gptj": 8, "falcon-alibi": 8, "mpt-other": 8}.get(host, 12)


@dataclass(frozen=True)
class Pair:
    """An encoding with options, and a host."""

    host: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.host}-{self.name}"

    @property
    def kind(self) -> str:
        return CONFIGS[self.host][0]

    def stock(self, **config: Any) -> Any:
        return tiny_host(self.host, **config)

    def patched(self, **config: Any) -> Any:
        return self.put_into(self.stock(**config))

    def put_into(self, model: Any) -> Any:
        return tuned(patch_model(model, self.name, **self.options), self.name, self.options)

    def reference(self, ids: Tensor, positions: Any = None) -> Tensor:
        """The oracle's logits (1, n, vocabulary) in float64; positions count from 0 on every host."""
        return torch.from_numpy(other_oracles.reference(self.stock(), self.name, self.options, ids, positions))[None]


def tiny_host(host: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """A seeded model with a language head, float32, eval mode; no weight is zero or one where it could hide a fault."""
    kind, values = CONFIGS[host]
    common = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None}
    values = {**common, **({} if "pad_token_id" in values else {"pad_token_id": None}), **values, **config_overrides}
    config = AutoConfig.for_model(kind, **values)
    auto: Any = AutoModelForMaskedLM if host in ENCODERS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def text(n: int, *, seed: int = 0) -> Tensor:
    """Random token ids (1, n), none of them a padding token."""
    return tiny_ids(n, seed=seed) % 90 + 5


def pair(host: str, name: str, second: bool = False) -> Pair:
    """One of two sets of options that are not the defaults."""
    options = dict(OPTIONS[name][second])
    if options.pop("lists", None):
        half = range(width(host) // 2)
        options["short_factor"] = [1 + (0.15 if second else 0.05) * i for i in half]
        options["long_factor"] = [1 + (0.9 if second else 0.5) * i for i in half]
    if name == "learned" and host in TABLES:
        options = {"resize": "interpolate", "factor": ROWS / LENGTH} if not second else options
    return Pair(host, name, options)


def allowed(host: str, name: str) -> bool:
    """Whether the pair is one that can be; what the table says of a type, and of its decoders in particular."""
    return host == "bert-decoder" or bool(support(CONFIGS[host][0], name))


PAIRS = [pair(host, name) for host in HOSTS for name in ENCODINGS if allowed(host, name)]
OTHERS = [pair(host, name, True) for host in HOSTS for name in ENCODINGS if allowed(host, name)]
VARIED = [pair(host, name) for host in VARIANTS for name in ENCODINGS]
CACHED = [p for p in PAIRS if p.host not in NO_CACHE]

_FAST_NAMES = {"mpt": ("alibi", "yarn", "dynamic_ntk", "learned"), "falcon-alibi": ("alibi", "yarn", "sinusoidal")}


def is_fast(p: Pair) -> bool:
    third = "sinusoidal" if p.host in ENCODERS else "dynamic_yarn"
    return p.name in _FAST_NAMES.get(p.host, ("alibi", "yarn", third, "learned"))


# every seam of every host once: its own encoding, and one of each of the other places
FAST = [p for p in PAIRS if is_fast(p)]


def every(pairs: list[Pair], fast: list[Pair] = FAST) -> Any:
    """Parametrise over pairs; those that are not among the fast ones belong to the long run."""
    return pytest.mark.parametrize(
        "pair", [pytest.param(p, id=str(p), marks=() if p in fast else pytest.mark.extended) for p in pairs]
    )


def is_rotation(p: Pair) -> bool:
    return p.name in ROTATIONS


def is_dynamic(p: Pair) -> bool:
    return p.name in DYNAMIC


def on_stock_path(p: Pair) -> bool:
    """Whether the host's own forward is left as it is: a rotary Falcon with a rotation that Transformers has."""
    return OWN[p.host] == "rope" and CONFIGS[p.host][0] == "falcon" and is_rotation(p) and not is_dynamic(p)
