"""Dense float64 forward passes of the hosts that are no rotary decoders, as in `oracle_models`: from weights alone.

Each function is given a stock model's weights and config and what is put in its three seams; nothing here calls the
model, and nothing comes from the package. A single row without padding; positions count from 0.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import oracle_biases
import torch
from numpy.typing import NDArray
from oracle import Array
from oracle_distance import DISTANCES
from oracle_layers import (
    Seams,
    State,
    conv1d,
    gelu_new,
    heads,
    layer_norm,
    linear,
    query_scales,
    same_rotation,
    softmax,
    turn,
)
from other_seams import distances, learned, own_length, rotations, sinusoids, slopes

Turn = Callable[[Array, NDArray[np.int64], Array, float], Array]


def gelu(x: Array) -> Array:
    """With the error function."""
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


def turn_interleaved(x: Array, positions: NDArray[np.int64], inv_freq: Array, scale: float) -> Array:
    """Channel 2i with 2i + 1, of the first 2·len(inv_freq) channels; the others are left alone."""
    angles = positions[:, None] * inv_freq
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    out = x.copy()
    end = 2 * len(inv_freq)
    even, odd = x[..., 0:end:2], x[..., 1:end:2]
    out[..., 0:end:2] = even * cos - odd * sin
    out[..., 1:end:2] = odd * cos + even * sin
    return out


def attend(q: Array, k: Array, v: Array, seams: Seams, scaling: float, turned: Turn = turn) -> Array:
    """(heads, n, d), keys and values of (key heads, n, d) -> (n, heads * d); a bias falls on either side."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1)
    for queries, (inv_freq, scale) in same_rotation(seams.rotations or []):
        left = turned(q[:, queries], seams.positions[queries], inv_freq, scale)
        scores[:, queries] = left @ turned(k, seams.positions, inv_freq, scale).transpose(0, 2, 1)
    if seams.distances is not None:
        scores = seams.distances.scores(q, k, turned)
    scores *= scaling
    if seams.query_scale is not None:
        scores *= seams.query_scale[:, None]
    if seams.slopes is not None:
        apart = np.abs(seams.positions[:, None] - seams.positions[None, :])
        scores -= seams.slopes[:, None, None] * apart
    if seams.bias is not None:
        scores = scores + seams.bias
    scores[:, ~seams.visible] = -np.inf
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def added(x: Array, seams: Seams) -> Array:
    return x if seams.embedding is None else x + seams.embedding


def norm(x: Array, state: State, prefix: str, eps: float) -> Array:
    """A layer norm that may have no bias."""
    if f"{prefix}.bias" in state:
        return layer_norm(x, state, prefix, eps)
    return layer_norm(x, {**state, f"{prefix}.bias": np.zeros(1)}, prefix, eps)


def mpt(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    eps, options = config.layer_norm_epsilon, config.attn_config
    x = added(state["transformer.wte.weight"][ids], seams)
    for layer in range(config.n_layers):
        at = f"transformer.blocks.{layer}"
        fused = linear(norm(x, state, f"{at}.norm_1", eps), state, f"{at}.attn.Wqkv")
        if options.clip_qkv:
            fused = np.clip(fused, -options.clip_qkv, options.clip_qkv)
        q, k, v = (heads(part, config.n_heads) for part in np.split(fused, 3, axis=-1))
        scaling = options.softmax_scale or q.shape[-1] ** -0.5
        x = x + linear(attend(q, k, v, seams, scaling), state, f"{at}.attn.out_proj")
        h = gelu(linear(norm(x, state, f"{at}.norm_2", eps), state, f"{at}.ffn.up_proj"))
        x = x + linear(h, state, f"{at}.ffn.down_proj")
    return norm(x, state, "transformer.norm_f", eps) @ state["transformer.wte.weight"].T


def opt(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    x, first = state["model.decoder.embed_tokens.weight"][ids], config.do_layer_norm_before
    if config.word_embed_proj_dim != config.hidden_size:
        x = linear(x, state, "model.decoder.project_in")
    x = added(x, seams)
    for layer in range(config.num_hidden_layers):
        at = f"model.decoder.layers.{layer}"
        h = norm(x, state, f"{at}.self_attn_layer_norm", 1e-5) if first else x
        q, k, v = (heads(linear(h, state, f"{at}.self_attn.{n}_proj"), config.num_attention_heads) for n in "qkv")
        x = x + linear(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.self_attn.out_proj")
        x = x if first else norm(x, state, f"{at}.self_attn_layer_norm", 1e-5)
        h = norm(x, state, f"{at}.final_layer_norm", 1e-5) if first else x
        x = x + linear(np.maximum(linear(h, state, f"{at}.fc1"), 0), state, f"{at}.fc2")
        x = x if first else norm(x, state, f"{at}.final_layer_norm", 1e-5)
    x = norm(x, state, "model.decoder.final_layer_norm", 1e-5) if first else x
    if config.word_embed_proj_dim != config.hidden_size:
        x = linear(x, state, "model.decoder.project_out")
    return x @ state["model.decoder.embed_tokens.weight"].T


def falcon_heads(fused: Array, config: Any) -> tuple[Array, Array, Array]:
    """q, k, v of the three layouts: groups of queries with their key and value; one key head; a triple a head."""
    n, d = len(fused), config.head_dim
    if config.new_decoder_architecture:
        parts = fused.reshape(n, config.num_kv_heads, -1, d)
        q = parts[:, :, :-2].reshape(n, -1, d)
        k, v = parts[:, :, -2], parts[:, :, -1]
    elif config.multi_query:
        parts = fused.reshape(n, config.num_attention_heads + 2, d)
        q, k, v = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
    else:
        parts = fused.reshape(n, config.num_attention_heads, 3, d)
        q, k, v = (parts[:, :, i] for i in range(3))
    return q.transpose(1, 0, 2), k.transpose(1, 0, 2), v.transpose(1, 0, 2)


def falcon(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    eps = config.layer_norm_epsilon
    x = added(state["transformer.word_embeddings.weight"][ids], seams)
    for layer in range(config.num_hidden_layers):
        at = f"transformer.h.{layer}"
        two = config.new_decoder_architecture
        h = norm(x, state, f"{at}.ln_attn" if two else f"{at}.input_layernorm", eps)
        q, k, v = falcon_heads(linear(h, state, f"{at}.self_attention.query_key_value"), config)
        out = linear(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.self_attention.dense")
        if two:
            x, h = x + out, norm(x, state, f"{at}.ln_mlp", eps)
        elif config.parallel_attn:
            x = x + out
        else:
            x = x + out
            h = norm(x, state, f"{at}.post_attention_layernorm", eps)
        x = x + linear(gelu(linear(h, state, f"{at}.mlp.dense_h_to_4h")), state, f"{at}.mlp.dense_4h_to_h")
    return norm(x, state, "transformer.ln_f", eps) @ state["transformer.word_embeddings.weight"].T


def gptj(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    x = added(state["transformer.wte.weight"][ids], seams)
    for layer in range(config.n_layer):
        at = f"transformer.h.{layer}"
        h = norm(x, state, f"{at}.ln_1", config.layer_norm_epsilon)
        q, k, v = (heads(linear(h, state, f"{at}.attn.{n}_proj"), config.n_head) for n in "qkv")
        out = linear(attend(q, k, v, seams, q.shape[-1] ** -0.5, turn_interleaved), state, f"{at}.attn.out_proj")
        inner = linear(gelu_new(linear(h, state, f"{at}.mlp.fc_in")), state, f"{at}.mlp.fc_out")
        x = x + out + inner
    return linear(norm(x, state, "transformer.ln_f", config.layer_norm_epsilon), state, "lm_head")


def openai_gpt(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    x, eps = added(state["transformer.tokens_embed.weight"][ids], seams), config.layer_norm_epsilon
    for layer in range(config.n_layer):
        at = f"transformer.h.{layer}"
        q, k, v = (heads(p, config.n_head) for p in np.split(conv1d(x, state, f"{at}.attn.c_attn"), 3, axis=-1))
        out = conv1d(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.attn.c_proj")
        h = norm(x + out, state, f"{at}.ln_1", eps)
        inner = conv1d(gelu_new(conv1d(h, state, f"{at}.mlp.c_fc")), state, f"{at}.mlp.c_proj")
        x = norm(h + inner, state, f"{at}.ln_2", eps)
    return x @ state["transformer.tokens_embed.weight"].T


def bert(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    """BERT and RoBERTa: they differ in their heads alone."""
    root, eps = config.model_type, config.layer_norm_eps
    at = f"{root}.embeddings"
    x = state[f"{at}.word_embeddings.weight"][ids] + state[f"{at}.token_type_embeddings.weight"][0]
    x = norm(added(x, seams), state, f"{at}.LayerNorm", eps)
    for layer in range(config.num_hidden_layers):
        at = f"{root}.encoder.layer.{layer}"
        names = ("query", "key", "value")
        q, k, v = (heads(linear(x, state, f"{at}.attention.self.{n}"), config.num_attention_heads) for n in names)
        out = linear(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.attention.output.dense")
        x = norm(x + out, state, f"{at}.attention.output.LayerNorm", eps)
        inner = linear(gelu(linear(x, state, f"{at}.intermediate.dense")), state, f"{at}.output.dense")
        x = norm(x + inner, state, f"{at}.output.LayerNorm", eps)
    if root == "bert":
        x = gelu(linear(x, state, "cls.predictions.transform.dense"))
        x = norm(x, state, "cls.predictions.transform.LayerNorm", eps)
        return linear(x, state, "cls.predictions.decoder")
    x = norm(gelu(linear(x, state, "lm_head.dense")), state, "lm_head.layer_norm", eps)
    return linear(x, state, "lm_head.decoder")


FORWARD: dict[str, Callable[[State, Any, NDArray[np.int64], Seams], Array]] = {
    "mpt": mpt,
    "opt": opt,
    "falcon": falcon,
    "gptj": gptj,
    "openai-gpt": openai_gpt,
    "bert": bert,
    "roberta": bert,
}


def reference(model: Any, name: str, options: dict[str, Any], input_ids: Any, positions: Any = None) -> Array:
    """The logits (n, vocabulary) of one unpadded row from a stock `model`'s weights under the named encoding."""
    config = model.config
    state = {key: value.detach().double().numpy() for key, value in model.state_dict().items()}
    ids = np.asarray(input_ids, dtype=np.int64).reshape(-1)
    at = np.arange(len(ids)) if positions is None else np.asarray(positions, dtype=np.int64).reshape(-1)
    both = config.model_type in ("bert", "roberta") and not config.is_decoder
    visible = np.ones((len(ids), len(ids)), dtype=bool) if both else np.tri(len(ids), dtype=bool)
    options = dict(options)
    extra: dict[str, Any] = {
        "query_scale": query_scales(options, at, own_length(config), rotation=name in (*oracle.ROTATIONS, *DISTANCES))
    }
    if name in oracle.ROTATIONS:
        extra["rotations"] = rotations(config, name, at, **options)
    elif name in DISTANCES:
        extra["distances"] = distances(config, name, at, visible, both, **options)
    elif name == "alibi":
        extra["slopes"] = slopes(config, **options)
    elif name in ("sinusoidal", "learned"):
        extra["embedding"] = (sinusoids if name == "sinusoidal" else learned)(state, config, at, **options)
    elif name in oracle_biases.BIASES:
        extra["bias"] = oracle_biases.score_bias(name, at.tolist(), config.num_attention_heads, both, **options)
    else:
        assert name == "nope" and not options
    return FORWARD[config.model_type](state, config, ids, Seams(at, visible, **extra))
