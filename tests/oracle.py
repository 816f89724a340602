"""The formulas of the encodings once more, in float64 and as literally as the papers state them.

The tests compare the package with this file, so it shares no code with the package and none with Transformers:
numpy and `math` alone, loops where a loop is clearer. Positions count from 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rotation = tuple[Array, float]


def frequencies(dim: int, theta: float) -> Array:
    """theta^(-2i/d) for the pairs i = 0 .. d/2 - 1 (Su et al. 2021, arXiv 2104.09864, section 3.2.2)."""
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def temperature(factor: float) -> float:
    """YaRN's 0.1 ln s + 1, to be multiplied to cos and sin (arXiv 2309.00071, equation 22: sqrt(1/t))."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def correction_dim(rotations: float, dim: int, theta: float, length: float) -> float:
    """The pair index whose wave turns `rotations` times within the pretrained length, not rounded."""
    return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(theta))


def correction_range(
    dim: int, theta: float, length: float, beta_fast: float = 32, beta_slow: float = 1, truncate: bool = True
) -> tuple[float, float]:
    """The pair indices between which YaRN blends; clamped to [0, d - 1], not to d/2 - 1."""
    low = correction_dim(beta_fast, dim, theta, length)
    high = correction_dim(beta_slow, dim, theta, length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return min(max(low, 0), dim - 1), min(max(high, 0), dim - 1)


def blended(
    dim: int, theta: float, length: float, factor: float, beta_fast: float, beta_slow: float, truncate: bool
) -> Array:
    """NTK-by-parts (arXiv 2309.00071, section 3.2, with the ramp linear in i as in the authors' code)."""
    low, high = correction_range(dim, theta, length, beta_fast, beta_slow, truncate)
    if low == high:
        high = low + 0.001
    plain = frequencies(dim, theta)
    out = []
    for i in range(dim // 2):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(plain[i] / factor * ramp + plain[i] * (1 - ramp))
    return np.array(out)


def segment_end(t: int, length: int) -> int:
    """The end n of the segment that holds t: L, 2L, 4L, ..."""
    end = length
    while t >= end:
        end *= 2
    return end


def rope(t: int, dim: int, theta: float, length: int) -> Rotation:
    """Plain RoPE (arXiv 2104.09864)."""
    return frequencies(dim, theta), 1.0


def linear(t: int, dim: int, theta: float, length: int, *, factor: float) -> Rotation:
    """Position interpolation: every frequency divided by s (Chen et al. 2023, arXiv 2306.15595)."""
    return frequencies(dim, theta) / factor, 1.0


def ntk(t: int, dim: int, theta: float, length: int, *, factor: float) -> Rotation:
    """NTK-aware scaling: the base becomes theta * s^(d/(d-2)) (arXiv 2309.00071, section 3.1)."""
    return frequencies(dim, theta * factor ** (dim / (dim - 2))), 1.0


def dynamic_ntk(t: int, dim: int, theta: float, length: int, *, factor: float = 1) -> Rotation:
    """Plain below L; beyond, the base is multiplied by (s n/L - (s - 1))^(d/(d-2)), n the end of t's segment."""
    n = segment_end(t, length)
    return frequencies(dim, theta * (factor * n / length - (factor - 1)) ** (dim / (dim - 2))), 1.0


def ntk_by_parts(
    t: int,
    dim: int,
    theta: float,
    length: int,
    *,
    factor: float,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Rotation:
    """YaRN's frequencies without its temperature."""
    return blended(dim, theta, length, factor, beta_fast, beta_slow, truncate), 1.0


def yarn(
    t: int,
    dim: int,
    theta: float,
    length: int,
    *,
    factor: float,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> Rotation:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): the blend, and cos and sin times 0.1 ln s + 1."""
    scale = temperature(factor) if attention_factor is None else attention_factor
    return blended(dim, theta, length, factor, beta_fast, beta_slow, truncate), scale


def dynamic_yarn(
    t: int,
    dim: int,
    theta: float,
    length: int,
    *,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Rotation:
    """Plain below L; beyond, YaRN with s = n/L, n the end of t's segment."""
    if t < length:
        return frequencies(dim, theta), 1.0
    factor = segment_end(t, length) / length
    return blended(dim, theta, length, factor, beta_fast, beta_slow, truncate), temperature(factor)


def llama3(
    t: int,
    dim: int,
    theta: float,
    length: int,
    *,
    factor: float = 8,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
) -> Rotation:
    """Llama 3.1's scaling (arXiv 2407.21783; the released `apply_scaling`)."""
    out = []
    for omega in frequencies(dim, theta):
        wavelength = 2 * math.pi / omega
        if wavelength < length / high_freq_factor:
            out.append(omega)
        elif wavelength > length / low_freq_factor:
            out.append(omega / factor)
        else:
            smooth = (length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append(omega * ((1 - smooth) / factor + smooth))
    return np.array(out), 1.0


def longrope(
    t: int,
    dim: int,
    theta: float,
    length: int,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    factor: float | None = None,
    attention_factor: float | None = None,
) -> Rotation:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): one divisor a pair, another list from position L on."""
    divisors = short_factor if t < length else long_factor
    if attention_factor is None:
        assert factor is not None, "longrope's scale needs `factor` or `attention_factor`"
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    plain = frequencies(dim, theta)
    assert len(divisors) == len(plain)
    return np.array([omega / divisor for omega, divisor in zip(plain, divisors, strict=True)]), attention_factor


def ntk_mixed(t: int, dim: int, theta: float, length: int, *, factor: float, exponent: float = 0.75) -> Rotation:
    """Su's mixed base (kexue.fm/archives/9706): lambda_1 ... lambda_m = exp(a m^b), and that of the last pair is s."""
    a = math.log(factor) / (dim / 2) ** exponent
    plain = frequencies(dim, theta)
    return np.array([plain[m - 1] * math.exp(-a * m**exponent) for m in range(1, dim // 2 + 1)]), 1.0


def p_rope(t: int, dim: int, theta: float, length: int, *, p: float = 0.75) -> Rotation:
    """Barbero et al. 2024 (arXiv 2410.06205, section 6): the first floor(p d/2) pairs turn, the others never do."""
    turning = math.floor(round(p * dim / 2, 9))
    return np.array([omega if i < turning else 0.0 for i, omega in enumerate(frequencies(dim, theta))]), 1.0


def resonant(omega: float) -> float:
    """The frequency of the whole wavelength that is nearest (Wang et al. 2024, arXiv 2403.00071, section 4.1)."""
    if omega == 0:
        return 0.0
    return 2 * math.pi / max(round(2 * math.pi / omega), 1)


def query_scale(t: int, length: int) -> float:
    """Log-n scaling of the query at position t, the (t + 1)-th token: max(1, ln n / ln L)."""
    return max(1.0, math.log(t + 1) / math.log(length))


ROTATIONS: dict[str, Callable[..., Rotation]] = {
    "rope": rope,
    "linear": linear,
    "ntk": ntk,
    "dynamic_ntk": dynamic_ntk,
    "ntk_by_parts": ntk_by_parts,
    "yarn": yarn,
    "dynamic_yarn": dynamic_yarn,
    "llama3": llama3,
    "longrope": longrope,
    "ntk_mixed": ntk_mixed,
    "p_rope": p_rope,
}


def rotation(
    name: str,
    t: int,
    *,
    dim: int,
    theta: float,
    length: int | None,
    resonance: bool = False,
    logn: bool = False,
    **options: Any,
) -> Rotation:
    """The frequencies (dim/2,) and the cos/sin factor which the query at position t uses for itself and its keys.

    `logn` is no part of it: see `query_scale`.

    `length` is the pretrained length; None will do for the encodings whose formula has no L (rope, linear, ntk).
    """
    inv_freq, scale = ROTATIONS[name](t, dim, theta, length, **options)
    return (np.array([resonant(omega) for omega in inv_freq]) if resonance else inv_freq), scale


def rotate(x: Array, position: float, inv_freq: Array, scale: float) -> Array:
    """Turn one vector (d,), its pairs being (i, i + d/2) as in GPT-NeoX and Llama; times `scale`."""
    half = len(inv_freq)
    out = np.empty_like(x)
    for i in range(half):
        cos, sin = math.cos(position * inv_freq[i]), math.sin(position * inv_freq[i])
        out[i] = scale * (x[i] * cos - x[half + i] * sin)
        out[half + i] = scale * (x[half + i] * cos + x[i] * sin)
    return out


def slopes(n_heads: int, factor: float = 1) -> Array:
    """ALiBi's slopes, one a query head (Press et al. 2021, arXiv 2108.12409, section 3 and the released code)."""

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * h / n) for h in range(1, n + 1)]

    power = 1
    while 2 * power <= n_heads:
        power *= 2
    row = geometric(power) + geometric(2 * power)[0::2][: n_heads - power]
    return np.array(row) / factor


def alibi(i: float, j: float | NDArray[Any], slopes: Array) -> Array:
    """The number (heads,) that is added to the score of query i and key j, already divided by sqrt(d)."""
    return -slopes * (i - j)


def sinusoid(
    p: float, dim: int, base: float = 10000, layout: Literal["interleaved", "concat"] = "interleaved"
) -> Array:
    """The row (dim,) of position p.

    interleaved: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. concat: tensor2tensor's and fairseq's, the sines
    first and the last frequency exactly 1/base.
    """
    assert dim % 2 == 0
    out = np.empty(dim)
    for i in range(dim // 2):
        if layout == "interleaved":
            out[2 * i] = math.sin(p / base ** (2 * i / dim))
            out[2 * i + 1] = math.cos(p / base ** (2 * i / dim))
        elif layout == "concat":
            omega = base ** (-i / (dim // 2 - 1))
            out[i] = math.sin(p * omega)
            out[dim // 2 + i] = math.cos(p * omega)
        else:
            raise ValueError(f"unknown layout {layout!r}")
    return out
