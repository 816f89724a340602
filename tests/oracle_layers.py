"""What the dense float64 forward passes are made of: the three seams, the maths of layers, attention over one row."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from numpy.typing import NDArray
from oracle import Array, Rotation
from oracle_distance import Distances

State = Mapping[str, Array]


@dataclass(frozen=True)
class Seams:
    """What the encoding does: a table row a token, a rotation a query or a pair, a slope a head; each may be absent."""

    positions: NDArray[np.int64]
    visible: NDArray[np.bool_]
    embedding: Array | None = None
    rotations: list[Rotation] | None = None
    slopes: Array | None = None
    query_scale: Array | None = None
    distances: Distances | None = None
    bias: Array | None = None  # (heads, n, n)


def query_scales(options: dict[str, Any], positions: Any, length: int | None, *, rotation: bool) -> Array | None:
    """What each query is multiplied with; takes out of `options` what nobody but log-n scaling asks for."""
    if not options.pop("logn", False):
        return None
    length = options.get("original_max_position_embeddings") or length
    if not rotation:
        options.pop("original_max_position_embeddings", None)
    assert length is not None
    return np.array([oracle.query_scale(int(t), length) for t in positions])


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def layer_norm(x: Array, state: State, prefix: str, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return normed * state[f"{prefix}.weight"] + state[f"{prefix}.bias"]


def rms_norm(x: Array, state: State, prefix: str, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * state[f"{prefix}.weight"]


def linear(x: Array, state: State, prefix: str) -> Array:
    """torch.nn.Linear, weight (out, in), with or without a bias."""
    return x @ state[f"{prefix}.weight"].T + state.get(f"{prefix}.bias", np.zeros(1))


def conv1d(x: Array, state: State, prefix: str) -> Array:
    """GPT-2's Conv1D, weight (in, out)."""
    return x @ state[f"{prefix}.weight"] + state[f"{prefix}.bias"]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_new(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def bloom_gelu(x: Array) -> Array:
    """BLOOM's own, with sqrt(2/pi) cut to eight digits."""
    return 0.5 * x * (1 + np.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def heads(x: Array, count: int) -> Array:
    """(n, count * d) -> (count, n, d)"""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def turn(x: Array, positions: NDArray[np.int64], inv_freq: Array, scale: float) -> Array:
    """`oracle.rotate` for all tokens and heads at once: (heads, n, d), half-split pairs."""
    angles = positions[:, None] * inv_freq
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    first, second = x[..., : len(inv_freq)], x[..., len(inv_freq) :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def same_rotation(rotations: list[Rotation]) -> list[tuple[list[int], Rotation]]:
    """The queries which share a rotation, together: one matrix product for each, whatever their order."""
    groups: dict[tuple[bytes, float], tuple[list[int], Rotation]] = {}
    for query, (inv_freq, scale) in enumerate(rotations):
        groups.setdefault((inv_freq.tobytes(), scale), ([], (inv_freq, scale)))[0].append(query)
    return list(groups.values())


def attend(q: Array, k: Array, v: Array, seams: Seams, scaling: float) -> Array:
    """(heads, n, d), keys and values of (kv heads, n, d) -> (n, heads * d)."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1)
    for queries, (inv_freq, scale) in same_rotation(seams.rotations or []):
        turned = turn(q[:, queries], seams.positions[queries], inv_freq, scale)
        keys = turn(k, seams.positions, inv_freq, scale)
        scores[:, queries] = turned @ keys.transpose(0, 2, 1)
    if seams.distances is not None:
        scores = seams.distances.scores(q, k, turn)
    scores *= scaling
    if seams.query_scale is not None:
        scores *= seams.query_scale[:, None]
    if seams.slopes is not None:
        for i, position in enumerate(seams.positions):
            scores[:, i] += oracle.alibi(position, seams.positions, seams.slopes[:, None])
    if seams.bias is not None:
        scores = scores + seams.bias
    scores[:, ~seams.visible] = -np.inf
    out = softmax(scores) @ v
    return out.transpose(1, 0, 2).reshape(q.shape[1], -1)


def enter(x: Array, seams: Seams) -> Array:
    return x if seams.embedding is None else x + seams.embedding
