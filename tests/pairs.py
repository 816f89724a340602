"""All pairs of an encoding and a host, each with options that are not the defaults, and the ways to run them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle_biases
import pytest
import torch
from numpy.typing import NDArray
from oracle_models import reference_logits
from tiny import LENGTH, tiny_model
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.patching import find_backbone

HOSTS = ("llama", "gpt2", "bloom")
NATIVE = {"llama": "rope", "gpt2": "learned", "bloom": "alibi"}
ROTATIONS = ("rope", "linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "dynamic_yarn", "llama3", "longrope")
ROTATIONS = (*ROTATIONS, "ntk_mixed", "p_rope")
DYNAMIC = ("dynamic_ntk", "dynamic_yarn", "longrope")
DISTANCES = ("rerope", "leaky_rerope", "self_extend", "dual_chunk", "xpos")
TRAINED = ("t5_bias", "kerple", "fire")
BIASES = (*TRAINED, "sandwich")
ENCODINGS = (*ROTATIONS, "alibi", "sinusoidal", "learned", "nope", *DISTANCES, *BIASES)
ROWS = 5 * LENGTH  # of the longer tables

_BETAS = {"beta_fast": 4, "beta_slow": 0.5}
_OTHER_BETAS = {"beta_fast": 3.5, "beta_slow": 0.25, "truncate": False}

# two sets of options an encoding; `lists` stands for longrope's two, which depend on the width of the heads
_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rope": ({"rope_theta": 500}, {"rope_theta": 3e5}),
    "linear": ({"factor": 2}, {"factor": 5.5, "rope_theta": 300}),
    "ntk": ({"factor": 3}, {"factor": 8, "rope_theta": 700}),
    "dynamic_ntk": ({"factor": 2}, {"rope_theta": 900, "original_max_position_embeddings": 24}),
    "ntk_by_parts": ({"factor": 4, **_BETAS}, {"factor": 8, "rope_theta": 200, **_OTHER_BETAS}),
    "yarn": ({"factor": 4, **_BETAS}, {"factor": 8, "attention_factor": 1.4, **_OTHER_BETAS}),
    "dynamic_yarn": (_BETAS, {"original_max_position_embeddings": 24, "rope_theta": 300, **_OTHER_BETAS}),
    "llama3": ({"factor": 4}, {"rope_theta": 100, "low_freq_factor": 0.5, "high_freq_factor": 6}),
    "longrope": ({"factor": 4, "lists": 1}, {"factor": 2, "attention_factor": 0.8, "rope_theta": 800, "lists": 2}),
    "alibi": ({"factor": 2}, {}),
    "sinusoidal": ({}, {"base": 300, "layout": "concat", "scale": 1.7}),
    "learned": ({"max_position_embeddings": ROWS}, {"max_position_embeddings": ROWS + 7}),
    "nope": ({}, {}),
    "ntk_mixed": ({"factor": 4}, {"factor": 8, "exponent": 0.4, "rope_theta": 600}),
    "p_rope": ({"p": 0.5, "rope_theta": 400}, {"p": 0.9, "rope_theta": 2e5}),
    # the trained length of these hosts is 32: the windows are passed many times over within a test's text
    "rerope": ({"window": 11}, {"rope_theta": 300, "original_max_position_embeddings": 24}),
    "leaky_rerope": ({"window": 9, "k": 4.5}, {"rope_theta": 500, "k": 3}),
    "self_extend": ({"group_size": 3, "window_size": 10}, {"rope_theta": 900}),
    "dual_chunk": ({"chunk_size": 20, "local_size": 6}, {"rope_theta": 700, "mscale": 0.5}),
    "xpos": ({"scale_base": 40}, {"rope_theta": 300, "gamma": 0.8}),
    "t5_bias": ({"num_buckets": 16, "max_distance": 60}, {"num_buckets": 8, "max_distance": 100}),
    "kerple": ({"seed": 3}, {"variant": "power"}),
    "fire": ({"initial_length": 24, "initial_c": 0.3}, {"initial_length": 90, "seed": 5}),
    "sandwich": ({"bar_d": 32}, {"bar_d": 12}),
}
# the add-ons, on what turns early, by segments, on scores, and on nothing
ADD_ONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope-logn": ("rope", {"logn": True}),
    "yarn-both": ("yarn", {"factor": 4, **_BETAS, "resonance": True, "logn": True}),
    "dynamic_yarn-both": ("dynamic_yarn", {**_BETAS, "resonance": True, "logn": True}),
    "ntk-resonance": ("ntk", {"factor": 3, "resonance": True}),
    "alibi-logn": ("alibi", {"factor": 2, "logn": True}),
    "nope-logn": ("nope", {"logn": True}),
}


@dataclass(frozen=True)
class Pair:
    """An encoding with options, and a host with config overrides."""

    host: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.host, self.name, self.note)))

    def stock(self, **config: Any) -> Any:
        """The model without the patch."""
        return tiny_model(self.host, **{**self.config, **config})

    def patched(self, **config: Any) -> Any:
        return self.put_into(self.stock(**config))

    def put_into(self, model: Any) -> Any:
        """The model patched, and what is trained in it made large and known to the oracle."""
        return tuned(patch_model(model, self.name, **self.options), self.name, self.options)

    @property
    def dynamic(self) -> bool:
        return self.name in DYNAMIC

    @property
    def native(self) -> bool:
        """Whether Transformers alone can hold the patched model."""
        return {
            "llama": self.name in ROTATIONS and not self.dynamic,
            "gpt2": self.name == "learned",
            "bloom": self.name == "alibi" and self.options.get("factor", 1) == 1,
        }[self.host]


def tuned(model: Any, name: str, options: dict[str, Any]) -> Any:
    """A patched model with the oracle's parameters in its score bias, where its encoding is one that is trained."""
    if name not in BIASES:
        return model
    _, backbone = find_backbone(model)
    both_ways = backbone.config.model_type in ("bert", "roberta") and not backbone.config.is_decoder
    heads = backbone.config.num_attention_heads
    with torch.no_grad():
        for key, value in oracle_biases.bias_parameters(name, heads, both_ways, **options).items():
            backbone.posenc.get_parameter(key).copy_(torch.from_numpy(value))
    return model


def _pair(host: str, name: str, second: bool) -> Pair:
    options = dict(_OPTIONS[name][second])
    width = 16 if host == "llama" else 12
    if options.pop("lists", None):
        half = range(width // 2)
        options["short_factor"] = [1 + (0.15 if second else 0.05) * i for i in half]
        options["long_factor"] = [1 + (0.9 if second else 0.5) * i for i in half]
    if host == "bloom" and name in (*ROTATIONS, *DISTANCES):
        options = {"original_max_position_embeddings": LENGTH, **options}
    if host == "gpt2" and name == "learned":
        options = {"resize": "interpolate", "factor": ROWS / LENGTH} if not second else options
    return Pair(host, name, options, note="other" if second else "")


PAIRS = [_pair(host, name, False) for host in HOSTS for name in ENCODINGS]
OTHERS = [_pair(host, name, True) for host in HOSTS for name in ENCODINGS if _OPTIONS[name][1] or name == "alibi"]
RESIZED = [
    Pair("gpt2", "learned", {"resize": rule, "factor": factor, **extra}, note=note)
    for note, rule, factor, extra in [
        ("interpolate", "interpolate", 4.6, {}),
        ("cubic", "cubic", 5, {}),
        ("group", "group", 4.6, {}),
        ("repeat", "repeat", 5, {}),
        ("hierarchical", "hierarchical", 8, {}),
        ("hierarchical-alpha", "hierarchical", 32, {"alpha": 0.3}),
    ]
]
# shapes on purpose: head counts that are no power of two, one key head, wide heads, GPT-2's scaling by layer
SHAPES = [
    Pair("llama", "alibi", {}, {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 8}, "6-heads"),
    Pair("llama", "yarn", {"factor": 3}, {"num_key_value_heads": 1, "head_dim": 24}, "1-key-head"),
    Pair("llama", "dynamic_yarn", {}, {"num_key_value_heads": 1, "head_dim": 24}, "1-key-head"),
    Pair("gpt2", "alibi", {}, {"n_head": 12}, "12-heads"),
    Pair("gpt2", "rope", {}, {"scale_attn_by_inverse_layer_idx": True}, "by-layer"),
    Pair("gpt2", "dynamic_ntk", {"factor": 3}, {"scale_attn_by_inverse_layer_idx": True}, "by-layer"),
    Pair("bloom", "alibi", {}, {"n_head": 6}, "6-heads"),
    Pair("bloom", "rope", {}, {"apply_residual_connection_post_layernorm": True}, "post-norm"),
]

ADDED = [
    Pair(
        host, name, {**options, **({"original_max_position_embeddings": LENGTH} if host == "bloom" else {})}, note=note
    )
    for host in HOSTS
    for note, (name, options) in ADD_ONS.items()
]

# frequencies like any others, but for p_rope's zeros, which Llama's own rotary module must take
ALIKE = [pair for pair in PAIRS if pair.name == "ntk_mixed" or (pair.name == "p_rope" and pair.host != "llama")]
every_pair = pytest.mark.parametrize(
    "pair", [pytest.param(p, id=str(p), marks=pytest.mark.extended if p in ALIKE else ()) for p in PAIRS]
)


def only(*names: str) -> Any:
    """Parametrise a test over the main pairs of some encodings, on all hosts."""
    return pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.name in names], ids=str)


def cache_name(model: Any) -> str:
    """What this release of Transformers calls the cache argument."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


@torch.no_grad()
def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """(batch, n, vocabulary) of one forward without a cache."""
    return model(input_ids=ids, **{"use_cache": False, **inputs}).logits


@torch.no_grad()
def in_pieces(model: Any, ids: Tensor, pieces: Sequence[int], cache: Any = None, **inputs: Any) -> Tensor:
    """Logits of consecutive calls on `pieces` tokens each, over one cache; masks are cut as `generate` cuts them."""
    parts, at = [], 0
    for n in pieces:
        cut = {
            key: value[:, : at + n] if key == "attention_mask" else value[:, at : at + n]
            for key, value in inputs.items()
        }
        given = {} if cache is None else {cache_name(model): cache}
        out = model(input_ids=ids[:, at : at + n], use_cache=True, **given, **cut)
        cache, at = out[cache_name(model)], at + n
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def generate(model: Any, ids: Tensor, new: int, **options: Any) -> Tensor:
    """The new tokens of a deterministic `generate`, (batch, new)."""
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **options}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **options})[:, ids.shape[1] :]


def reference(pair: Pair, ids: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
    """The oracle's logits (1, n, vocabulary) in float64."""
    found: NDArray[Any] = reference_logits(pair.stock(), pair.name, pair.options, ids, positions, documents)
    return torch.from_numpy(found)[None]


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference of two logits as a share of the largest logit."""
    assert got.shape == want.shape
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


ROUNDING = (
    1e-4  # of the largest logit, in float32 through three layers; a wrong position moves logits by more than 1e-2
)


def assert_same(got: Tensor, want: Tensor, tolerance: float = ROUNDING) -> None:
    assert difference(got, want) <= tolerance
