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


def keys_kernel(x: float) -> float:
    """The cubic convolution kernel with a = -1/2 (Keys 1981, IEEE TASSP 29(6), equation 15)."""
    a, x = -0.5, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


def resized_row(table: Array, rule: str, p: int, factor: float, alpha: float = 0.4) -> Array:
    """Row p of a learned table made longer by one of the rules of `resize`."""
    n = len(table)
    x = p / factor
    k = math.floor(x)
    if rule == "interpolate":
        low, high = table[min(k, n - 1)], table[min(k + 1, n - 1)]
        return (1 - (x - k)) * low + (x - k) * high
    if rule == "cubic":
        taps = range(k - 1, k + 3)
        return sum((keys_kernel(x - tap) * table[min(max(tap, 0), n - 1)] for tap in taps), np.zeros(table.shape[1]))
    if rule == "group":
        return table[k]
    if rule == "repeat":
        return table[p % n]
    if rule == "hierarchical":
        u = (table - alpha * table[0]) / (1 - alpha)
        return alpha * u[p // n] + (1 - alpha) * u[p % n]
    raise ValueError(f"unknown rule {rule!r}")


def resize(table: Array, rule: str, new_len: int, factor: float, alpha: float = 0.4) -> Array:
    """A learned table (n, width) made into (new_len, width).

    interpolate: linearly at p/s. cubic: Keys' convolution at p/s, edge rows repeated. group: row floor(p/s). repeat:
    row p mod n. hierarchical: Su 2020 (kexue.fm/archives/7947), n^2 rows of which the first n are the old ones.
    """
    return np.stack([resized_row(table, rule, p, factor, alpha) for p in range(new_len)])


BIASES = ("t5_bias", "kerple", "fire", "sandwich")


def bias_parameters(name: str, n_heads: int, both_ways: bool = False, **options: Any) -> dict[str, Array]:
    """Parameters for a score bias, large on purpose, by the names that a checkpoint has for them."""
    draw = np.random.default_rng(len(name) + n_heads)
    if name == "t5_bias":
        return {"weight": draw.normal(scale=2, size=(options.get("num_buckets", 32), n_heads))}
    if name == "kerple":
        power = options.get("variant") == "power"
        p = draw.uniform(0.4, 1.6, n_heads) if power else draw.uniform(0.5, 3, n_heads)
        a = draw.uniform(0.05, 0.6, n_heads) if power else draw.uniform(0.1, 2, n_heads)
        return {"a": a, "p": p}
    if name == "fire":
        hidden = {"hidden_weight": draw.normal(scale=2, size=32), "hidden_bias": draw.normal(size=32)}
        out = {"weight": draw.normal(size=(n_heads, 32)), "bias": draw.normal(size=n_heads)}
        return {**hidden, **out, "c": np.array([-0.7]), "m": np.array([-1.3])}
    return {}


def t5_bucket(distance: int, num_buckets: int, max_distance: int, both_ways: bool) -> int:
    """The bucket of i - j (Raffel et al. 2019, arXiv 1910.10683, section 2.1 and the released code)."""
    first = 0
    if both_ways:
        num_buckets //= 2
        first = num_buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + math.floor(share * (num_buckets - exact)), num_buckets - 1)


def kerple(distance: int, p: float, a: float, power: bool) -> float:
    """Chi et al. 2022 (arXiv 2205.09921), the logarithmic and the power variant; parameters held as in its code."""
    p, a = max(p, 0.01), max(a, 0.01)
    if power:
        return -a * abs(distance) ** min(p, 2.0)
    return -p * math.log(1 + a * abs(distance))


def fire(i: int, j: int, parameters: dict[str, Array], length: float) -> Array:
    """(heads,): Li et al. 2023 (arXiv 2310.04418), section 3."""
    c, threshold = float(parameters["c"][0]), abs(float(parameters["m"][0]) * length)
    x = math.log(abs(c * (i - j)) + 1) / math.log(abs(c * max(threshold, i, j)) + 1)
    hidden = np.maximum(parameters["hidden_weight"] * x + parameters["hidden_bias"], 0)
    return parameters["weight"] @ hidden + parameters["bias"]


def sandwich(distance: int, bar_d: int) -> float:
    """The sum before a head's compression (Chi et al. 2022, arXiv 2212.10356, section 5), 0 for a token and itself."""
    return sum(math.cos(distance / 10000 ** (2 * k / bar_d)) for k in range(1, bar_d // 2 + 1)) - bar_d / 2


def score_bias(name: str, positions: Sequence[int], n_heads: int, both_ways: bool = False, **options: Any) -> Array:
    """(heads, n, n): what is added to the score of every pair, under `bias_parameters`."""
    parameters = bias_parameters(name, n_heads, both_ways, **options)

    def one(i: int, j: int) -> Any:
        if name == "t5_bias":
            buckets, most = options.get("num_buckets", 32), options.get("max_distance", 128)
            return parameters["weight"][t5_bucket(i - j, buckets, most, both_ways)]
        if name == "kerple":
            power = options.get("variant") == "power"
            return [kerple(i - j, p, a, power) for p, a in zip(parameters["p"], parameters["a"], strict=True)]
        if name == "fire":
            return fire(i, j, parameters, options.get("initial_length", 512))
        total = sandwich(i - j, options.get("bar_d", 128))
        return [total / (8 * h / n_heads) for h in range(1, n_heads + 1)]

    known: dict[Any, Any] = {}

    def remembered(i: int, j: int) -> Any:
        at = (i, j) if name == "fire" else i - j
        if at not in known:
            known[at] = one(i, j)
        return known[at]

    return np.array([[remembered(int(i), int(j)) for j in positions] for i in positions]).transpose(2, 0, 1)
