"""Logits of any host with an attention interface under any of the oracle's encodings: its own surroundings, our maths.

The stock host runs as it is, but its rotary module gives the identity rotation (cos = 1, sin = 0, in its own layout),
and a test-only attention function receives its raw queries, keys and values. There, in float64, `oracle`'s
frequencies turn the right pairs of channels, and bias, window, soft-cap, sinks and a dense softmax follow. What is
added to the embedding is added in front of the first layer. Nothing here comes from the package.

`FACTS` states each architecture's layout once more, read from its modelling code; a host needs a row only where it
differs from Llama. One row without padding.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import oracle
import oracle_biases
import torch
from oracle import Rotation
from oracle_distance import DISTANCES, Distances
from oracle_layers import query_scales
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "oracle_eager"


@dataclass(frozen=True)
class Facts:
    """Where a host keeps its positions.

    `pairs`: which channels turn together, as queries and keys reach the attention function. `layers` and `rotary`:
    paths below the backbone. `start`: the first turned channel. `turned`: whether a layer has positions at all;
    `local_theta`: the base of a layer's own plain rotation, which an encoding of the rotation seam leaves alone.
    `theta`, `width`: base and turned channels, or how to read them from the config.
    """

    pairs: Literal["halves", "interleaved"] = "halves"
    layers: str = "layers"
    rotary: str = "rotary_emb"
    start: Callable[[Any], int] = lambda config: 0
    turned: Callable[[Any, int], bool] = lambda config, layer: True
    local_theta: Callable[[Any, int], float | None] = lambda config, layer: None
    theta: Callable[[Any], float] = lambda config: config.rope_parameters["rope_theta"]
    width: Callable[[Any], int] = lambda config: int(
        (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        * config.rope_parameters.get("partial_rotary_factor", 1.0)
    )
    length: Callable[[Any], int | None] = lambda config: config.max_position_embeddings


def _local_theta(config: Any, layer: int) -> float | None:
    kind = config.layer_types[layer]
    return config.rope_parameters[kind]["rope_theta"] if kind == "sliding_attention" else None


_MLA: dict[str, Any] = {
    "start": lambda config: config.qk_nope_head_dim,
    "width": lambda config: config.qk_rope_head_dim,
}
FACTS: dict[str, Facts] = {
    "glm": Facts(pairs="interleaved"),
    "glm4": Facts(pairs="interleaved"),
    "cohere": Facts(pairs="interleaved"),
    "deepseek_v2": Facts(pairs="interleaved", **_MLA),
    "deepseek_v3": Facts(**_MLA),  # it takes interleaved pairs apart into halves on the way
    "smollm3": Facts(turned=lambda config, layer: bool(config.no_rope_layers[layer])),
    "gemma3_text": Facts(
        local_theta=_local_theta,
        theta=lambda config: config.rope_parameters["full_attention"]["rope_theta"],
        width=lambda config: config.head_dim,
    ),
}


@dataclass
class Plan:
    """What the attention function is to do in this call; `rotations` one a query, for the layers that turn."""

    facts: Facts
    config: Any
    positions: Tensor
    visible: Tensor
    rotations: list[Rotation] | None = None
    slopes: Tensor | None = None
    query_scale: Tensor | None = None
    distances: Distances | None = None
    bias: Tensor | None = None  # (heads, n, n)


_plan: list[Plan] = []  # the one in force


def turn(x: Tensor, positions: Tensor, rotation: Rotation, facts: Facts, start: int) -> Tensor:
    """x (heads, n, d) float64 with its pairs of channels from `start` on turned at `positions` (n,)."""
    inv_freq, scale = torch.from_numpy(rotation[0]), rotation[1]
    half = len(inv_freq)
    first = start + (2 * torch.arange(half) if facts.pairs == "interleaved" else torch.arange(half))
    second = first + (1 if facts.pairs == "interleaved" else half)
    angles = positions.double()[:, None] * inv_freq
    cos, sin = torch.as_tensor(scale) * angles.cos(), torch.as_tensor(scale) * angles.sin()
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def scores_of(query: Tensor, key: Tensor, rotations: list[Rotation] | None, plan: Plan) -> Tensor:
    """(heads, n, n): each query and all of its keys turned by that query's rotation."""
    if rotations is None:
        return query @ key.transpose(1, 2)
    groups: dict[tuple[bytes, float], list[int]] = {}
    for i, (inv_freq, scale) in enumerate(rotations):
        groups.setdefault((inv_freq.tobytes(), scale), []).append(i)
    scores = query.new_zeros(query.shape[0], query.shape[1], key.shape[1])
    start = plan.facts.start(plan.config)
    for queries in groups.values():
        rotation = rotations[queries[0]]
        turned = turn(query[:, queries], plan.positions[queries], rotation, plan.facts, start)
        scores[:, queries] = turned @ turn(key, plan.positions, rotation, plan.facts, start).transpose(1, 2)
    return scores


def is_reached(plan: Plan, layer: int) -> bool:
    """Whether the encoding acts in a layer: not where it has no positions, or local ones of its own that stay."""
    turning = plan.rotations is not None or plan.distances is not None
    local = turning and plan.facts.local_theta(plan.config, layer) is not None
    return plan.facts.turned(plan.config, layer) and not local


def distance_scores(query: Tensor, key: Tensor, plan: Plan) -> Tensor:
    """(heads, n, n): each pair turned apart by the distance that it sees."""
    assert plan.distances is not None
    scores = query.new_zeros(query.shape[0], query.shape[1], key.shape[1])
    for distance, rotation, rows, columns in plan.distances.groups():
        at = torch.full((len(rows),), distance, dtype=torch.float64)
        turned = turn(query[:, rows], at, rotation, plan.facts, plan.facts.start(plan.config))
        scores[:, rows, columns] = (turned * key[:, columns]).sum(-1)
    return scores * torch.from_numpy(plan.distances.factor)[:, None]


def layer_rotations(plan: Plan, layer: int) -> list[Rotation] | None:
    """The encoding's, the layer's own, or none."""
    theta = plan.facts.local_theta(plan.config, layer)
    if (plan.rotations is None and plan.distances is None) or not plan.facts.turned(plan.config, layer):
        return None
    if theta is not None:
        return [(oracle.frequencies(plan.facts.width(plan.config), theta), 1.0)] * len(plan.positions)
    return plan.rotations


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The whole of attention for one row, dense, in float64."""
    [plan] = _plan
    assert mask is None and query.shape[0] == 1 and query.shape[2] == key.shape[2] == len(plan.positions)
    q, k, v = (x[0].double() for x in (query, key, value))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan.distances is not None and is_reached(plan, module.layer_idx):
        scores = distance_scores(q, k, plan) * scaling
    else:
        scores = scores_of(q, k, layer_rotations(plan, module.layer_idx), plan) * scaling
    if plan.query_scale is not None and is_reached(plan, module.layer_idx):
        scores = scores * plan.query_scale[:, None]
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    if plan.slopes is not None and plan.facts.turned(plan.config, module.layer_idx):
        scores = scores - plan.slopes[:, None, None] * (plan.positions[:, None] - plan.positions[None, :])
    if plan.bias is not None and plan.facts.turned(plan.config, module.layer_idx):
        scores = scores + plan.bias
    visible = plan.visible
    if kwargs.get("sliding_window") is not None:
        order = torch.arange(len(plan.positions))
        visible = visible & (order[:, None] - order[None, :] < kwargs["sliding_window"])
    scores = scores.masked_fill(~visible, -math.inf)
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].double()[:, None, None].expand(-1, scores.shape[1], 1)
        out = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1] @ v
    else:
        out = torch.softmax(scores, dim=-1) @ v
    return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def identity(rotary: Any) -> None:
    """Make a host's rotary module give cos = 1 and sin = 0, or the complex 1, in its own shapes."""
    stock = rotary.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        if isinstance(found, Tensor):
            return torch.ones_like(found)
        return torch.ones_like(found[0]), torch.zeros_like(found[1])

    rotary.forward = forward


def find(backbone: Any, path: str) -> Any:
    for name in path.split("."):
        backbone = getattr(backbone, name)
    return backbone


def prepared(model: Any) -> tuple[Any, Any, Facts]:
    """A copy of a stock model with its own positional maths out of the way, its backbone, and the facts of it."""
    facts = FACTS.get(model.config.model_type, Facts())
    model = copy.deepcopy(model).eval()
    model.config._attn_implementation_internal = NAME
    backbone = model.base_model
    if facts.rotary:
        identity(find(backbone, facts.rotary))
    return model, backbone, facts


def first_layer_input(model: Any, layer: Any, ids: Tensor) -> Tensor:
    """What enters the first layer for these tokens."""
    seen: list[Tensor] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(look, with_kwargs=True)
    model(input_ids=ids, use_cache=False)
    handle.remove()
    return seen[0].double()


def added_rows(model: Any, layer: Any, name: str, positions: Tensor, options: dict[str, Any]) -> Tensor:
    """The vectors (n, width) that are added in front of the first layer; a fresh learned table is sinusoidal, too."""
    given = dict(options) if name == "sinusoidal" else {}
    scale = given.pop("scale", "auto")
    if scale == "auto":
        vocabulary = torch.arange(model.get_input_embeddings().weight.shape[0])[None]
        _plan[0] = Plan(_plan[0].facts, model.config, vocabulary[0], causal(vocabulary.shape[1]))
        scale = float(first_layer_input(model, layer, vocabulary).pow(2).mean().sqrt()) * math.sqrt(2)
    width = model.config.hidden_size
    return torch.from_numpy(np.stack([oracle.sinusoid(int(p), width, **given) for p in positions])) * scale


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


@torch.no_grad()
def host_logits(
    model: Any,
    name: str,
    options: dict[str, Any],
    ids: Tensor,
    positions: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> Tensor:
    """The logits (1, n, vocabulary) of one unpadded row, from a stock `model` under the named encoding.

    `positions` (default 0 .. n - 1) are what the encoding sees; a token sees the earlier ones of its document.
    """
    model, backbone, facts = prepared(model)
    config, n = model.config, ids.shape[1]
    at = torch.arange(n) if positions is None else torch.tensor(positions)
    document = torch.zeros(n) if documents is None else torch.tensor(documents)
    plan = Plan(facts, config, at, causal(n) & (document[:, None] == document[None, :]))
    given = dict(options)
    scale = query_scales(given, at, facts.length(config), rotation=name in (*oracle.ROTATIONS, *DISTANCES))
    plan.query_scale = None if scale is None else torch.from_numpy(scale)
    if name in oracle.ROTATIONS:
        theta = given.pop("rope_theta", None) or facts.theta(config)
        length = given.pop("original_max_position_embeddings", None) or facts.length(config)
        width = facts.width(config)
        plan.rotations = [oracle.rotation(name, int(t), dim=width, theta=theta, length=length, **given) for t in at]
    elif name in DISTANCES:
        sizes = {
            "theta": given.pop("rope_theta", None) or facts.theta(config),
            "length": given.pop("original_max_position_embeddings", None) or facts.length(config),
            "dim": facts.width(config),
        }
        plan.distances = Distances(name, at.numpy(), plan.visible.numpy(), **sizes, **given)
    elif name == "alibi":
        plan.slopes = torch.from_numpy(oracle.slopes(config.num_attention_heads, **given))
    elif name in oracle_biases.BIASES:
        plan.bias = torch.from_numpy(oracle_biases.score_bias(name, at.tolist(), config.num_attention_heads, **given))
    layer = find(backbone, facts.layers)[0]
    _plan[:] = [plan]
    try:
        if name in ("sinusoidal", "learned"):
            rows = added_rows(model, layer, name, at, options)

            def add(_: Any, args: Any, kwargs: Any) -> Any:
                hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
                return (hidden + rows.to(hidden), *rest), kwargs

            layer.register_forward_pre_hook(add, with_kwargs=True)
        _plan[:] = [plan]
        return model(input_ids=ids, position_ids=at[None], attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        _plan.clear()
