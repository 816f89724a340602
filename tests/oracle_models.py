"""Dense float64 forward passes of Llama, GPT-2 and BLOOM with any of the oracle's encodings put in.

Everything is read from a stock model's `state_dict` and config: nothing here calls the model. The host's native
encoding is taken out and the named one put in, at one of three seams: added to the embedding, turning queries and keys,
added to the scores. A single row without padding; shapes are (tokens, width), in attention (heads, tokens, head width).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import oracle
import oracle_biases
import oracle_tables
from numpy.typing import NDArray
from oracle import Array, Rotation
from oracle_distance import DISTANCES, Distances
from oracle_layers import (
    Seams,
    State,
    attend,
    bloom_gelu,
    conv1d,
    enter,
    gelu_new,
    heads,
    layer_norm,
    linear,
    query_scales,
    rms_norm,
    silu,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTO = "auto"


def llama_logits(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    assert config.hidden_act == "silu"
    eps = config.rms_norm_eps
    x = enter(state["model.embed_tokens.weight"][ids], seams)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        h = rms_norm(x, state, f"{at}.input_layernorm", eps)
        q = heads(linear(h, state, f"{at}.self_attn.q_proj"), config.num_attention_heads)
        k = heads(linear(h, state, f"{at}.self_attn.k_proj"), config.num_key_value_heads)
        v = heads(linear(h, state, f"{at}.self_attn.v_proj"), config.num_key_value_heads)
        x = x + linear(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.self_attn.o_proj")
        h = rms_norm(x, state, f"{at}.post_attention_layernorm", eps)
        gated = silu(linear(h, state, f"{at}.mlp.gate_proj")) * linear(h, state, f"{at}.mlp.up_proj")
        x = x + linear(gated, state, f"{at}.mlp.down_proj")
    return rms_norm(x, state, "model.norm", eps) @ head(state, config, "model.embed_tokens.weight").T


def gpt2_logits(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    assert config.activation_function == "gelu_new"
    eps = config.layer_norm_epsilon
    x = enter(state["transformer.wte.weight"][ids], seams)
    for layer in range(config.n_layer):
        at = f"transformer.h.{layer}"
        h = layer_norm(x, state, f"{at}.ln_1", eps)
        fused = np.split(conv1d(h, state, f"{at}.attn.c_attn"), 3, axis=-1)
        q, k, v = (heads(part, config.n_head) for part in fused)
        scaling = q.shape[-1] ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scaling /= layer + 1
        x = x + conv1d(attend(q, k, v, seams, scaling), state, f"{at}.attn.c_proj")
        h = layer_norm(x, state, f"{at}.ln_2", eps)
        x = x + conv1d(gelu_new(conv1d(h, state, f"{at}.mlp.c_fc")), state, f"{at}.mlp.c_proj")
    return layer_norm(x, state, "transformer.ln_f", eps) @ head(state, config, "transformer.wte.weight").T


def bloom_logits(state: State, config: Any, ids: NDArray[np.int64], seams: Seams) -> Array:
    eps = config.layer_norm_epsilon
    embedded = state["transformer.word_embeddings.weight"][ids]
    x = enter(layer_norm(embedded, state, "transformer.word_embeddings_layernorm", eps), seams)
    for layer in range(config.n_layer):
        at = f"transformer.h.{layer}"
        h = layer_norm(x, state, f"{at}.input_layernorm", eps)
        fused = linear(h, state, f"{at}.self_attention.query_key_value").reshape(len(ids), config.n_head, 3, -1)
        q, k, v = (fused[:, :, part].transpose(1, 0, 2) for part in range(3))
        residual = h if config.apply_residual_connection_post_layernorm else x
        x = residual + linear(attend(q, k, v, seams, q.shape[-1] ** -0.5), state, f"{at}.self_attention.dense")
        h = layer_norm(x, state, f"{at}.post_attention_layernorm", eps)
        residual = h if config.apply_residual_connection_post_layernorm else x
        inner = bloom_gelu(linear(h, state, f"{at}.mlp.dense_h_to_4h"))
        x = residual + linear(inner, state, f"{at}.mlp.dense_4h_to_h")
    return layer_norm(x, state, "transformer.ln_f", eps) @ head(state, config, "transformer.word_embeddings.weight").T


def head(state: State, config: Any, tied: str) -> Array:
    return state[tied] if config.tie_word_embeddings else state["lm_head.weight"]


FORWARD: dict[str, Callable[[State, Any, NDArray[np.int64], Seams], Array]] = {
    "llama": llama_logits,
    "gpt2": gpt2_logits,
    "bloom": bloom_logits,
}
NATIVE = {"llama": "rope", "gpt2": "learned", "bloom": "alibi"}


def embedding_rms(state: State, model_type: str) -> float:
    """Root mean square of what enters the first block, read from the weights alone."""
    if model_type == "bloom":
        norm = "transformer.word_embeddings_layernorm"
        return math.sqrt(np.mean(state[f"{norm}.weight"] ** 2 + state[f"{norm}.bias"] ** 2))
    table = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[model_type]
    return math.sqrt(np.mean(state[table] ** 2))


def sinusoidal_rows(
    state: State,
    config: Any,
    positions: NDArray[np.int64],
    *,
    base: float = 10000,
    layout: Any = "interleaved",
    scale: float | str = AUTO,
) -> Array:
    factor = embedding_rms(state, config.model_type) * math.sqrt(2) if scale == AUTO else float(scale)
    return factor * np.stack([oracle.sinusoid(int(p), config.hidden_size, base, layout) for p in positions])


def learned_rows(
    state: State,
    config: Any,
    positions: NDArray[np.int64],
    *,
    max_position_embeddings: int | None = None,
    resize: str | None = None,
    factor: float | None = None,
    alpha: float = 0.4,
) -> Array:
    """The host's own table, the same resized, or a fresh one (sinusoidal at the scale of the embeddings)."""
    if config.model_type != "gpt2" or (max_position_embeddings is not None and resize is None):
        return sinusoidal_rows(state, config, positions)
    table = state["transformer.wpe.weight"]
    if resize is not None:
        if factor is None:
            factor = 1.0 if max_position_embeddings is None else max_position_embeddings / len(table)
        table = oracle_tables.resize(table, resize, int(positions.max()) + 1, factor, alpha)
    return table[positions]


def rotary_sizes(
    config: Any, rope_theta: float | None = None, original_max_position_embeddings: int | None = None
) -> dict[str, Any]:
    """Rotary width, base and trained length of a host, or those that were asked for."""
    theta, length, dim = 1e4, original_max_position_embeddings, config.hidden_size // config.num_attention_heads
    if config.model_type == "llama":
        assert config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        theta, dim = config.rope_parameters["rope_theta"], config.head_dim
    if config.model_type != "bloom":
        length = length or config.max_position_embeddings
    return {"dim": dim, "theta": rope_theta or theta, "length": length}


def rotations(
    config: Any,
    name: str,
    positions: NDArray[np.int64],
    *,
    rope_theta: float | None = None,
    original_max_position_embeddings: int | None = None,
    **options: Any,
) -> list[Rotation]:
    """One rotation a query."""
    sizes = rotary_sizes(config, rope_theta, original_max_position_embeddings)
    return [oracle.rotation(name, int(t), **sizes, **options) for t in positions]


def distances(
    config: Any,
    name: str,
    positions: NDArray[np.int64],
    visible: NDArray[np.bool_],
    *,
    rope_theta: float | None = None,
    original_max_position_embeddings: int | None = None,
    **options: Any,
) -> Distances:
    """One rotation a pair."""
    sizes = rotary_sizes(config, rope_theta, original_max_position_embeddings)
    return Distances(name, positions, visible, **sizes, **options)


def reference_logits(
    model: "PreTrainedModel",
    name: str | None,
    options: Mapping[str, Any] | None,
    input_ids: Any,
    positions: Sequence[int] | NDArray[np.int64] | None = None,
    documents: Sequence[int] | NDArray[np.int64] | None = None,
    window: int | None = None,
) -> Array:
    """The logits (n, vocab) of one unpadded row, from a stock `model`'s weights under the named encoding.

    `name` None is the host's own encoding. A query at position t and the keys it sees are all turned with the
    frequencies of t. `positions` (default 0 .. n - 1) are what the encoding sees; who sees whom goes by the order in
    the row: the earlier tokens of the same id in `documents`, and of those the last `window`, oneself included.
    """
    config: Any = model.config
    state = {key: value.detach().cpu().double().numpy() for key, value in model.state_dict().items()}
    ids = np.asarray(input_ids, dtype=np.int64)
    assert ids.size == ids.shape[-1], f"a single row is needed, got {ids.shape}"
    ids = ids.reshape(-1)
    n = len(ids)
    places = np.arange(n) if positions is None else np.asarray(positions, dtype=np.int64).reshape(n)
    document = np.zeros(n, dtype=np.int64) if documents is None else np.asarray(documents).reshape(n)
    step = np.arange(n)[:, None] - np.arange(n)[None, :]
    visible = (step >= 0) & (document[:, None] == document[None, :])
    if window is not None:
        visible &= step < window

    chosen = dict(options or {})
    if name is None:
        assert config.model_type != "llama" or config.rope_parameters["rope_type"] == "default"
        assert not chosen, "options need a name"
        name = NATIVE[config.model_type]
    own_length = getattr(config, "max_position_embeddings", None)
    scale = query_scales(chosen, places, own_length, rotation=name in (*oracle.ROTATIONS, *DISTANCES))
    extra: dict[str, Any] = {"query_scale": scale}
    if name in oracle.ROTATIONS:
        extra["rotations"] = rotations(config, name, places, **chosen)
    elif name in DISTANCES:
        extra["distances"] = distances(config, name, places, visible, **chosen)
    elif name == "alibi":
        extra["slopes"] = oracle.slopes(config.num_attention_heads, **chosen)
    elif name == "sinusoidal":
        extra["embedding"] = sinusoidal_rows(state, config, places, **chosen)
    elif name == "learned":
        extra["embedding"] = learned_rows(state, config, places, **chosen)
    elif name in oracle_biases.BIASES:
        extra["bias"] = oracle_biases.score_bias(name, places.tolist(), config.num_attention_heads, **chosen)
    else:
        assert name == "nope" and not chosen, f"no oracle for {name!r} with {chosen}"
    return FORWARD[config.model_type](state, config, ids, Seams(places, visible, **extra))
