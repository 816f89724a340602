"""What the oracle puts into the three seams of the hosts of `other_oracles`, by their configs and weights alone."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import oracle_tables
from numpy.typing import NDArray
from oracle import Array, Rotation
from oracle_distance import Distances
from oracle_layers import State, linear

WORDS = {
    "mpt": "transformer.wte",
    "opt": "model.decoder.embed_tokens",
    "falcon": "transformer.word_embeddings",
    "gptj": "transformer.wte",
    "openai-gpt": "transformer.tokens_embed",
    "bert": "bert.embeddings.word_embeddings",
    "roberta": "roberta.embeddings.word_embeddings",
}
# table, and the row of position 0
POSITIONS: dict[str, tuple[str, Callable[[Any], int]]] = {
    "opt": ("model.decoder.embed_positions", lambda config: 2),
    "openai-gpt": ("transformer.positions_embed", lambda config: 0),
    "bert": ("bert.embeddings.position_embeddings", lambda config: 0),
    "roberta": ("roberta.embeddings.position_embeddings", lambda config: config.pad_token_id + 1),
}


def rms(state: State, config: Any) -> float:
    """Root mean square of what positions are added to."""
    words = state[f"{WORDS[config.model_type]}.weight"]
    if "model.decoder.project_in.weight" in state:
        words = linear(words, state, "model.decoder.project_in")
    return math.sqrt(np.mean(words**2))


def sinusoids(
    state: State,
    config: Any,
    at: NDArray[Any],
    *,
    base: float = 10000,
    layout: Any = "interleaved",
    scale: Any = "auto",
) -> Array:
    factor = rms(state, config) * math.sqrt(2) if scale == "auto" else float(scale)
    return factor * np.stack([oracle.sinusoid(int(p), config.hidden_size, base, layout) for p in at])


def learned(
    state: State, config: Any, at: NDArray[Any], *, resize: Any = None, factor: Any = None, **fresh: Any
) -> Array:
    if fresh or config.model_type not in POSITIONS:
        return sinusoids(state, config, at)
    name, first = POSITIONS[config.model_type]
    table = state[f"{name}.weight"][first(config) :]
    return table[at] if resize is None else oracle_tables.resize(table, resize, int(at.max()) + 1, factor)[at]


def slopes(config: Any, factor: float = 1) -> Array:
    """The host's own where it has some: MPT's may be steeper, Falcon's are divided with the scores."""
    count = config.num_attention_heads
    if config.model_type == "mpt":
        most, above = config.attn_config.alibi_bias_max, 2 ** math.ceil(math.log2(count))
        row = [2.0 ** (-most * h / above) for h in range(1, above + 1)]
        row = row if above == count else (row[1::2] + row[::2])[:count]
        return np.array(row) / factor
    return oracle.slopes(count, factor) / (math.sqrt(config.head_dim) if getattr(config, "alibi", False) else 1)


def own_length(config: Any) -> int:
    """The length that a config states, in tokens."""
    length = getattr(config, "max_seq_len", None) or config.max_position_embeddings
    return int(length - (config.pad_token_id + 1) if config.model_type == "roberta" else length)


def rotary_sizes(config: Any, rope_theta: Any = None, original_max_position_embeddings: Any = None) -> dict[str, Any]:
    dim = getattr(config, "rotary_dim", None) or config.hidden_size // config.num_attention_heads
    return {"dim": dim, "theta": rope_theta or 1e4, "length": original_max_position_embeddings or own_length(config)}


def rotations(
    config: Any,
    name: str,
    at: NDArray[Any],
    *,
    rope_theta: Any = None,
    original_max_position_embeddings: Any = None,
    **options: Any,
) -> list[Rotation]:
    sizes = rotary_sizes(config, rope_theta, original_max_position_embeddings)
    return [oracle.rotation(name, int(t), **sizes, **options) for t in at]


def distances(
    config: Any,
    name: str,
    at: NDArray[Any],
    visible: NDArray[np.bool_],
    both_ways: bool,
    *,
    rope_theta: Any = None,
    original_max_position_embeddings: Any = None,
    **options: Any,
) -> Distances:
    sizes = rotary_sizes(config, rope_theta, original_max_position_embeddings)
    return Distances(name, at, visible, both_ways=both_ways, **sizes, **options)
