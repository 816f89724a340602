"""The numbers in effect on a patched model against its encoding's formula, in double precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .encodings import Alibi, Bias, Distance, Encoding, Learned, LogScaled, Rotation, Segmented, Sinusoidal
from .modules import AddVectors, SinusoidalEmbedding
from .offload import execution_device, held
from .patches import Patch
from .positions import Call, DescribeCall
from .reference_bias import check_bias
from .views import Table

PHASE_LIMIT = 1e-2  # radians at the furthest position checked
FURTHEST = 32_768
SCALE_LIMIT = 1e-6
Row = tuple[str, bool, float | None, float | None, str]
NAME = "numbers = formula"


def check_numbers(backbone: Any, encoding: Encoding, patch: Patch) -> Row:
    """(name, passed, figure, limit, detail) of the tables that a call of this backbone would use."""
    positions = torch.tensor([[0, 1, 2, 777, FURTHEST - 1]])
    if isinstance(encoding, LogScaled) and encoding.logn:
        worst = query_scale_error(backbone, encoding, positions)
        if worst > SCALE_LIMIT or encoding.seam == "none":
            return NAME, worst <= SCALE_LIMIT, worst, SCALE_LIMIT, "relative error of what a query is multiplied with"
    if isinstance(encoding, Distance):
        worst = max(pair_errors(backbone, encoding, positions, patch))
        detail = f"largest error of a pair's phase up to position {FURTHEST - 1}, radians"
        return NAME, worst <= PHASE_LIMIT, worst, PHASE_LIMIT, detail
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
        if type(encoding).slopes is not Alibi.slopes:
            finite = bool(call.slopes.isfinite().all())
            return NAME, finite, None, None, f"{heads} slopes with no reference here: all are finite"
        wanted = reference_slopes(heads, encoding.alibi_bias_max or 8) * (encoding.scale or 1) / encoding.factor
        worst = float((call.slopes.cpu().double() / wanted - 1).abs().max())
        return NAME, worst < 1e-6, worst, 1e-6, f"relative error of {heads} slopes"
    if isinstance(encoding, Bias):
        return check_bias(backbone, encoding, describe(backbone, positions).both_ways)
    if isinstance(encoding, Learned):
        table = held(patch.table(backbone))
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


def query_scale_error(backbone: Any, encoding: LogScaled, positions: Tensor) -> float:
    """The largest relative error of the factor on the queries at `positions` (1, n)."""
    found = describe(backbone, positions).query_scale
    if found is None:
        return math.inf
    wanted = [max(1.0, math.log(p + 1) / math.log(encoding.length)) for p in positions[0].tolist()]
    return float((found[0].cpu().double() / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max())


def added_vectors(backbone: Any, positions: Tensor, patch: Patch) -> Tensor | None:
    """What is added at `positions` (n,), (n, dim): by the backbone's own table, by a layer's hook, or None."""
    table = patch.table(backbone)
    if isinstance(table, SinusoidalEmbedding):
        return SinusoidalEmbedding.forward(table, (positions + table.offset).to(execution_device(table)))
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


def pair_errors(backbone: Any, encoding: Distance, positions: Tensor, patch: Patch) -> list[float]:
    """The largest errors of the phases by which pairs are turned apart, one a view, and of those that keys wait with.

    Where a host turns early, both of a pair are turned already, and a view turns them by what is left.
    """
    call = describe(backbone, positions)
    assert call.views is not None
    seen, found = call.views, []
    distance = encoding.distance(positions, positions, seen.both_ways)[0]
    tables = patch.tables(backbone, positions) if encoding.stores_turned else None
    if tables is None and call.cos is not None and call.sin is not None:
        tables = call.cos.chunk(2, -1)[0], call.sin.chunk(2, -1)[0]
    if tables is not None:
        waiting = encoding.stored(positions)
        inv_freq = encoding.inv_freq(2 * tables[0].shape[-1])[0].double()
        found.append(phase_error(*tables, inv_freq, 1.0, waiting))
        distance = distance - (waiting[0].double()[:, None] - waiting[0].double())
    gap = (seen.query_places[..., None] - seen.key_places[:, None])[0]
    for view in {part.view for block in seen.blocks for part in block.parts}:
        low, high = seen.bounds[view]
        ruled = (gap >= low) & (gap < high) & ((gap >= 0) | seen.both_ways)
        query, key_table = unit(seen.queries[view]), seen.key_of[view]
        key = torch.ones_like(query) if key_table is None else unit(seen.keys[key_table])
        angle = distance[..., None] * encoding.inv_freq(2 * query.shape[-1])[0].double()
        off = query[:, None] * key[None].conj() - torch.polar(torch.ones_like(angle), angle)
        found.append(float(off.abs()[ruled].max()) if bool(ruled.any()) else 0.0)
    return found


def unit(table: Table) -> Tensor:
    """The phases (slots, d/2) that a table of one row turns by, as complex numbers in double."""
    half = table.cos.shape[-1] // 2
    return torch.complex(table.cos[0, :, :half].cpu().double(), table.sin[0, :, :half].cpu().double())


def reference_slopes(heads: int, bias_max: float) -> Tensor:
    """ALiBi's slopes from the definition, in double: the power of two below, then every other one of twice that."""

    def power(n: int) -> list[float]:
        return [2.0 ** (-bias_max * (h + 1) / n) for h in range(n)]

    below = 1 << (heads.bit_length() - 1)
    return torch.tensor((power(below) + power(2 * below)[::2])[:heads], dtype=torch.float64)
