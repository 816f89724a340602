"""The numbers in effect on a patched model against its encoding's formula, in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .encodings import Alibi, Encoding, Learned, Rotation, Segmented, Sinusoidal
from .modules import AddVectors, SinusoidalEmbedding
from .offload import execution_device, held
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
    at = positions.clamp(max=encoding.length - 1) if isinstance(encoding, Segmented) else positions
    late = isinstance(encoding, Segmented) and encoding.schedule == "segments"
    found = None if late else patch.tables(backbone, at)
    if found is not None:
        inv_freq, scaling = encoding.inv_freq(2 * found[0].shape[-1])
        return [(*found, inv_freq.double(), scaling, at)]
    call = describe(backbone, positions)
    if call.cos is not None and call.sin is not None:
        inv_freq, scaling = encoding.inv_freq(call.cos.shape[-1])
        return [(call.cos, call.sin, inv_freq.double(), scaling, positions)]
    assert isinstance(encoding, Segmented)
    result = []
    for turn, segment in zip(call.turns, encoding.segment(positions).unique().tolist()):
        inv_freq, scaling = encoding.segment_inv_freq(turn.cos.shape[-1], segment)
        result.append((turn.cos, turn.sin, inv_freq.double(), scaling, positions))
    return result


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
