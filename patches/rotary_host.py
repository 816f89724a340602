"""What hosts with a rotary module share: native types through the config, and the module silenced for all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_posenc.encodings import (
    DynamicNtk,
    Encoding,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    NtkByParts,
    Rope,
    Rotation,
    Yarn,
)
from hf_posenc.errors import OptionError, StateError
from hf_posenc.ledger import Ledger

from .base import expect, in_attention

BFLOAT16_ROUNDING = 2.0**-8  # what a model cast to 16 bits may have lost of its frequencies
FLOAT16_STEP = 2.0**-24


def rope_parameters(encoding: Rotation, dim: int) -> dict[str, Any]:
    """`config.rope_parameters` of the host library for an encoding with one fixed set of frequencies.

    One that it has no type for is `longrope` with the same list of rescale factors on both sides of the length.
    """
    base = {"rope_theta": encoding.theta}
    match encoding:
        case Rope():
            return {"rope_type": "default", **base}
        case Linear():
            return {"rope_type": "linear", "factor": float(encoding.factor), **base}
        case Ntk():
            return {"rope_type": "default", "rope_theta": encoding.scaled_theta(dim)}
        case DynamicNtk():
            return {"rope_type": "dynamic", "factor": float(encoding.factor), **base}
        case Llama3():
            extra = {key: float(getattr(encoding, key)) for key in ("factor", "low_freq_factor", "high_freq_factor")}
            return {"rope_type": "llama3", "original_max_position_embeddings": encoding.length, **extra, **base}
        case NtkByParts():
            a = encoding.attention_factor if isinstance(encoding, Yarn) else 1.0
            extra = {key: float(getattr(encoding, key)) for key in ("factor", "beta_fast", "beta_slow")}
            extra |= {} if encoding.truncate else {"truncate": False}
            extra |= {} if a is None else {"attention_factor": float(a)}
            return {"rope_type": "yarn", "original_max_position_embeddings": encoding.length, **extra, **base}
        case LongRope():
            lists: dict[str, Any] = {
                "short_factor": list(encoding.short_factor),
                "long_factor": list(encoding.long_factor),
            }
            lists |= {} if encoding.attention_factor is None else {"attention_factor": float(encoding.attention_factor)}
            length = {"original_max_position_embeddings": encoding.length, "factor": float(encoding.factor)}
            return {"rope_type": "longrope", **lists, **length, **base}
    inv_freq, scaling = encoding.inv_freq(dim)
    rescale = (Rope(rope_theta=encoding.theta).inv_freq(dim)[0].double() / inv_freq.double()).tolist()
    lists = {"short_factor": rescale, "long_factor": rescale, "attention_factor": scaling}
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": encoding.length,
        "factor": 1.0,
        **lists,
        **base,
    }


def is_native(encoding: Encoding) -> bool:
    """Whether the host library has a rope type that holds this encoding."""
    return isinstance(encoding, Rotation) and not in_attention(encoding)


def refuse_scaled(encoding: Encoding, config: Any) -> None:
    """Raise where the config already scales and the encoding would: a factor must not compound unsaid."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default" or not isinstance(encoding, Rotation) or encoding.original_max_position_embeddings is not None:
        return
    stated = parameters.get("original_max_position_embeddings")
    now = config.max_position_embeddings
    factor = getattr(encoding, "factor", None)
    aim = (
        ""
        if factor is None
        else f": factor={factor} would aim at {int((stated or now) * factor)} or {int(now * factor)} tokens"
    )
    raise OptionError(
        f"this config already scales ({kind}, factor {parameters.get('factor')}), so {encoding.name} has two readings, "
        f"from the length before that scaling ({stated or 'not stated'}) or from the present one ({now}){aim}. Scaling "
        "never compounds: name the length the model was pretrained on, original_max_position_embeddings=…"
    )


def check_buffers(rotary: Any, config: Any) -> None:
    """Raise where the rotary module's frequencies are not those of its config: weights on meta, or never filled in."""
    inv_freq = rotary.inv_freq
    if inv_freq.is_meta:
        raise StateError(
            "the rotary frequencies are on the meta device; load or initialise the model before patching it"
        )
    wanted = type(rotary)(config).inv_freq
    if inv_freq.shape != wanted.shape:
        raise StateError(
            f"the rotary module holds {tuple(inv_freq.shape)} frequencies, its config says {tuple(wanted.shape)}"
        )
    wanted = wanted.cpu()
    off = (inv_freq.detach().float().cpu() - wanted).abs() - BFLOAT16_ROUNDING * wanted
    at = int(off.nan_to_num(nan=torch.inf).argmax())
    if not off[at] <= FLOAT16_STEP:
        raise StateError(
            f"the rotary frequencies are garbage (inv_freq[{at}] is {float(inv_freq[at])}, the config says "
            f"{float(wanted[at])}), as after to_empty() without initialisation; load the model with from_pretrained "
            "before patching it"
        )


def insert_native(backbone: Any, encoding: Rotation, cls: type[nn.Module], ledger: Ledger) -> None:
    """Edit the model's own config and rebuild its rotary module as `cls`: the forward path stays the stock one."""
    config, old = backbone.config, backbone.rotary_emb
    dim = 2 * old.inv_freq.shape[0]
    extra = {k: v for k, v in config.rope_parameters.items() if k == "partial_rotary_factor"}
    config.rope_parameters = {**rope_parameters(encoding, dim), **extra}
    length = encoding.original_max_position_embeddings
    if length is not None:
        config.max_position_embeddings = max(encoding.reach() or length, length)
    ledger.set_module(backbone, "rotary_emb", cls(config).to(old.inv_freq.device))


def prove_native(backbone: Any, encoding: Rotation) -> None:
    """The module's frequencies and factor against the encoding's own formula."""
    found = backbone.rotary_emb.inv_freq
    wanted, scaling = encoding.inv_freq(2 * found.shape[0])
    off = float((found.cpu() / wanted - 1).abs().max())
    expect(off < 1e-5, f"the host's frequencies differ from {encoding.name}'s by up to {off:.1e}")
    found_scaling = float(backbone.rotary_emb.attention_scaling)
    expect(abs(found_scaling - scaling) < 1e-6, f"cos and sin are scaled by {found_scaling}, not by {scaling}")


def prove_silent(backbone: Any) -> None:
    """The rotary module now turns nothing."""
    rotary = backbone.rotary_emb
    positions = torch.tensor([[0, 7]], device=rotary.inv_freq.device)
    cos, sin = rotary(torch.zeros(1, device=rotary.inv_freq.device), positions)
    expect(bool((cos == 1).all() and (sin == 0).all()), "the host's own rotation is still there")
