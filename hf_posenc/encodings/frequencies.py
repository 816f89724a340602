"""The formulas of rotary encodings, as free functions; d = rotary width, theta = base, s = factor, L = trained length.

Everything is computed in float32 and in the order of operations that RoPE's implementations share, so that a host's
own frequencies are met bit for bit. Convention: frequencies only, one per pair; how a head's channels form pairs
(half-split or interleaved) is the host's business, and the cos/sin factor is returned beside, not multiplied in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope(dim: int, theta: float) -> Tensor:
    """omega_i = theta^(-2i/d), i = 0 … d/2 - 1, shape (d/2,), radians a token. RoFormer (2104.09864), section 3.2.2."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def ntk_theta(dim: int, theta: float, scale: float) -> float:
    """theta' = theta * scale^(d/(d-2)): divides the lowest frequency by `scale`, leaves the highest. bloc97 (2023)."""
    return theta * scale ** (dim / (dim - 2))


def dynamic_scale(factor: float, length_ratio: float) -> float:
    """s·n/L - (s - 1), the scale of dynamic NTK at n tokens, for `ntk_theta`; n/L = 8, s = 8: 57. emozilla (2023)."""
    return factor * length_ratio - (factor - 1)


def yarn_dimension(rotations: float, dim: int, theta: float, length: float) -> float:
    """The pair that makes r `rotations` within L tokens: d·ln(L/(2πr)) / (2 ln theta). YaRN (2309.00071), 3.2."""
    return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def yarn_range(
    beta_fast: float, beta_slow: float, dim: int, theta: float, length: float, truncate: bool
) -> tuple[float, float]:
    """First and last pair of YaRN's ramp, rounded outwards if `truncate`, within [0, d - 1]. YaRN, 3.2."""
    low, high = (yarn_dimension(rotations, dim, theta, length) for rotations in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return min(max(low, 0), dim - 1), min(max(high, 0), dim - 1)


def by_parts(
    dim: int, theta: float, factor: float, length: float, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    """omega_i/s·r_i + omega_i·(1 - r_i) with r_i rising from 0 to 1 over `yarn_range`. YaRN (2309.00071), 3.2, def. 2.

    Fast pairs (i below the range) are kept, slow pairs (above it) are interpolated.
    """
    low, high = yarn_range(beta_fast, beta_slow, dim, theta, length, truncate)
    high = high + 0.001 if high == low else high  # the ramp of a single point would divide by zero
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def yarn_temperature(factor: float) -> float:
    """a = 0.1 ln s + 1, on cos and on sin, so that logits grow by a²; 1 for s <= 1. YaRN (2309.00071), 3.4, eq. 22."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def llama3(dim: int, theta: float, factor: float, length: float, low: float, high: float) -> Tensor:
    """Llama 3.1's scaling by wavelength lambda = 2π/omega (The Llama 3 Herd of Models, 2407.21783; released code).

    lambda < L/high: kept; lambda > L/low: divided by s; between: omega·((1 - t)/s + t) with
    t = (L/lambda - low)/(high - low).
    """
    inv_freq = rope(dim, theta)
    wavelength = 2 * math.pi / inv_freq
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(between, blended, scaled)


def longrope(dim: int, theta: float, rescale: tuple[float, ...]) -> Tensor:
    """omega_i / lambda_i with one rescale factor a pair. LongRoPE (2402.13753), eq. 3."""
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (torch.tensor(rescale, dtype=torch.float32) * powers)


def longrope_temperature(factor: float, length: float) -> float:
    """sqrt(1 + ln s / ln L), on cos and sin; s = 4, L = 32768: 1.0646. LongRoPE (2402.13753), released code."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


def mixed(dim: int, theta: float, factor: float, exponent: float) -> Tensor:
    """omega_m·exp(-a·m^b), m = 1 … d/2, a = ln s/(d/2)^b: the lowest ÷ s. Su 2023, kexue.fm/archives/9706."""
    m = torch.arange(1, dim // 2 + 1, dtype=torch.float64)
    share = (m / (dim // 2)) ** exponent
    return (rope(dim, theta).double() * torch.exp(-math.log(factor) * share)).float()


def whole_wavelengths(inv_freq: Tensor) -> Tensor:
    """2π / round(2π / omega), wavelengths in tokens; 0 stays 0. Resonance RoPE (2403.00071)."""
    wavelength = 2 * math.pi / inv_freq.double()
    return (2 * math.pi / wavelength.round().clamp(min=1)).float()
