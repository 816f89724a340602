"""The numbers in effect on a patched model against its encoding's formula, in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .encodings import Alibi, Encoding, Learned, Rotation, Segmented, Sinusoidal
from .modules import AddVectors, SinusoidalEmbedding
from .patches import Patch
from .positions import Call, DescribeCall

PHASE_LIMIT = 1e-2  # radians at the furthest position checked
FURTHEST = 32_768
Row = tuple[str, bool, float | None, float | None, str]
NAME = "numbers = formula"


def check_numbers(backbone: Any, encoding: Encoding, patch: Patch) -> Row:
    """(name, passed, figure, limit, detail) of the tables that a call of this backbone would use."""
    positions = torch.tensor([[0, 1, 2, 777, FURTHEST - 1]])
    if isinstance(encoding, Rotation):
        worst = max(phase_error(*pair) for pair in tables(backbone, encoding, positions, patch))
        return (
            NAME,
            worst <= PHASE_LIMIT,
            worst,
            PHASE_LIMIT,
            f"largest error of a phase up to position {FURTHEST - 1}, radians",
        )
    if isinstance(encoding, Alibi):
        call = describe(backbone, positions)
        assert call.slopes is not None
        heads = len(call.slopes)
        wanted = reference_slopes(heads, encoding.alibi_bias_max or 8) * (encoding.scale or 1) / encoding.factor
        worst = float((call.slopes.cpu().double() / wanted - 1).abs().max())
        return NAME, worst < 1e-6, worst, 1e-6, f"relative error of {heads} slopes"
    if isinstance(encoding, Learned):
        table = patch.table(backbone).weight
        return NAME, bool(table.isfinite().all()), None, None, f"a trained table of {len(table)} rows, all finite"
    if isinstance(encoding, Sinusoidal):
        found = added_vectors(backbone, positions[0], patch)
        if found is None:
            return NAME, False, None, None, "no vector is added"
        wanted = reference_sinusoid(positions[0], found.shape[-1], encoding)
        worst = float((found.cpu().double() / float(encoding.scale) - wanted).abs().max())
        limit = 1e-5 if torch.finfo(found.dtype).bits > 16 else 2.0**-7
        return NAME, worst <= limit, worst, limit, "largest error of an added vector, as a share of the scale"
    return NAME, True, None, None, "no numbers: no positions"


def added_vectors(backbone: Any, positions: Tensor, patch: Patch) -> Tensor | None:
    """What is added at `positions` (n,), (n, dim): by the backbone's own table, by a layer's hook, or None."""
    table = patch.table(backbone)
    if isinstance(table, SinusoidalEmbedding):
        return SinusoidalEmbedding.forward(table, (positions + table.offset).to(table.weight.device))
    hooks = (hook for module in backbone.modules() for hook in module._forward_pre_hooks.values())
    adding = next((hook for hook in hooks if isinstance(hook, AddVectors)), None)
    return None if adding is None else adding.vectors(positions)


def reference_sinusoid(positions: Tensor, dim: int, encoding: Sinusoidal) -> Tensor:
    """Sines and cosines by the definition, one channel after the other, (n, dim) in double; without the scale."""
    columns = []
    for channel in range(dim):
        if encoding.layout == "interleaved":
            cosine, exponent = channel % 2, 2 * (channel // 2) / dim
        else:
            cosine, exponent = channel // (dim // 2), channel % (dim // 2) / (dim // 2 - 1)
        angle = positions.double() / encoding.base**exponent
        columns.append(angle.cos() if cosine else angle.sin())
    return torch.stack(columns, dim=-1)


def describe(backbone: Any, positions: Tensor) -> Call:
    """The `Call` that the backbone's own hook makes for these positions."""
    hook = next(h for h in backbone._forward_pre_hooks.values() if isinstance(h, DescribeCall))
    return hook.describe({"input_ids": positions, "position_ids": positions})


def tables(
    backbone: Any, encoding: Rotation, positions: Tensor, patch: Patch
) -> list[tuple[Tensor, Tensor, Tensor, float, Tensor]]:
    """(cos, sin, frequencies in double, factor, positions) of each set that a call uses; first half of the channels."""
    if isinstance(encoding, Segmented) and encoding.schedule == "segments":
        return [segment_table(backbone, encoding, at, patch) for at in by_segment(encoding, positions)]
    at = positions.clamp(max=encoding.length - 1) if isinstance(encoding, Segmented) else positions
    cos, sin = early_tables(backbone, at, patch)
    inv_freq, scaling = encoding.inv_freq(2 * cos.shape[-1])
    return [(cos, sin, inv_freq.double(), scaling, at)]


def early_tables(backbone: Any, positions: Tensor, patch: Patch) -> tuple[Tensor, Tensor]:
    """(cos, sin) of what is turned before keys are cached, by the host or by us; one column a pair."""
    found = patch.tables(backbone, positions)
    if found is not None:
        return found
    call = describe(backbone, positions)
    assert call.cos is not None and call.sin is not None
    half = call.cos.shape[-1] // 2
    return call.cos[..., :half], call.sin[..., :half]


def by_segment(encoding: Segmented, positions: Tensor) -> list[Tensor]:
    """The positions (1, n) of each segment that they stand in."""
    segments = encoding.segment(positions)
    return [positions[segments == segment][None] for segment in segments.unique().tolist()]


def segment_table(
    backbone: Any, encoding: Segmented, positions: Tensor, patch: Patch
) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """`tables` of positions in one segment: what is turned early and what is turned late, one after the other."""
    cos, sin = (table.cpu() for table in early_tables(backbone, positions, patch))
    half = cos.shape[-1]
    for turn in describe(backbone, positions).turns:
        assert turn.tables is not None
        late_cos, late_sin = (table[..., :half] for table in turn.tables.between(0, turn.tables.keys, cos.device))
        cos, sin = cos * late_cos - sin * late_sin, sin * late_cos + cos * late_sin
    segment = int(encoding.segment(positions).flatten()[0])
    inv_freq, scaling = encoding.segment_inv_freq(2 * half, segment)
    return cos, sin, inv_freq.double(), scaling, positions


def phase_error(cos: Tensor, sin: Tensor, inv_freq: Tensor, scaling: float, positions: Tensor) -> float:
    """Largest distance on the unit circle between the phases in a table and position × frequency, radians.

    A factor on cos and sin that is off shows as such a distance too.
    """
    half = inv_freq.shape[0]
    angle = positions[..., None].double() * inv_freq
    found = torch.complex(cos[..., :half].cpu().double(), sin[..., :half].cpu().double()) / scaling
    return float((found - torch.polar(torch.ones_like(angle), angle)).abs().max())


def reference_slopes(heads: int, bias_max: float) -> Tensor:
    """ALiBi's slopes from the definition, in double: the power of two below, then every other one of twice that."""

    def power(n: int) -> list[float]:
        return [2.0 ** (-bias_max * (h + 1) / n) for h in range(n)]

    below = 1 << (heads.bit_length() - 1)
    return torch.tensor((power(below) + power(2 * below)[::2])[:heads], dtype=torch.float64)
