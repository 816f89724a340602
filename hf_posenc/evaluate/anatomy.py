"""What the position encoding in effect on a model does: its wavelengths, and how a score falls with distance."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.encodings import Alibi, Bias, Distance, Encoding, Learned, Rope, Rotation, Segmented, Sinusoidal
from hf_posenc.errors import OptionError, UnsupportedError
from hf_posenc.evaluate.limits import encoding_of
from hf_posenc.patches import Patch
from hf_posenc.patching import find_backbone

POINTS = 200
ROWS = 1024
"""Rows of a learned table that are compared with others, evenly spaced: a mean over more says nothing new."""

ALL = "all positions"
SIMILARITY, SCORE = "similarity", "score"
SEEN_AT = "mean over pairs j of cos(ω_j·d), d the distance at which Δ is seen, for a query at position"
TURNED = "mean over pairs j of cos(ω_j·Δ), times the square of the factor on cos and sin"

Frequencies = tuple[Tensor, float]


def describe(model: nn.Module, longest: int) -> dict[str, Any]:
    """The encoding in effect on `model`, as JSON values; `longest` is the longest length that is measured, in tokens.

    seam: `embedding`, `rotation`, `score`, `none` or `unknown`; kind: the encoding's name; native: whether it is the
    host's own, without a patch.
    wavelengths: {positions: [2π/ω_j in tokens, one a pair]} of a rotation, one entry a segment that `longest` reaches;
    attention_factor: {positions: the factor on cos and sin}.
    curve: {distance: [Δ in tokens], mean or median: [...], low, high: [...], unit, what}. unit `similarity`: 1 for a
    token and itself (but for the square of the factor); unit `score`: a number added to the attention score.

    Raises `OptionError` for a length below 1.
    """
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise OptionError(f"longest must be a whole number of tokens >= 1; got {longest!r}")
    encoding = encoding_of(model)
    if encoding is None:
        return _native(model, longest)
    return {"seam": encoding.seam, "kind": encoding.name, "native": False, **_patched(model, encoding, longest)}


def distances(longest: int, points: int = POINTS) -> list[int]:
    """About `points` whole distances from 0 to `longest`, denser where they are small."""
    return [0, *sorted({round(longest ** (i / (points - 1))) for i in range(points)})]


def _patched(model: nn.Module, encoding: Encoding, longest: int) -> dict[str, Any]:
    patch, backbone = find_backbone(model)
    geometry = patch.geometry(backbone)
    if isinstance(encoding, Segmented) and encoding.schedule == "whole" and hasattr(patch, "numbers"):
        return _rotation({f"a call of {longest}": _host_frequencies(patch, backbone, longest)}, longest)
    if isinstance(encoding, Segmented):
        segments = reached(encoding, longest)
        found = {name: encoding.segment_inv_freq(geometry.rotary_dim, k) for k, name in segments.items()}
        return _rotation(found, longest)
    if isinstance(encoding, Distance):
        made = _rotation({ALL: encoding.inv_freq(geometry.rotary_dim)}, longest)
        return {**made, "curve": _seen(encoding, geometry.rotary_dim, longest)}
    if isinstance(encoding, Rotation):
        return _rotation({ALL: encoding.inv_freq(geometry.rotary_dim)}, longest)
    if isinstance(encoding, Alibi):
        return {"curve": _bias(encoding.slopes(geometry.num_heads), longest)}
    if isinstance(encoding, Bias):
        return {"curve": _bias_curve(backbone.posenc, longest)}
    if isinstance(encoding, Sinusoidal):
        at = torch.tensor(distances(longest))
        vectors = encoding.vectors(at, geometry.hidden_size).double()
        likeness = nn.functional.cosine_similarity(vectors[:1], vectors, dim=-1)
        return {"curve": _curve(at.tolist(), likeness, "normalised dot product of the vectors of i and i + Δ")}
    return {"curve": _table_curve(patch, backbone, longest)} if isinstance(encoding, Learned) else {}


def reached(encoding: Segmented, longest: int) -> dict[int, str]:
    """The segments of the positions below `longest`, by number: the positions in each, in words."""
    numbers, counts = encoding.segment(torch.arange(longest)).unique_consecutive(return_counts=True)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends]
    return {k: f"{start} to {end - 1}" for k, start, end in zip(numbers.tolist(), starts, ends)}


def _rotation(frequencies: Mapping[str, Frequencies], longest: int) -> dict[str, Any]:
    """Spectra of all segments, and the decay that a query in the last of them sees."""
    inv_freq, factor = list(frequencies.values())[-1]
    at = distances(longest)
    angles = torch.tensor(at, dtype=torch.float64)[:, None] * inv_freq.double().cpu()
    curve = _curve(at, angles.cos().mean(-1) * factor**2, TURNED)
    return {
        "wavelengths": {name: _wavelengths(omega) for name, (omega, _) in frequencies.items()},
        "attention_factor": {name: float(a) for name, (_, a) in frequencies.items()},
        "curve": curve,
    }


def _seen(encoding: Distance, dim: int, longest: int) -> dict[str, Any]:
    """The decay that the query after `longest` tokens sees, of the distances that the encoding shows it."""
    at, query = distances(longest), torch.tensor([longest])
    seen = encoding.distance(query, longest - torch.tensor(at))[0]
    waves = (seen[:, None] * encoding.inv_freq(dim)[0].double()).cos()
    decay, factor = encoding.decay(dim), encoding.query_factor(query)
    if decay is not None:
        waves = waves * (-decay.double() * torch.tensor(at)[:, None]).exp()
    times = "" if factor is None else ", times what that query is multiplied with"
    what = f"{SEEN_AT} {longest}{times}"
    return _curve(at, waves.mean(-1) * (1.0 if factor is None else float(factor)), what)


def _wavelengths(inv_freq: Tensor) -> list[float]:
    """2π/ω_j in tokens; a pair that does not turn (ω = 0) has none and is left out."""
    return [2 * math.pi / omega for omega in inv_freq.double().tolist() if omega > 0]


def _curve(at: list[int], values: Tensor, what: str) -> dict[str, Any]:
    return {"distance": at, "mean": values.tolist(), "unit": SIMILARITY, "what": what}


def _bias(slopes: Tensor, longest: int) -> dict[str, Any]:
    """−m_h·Δ for the steepest, the median and the flattest head."""
    at, m = distances(longest), slopes.double()
    lines = {"low": m.max(), "median": m.quantile(0.5), "high": m.min()}
    values = {name: [0.0 - float(slope) * distance for distance in at] for name, slope in lines.items()}
    return {"distance": at, **values, "unit": SCORE, "what": f"−m·Δ: steepest, median and flattest of {len(m)} heads"}


@torch.no_grad()
def _bias_curve(module: Any, longest: int) -> dict[str, Any]:
    """The lowest, the median and the highest of all heads, for the last query of a text of `longest` tokens."""
    at = [distance for distance in distances(longest) if distance < longest]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    last = torch.tensor([[longest - 1]], device=device)
    values = module(last, last - torch.tensor([at], device=device))[0, :, 0].double().cpu()
    lines = {"low": values.amin(0), "median": values.quantile(0.5, dim=0), "high": values.amax(0)}
    what = (
        f"what the query at position {longest - 1} adds to a score: lowest, median and highest of {len(values)} heads"
    )
    return {"distance": at, **{name: line.tolist() for name, line in lines.items()}, "unit": SCORE, "what": what}


def _table_curve(patch: Patch, backbone: Any, longest: int) -> dict[str, Any]:
    """Mean over i of the cosine of the rows of positions i and i + Δ, as far as the table in effect goes."""
    before = patch.rows_before(backbone.config) if patch.has_table else 0
    rows = nn.functional.normalize(patch.table(backbone).weight.detach()[before:].double().cpu(), dim=-1)
    at = [distance for distance in distances(longest) if distance < len(rows)]
    means = []
    for distance in at:
        count = len(rows) - distance
        i = torch.linspace(0, count - 1, min(count, ROWS), dtype=torch.float64).round().long()
        means.append((rows[i] * rows[i + distance]).sum(-1).mean())
    what = f"mean cosine of the rows of i and i + Δ, of a trained table of {len(rows)} rows"
    return _curve(at, torch.stack(means), what)


def _native(model: nn.Module, longest: int) -> dict[str, Any]:
    """The host's own positions."""
    try:
        patch, backbone = find_backbone(model)
    except UnsupportedError:
        return _unknown(model, longest)
    if patch.native == "learned":
        curve = _table_curve(patch, backbone, longest)
        return {"seam": "embedding", "kind": "learned", "native": True, "curve": curve}
    geometry = patch.geometry(backbone)
    if patch.native == "alibi" or getattr(backbone.config, "alibi", False):
        alibi = Alibi() if patch.owns(backbone, Alibi()) else patch.complete(Alibi(), backbone)
        assert isinstance(alibi, Alibi)
        curve = _bias(alibi.slopes(geometry.num_heads), longest)
        return {"seam": "score", "kind": "alibi", "native": True, "curve": curve}
    if hasattr(patch, "numbers"):
        found, kind = _host_frequencies(patch, backbone, longest), getattr(backbone.rotary_emb, "rope_type", "default")
    else:
        rope = patch.complete(Rope(), backbone)
        assert isinstance(rope, Rope)
        found, kind = rope.inv_freq(geometry.rotary_dim), "default"
    name = kind if isinstance(kind, str) and kind != "default" else ""
    return {
        "seam": "rotation",
        "kind": f"rope, {name}" if name else "rope",
        "native": True,
        **_rotation({ALL: found}, longest),
    }


def _unknown(model: nn.Module, longest: int) -> dict[str, Any]:
    """A host without a patch: the frequencies of its rotary module, where it has one of the usual kind."""
    for module in model.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, Tensor) and inv_freq.ndim == 1 and not inv_freq.is_meta:
            found = {ALL: (inv_freq.detach(), float(getattr(module, "attention_scaling", 1.0)))}
            return {"seam": "rotation", "kind": "rope", "native": True, **_rotation(found, longest)}
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return {"seam": "unknown", "kind": kind, "native": True}


def _host_frequencies(patch: Any, backbone: Any, longest: int) -> Frequencies:
    """Frequencies and factor that a host's rotary module uses for a call of `longest` tokens.

    Some types choose them by the length of the call, and keep them: a copy is asked, the model's own is left alone.
    """
    stand_in = SimpleNamespace(rotary_emb=copy.deepcopy(backbone.rotary_emb), config=backbone.config)
    patch.tables(stand_in, torch.tensor([[longest - 1]]))
    inv_freq, factor = patch.numbers(stand_in)
    return inv_freq.detach(), factor
