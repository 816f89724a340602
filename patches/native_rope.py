"""`config.rope_parameters`: what the host library itself can hold, and what must be in order before it is edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    Segmented,
    Yarn,
)
from hf_posenc.errors import OptionError, StateError, UnsupportedError
from hf_posenc.offload import held

from .base import turns_early

BFLOAT16_ROUNDING = 2.0**-8  # what a model cast to 16 bits may have lost of its frequencies
FLOAT16_STEP = 2.0**-24

# a pair that does not turn is divided by STILL: after 2^24 tokens its angle is 1.7e-17, so cos is 1 and sin nothing
# beside any rounding; and STILL · theta stays within float32, up to the largest theta that an encoding takes
STILL = 1e24
SLOWEST = 1e-16  # radians a token; below it a pair stands still


def write_parameters(
    config: Any,
    encoding: Rotation,
    dim: int,
    kept: dict[str, Any],
    layer_type: str | None,
    works: Callable[[Any], bool],
) -> None:
    """Write an encoding into `config.rope_parameters`, or into one layer type's share, as the host library has it.

    The host library's own type for it, or the lists of `rescaled`, whichever this config's class takes and `works`
    with it: Phi-3 has no type but longrope, and 5.4.0 neither YaRN nor longrope in a layer type's share. `kept`: what
    stays of the old parameters. Raises `UnsupportedError` where there is none.
    """
    old = config.rope_parameters
    found = [typed(encoding, dim)]
    if layer_type is not None and not getattr(encoding, "truncate", True):
        found = []  # the host looks for that outside of the layer type's share
    if not isinstance(encoding, Segmented):
        found.append(rescaled(encoding, dim))
    judged = survives(config)
    for parameters in filter(None, found):
        new = {**parameters, **kept}
        config.rope_parameters = new if layer_type is None else {**old, layer_type: new}
        if works(config) and (not judged or survives(config)):
            return
    config.rope_parameters = old
    advice = "; use schedule='segments'" if isinstance(encoding, Segmented) else ""
    raise UnsupportedError(
        f"{encoding.name}: {config.model_type} has no rope type that holds it, in this release of Transformers{advice}"
    )


def survives(config: Any) -> bool:
    """Whether this config's rope parameters come back from a file as they are: its class may refuse them."""
    try:
        again = type(config).from_dict(config.to_dict())
    except Exception:  # what a config's own validation raises differs by release
        return False
    return again.rope_parameters == config.rope_parameters


def typed(encoding: Rotation, dim: int) -> dict[str, Any] | None:
    """The host library's own type for an encoding, or None where it has none."""
    base = {"rope_theta": encoding.theta}
    if encoding.resonance:
        return None
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
    return None


def rescaled(encoding: Rotation, dim: int) -> dict[str, Any]:
    """Any fixed set of frequencies: `longrope` with the same list of rescale factors on both sides of the length."""
    inv_freq, scaling = encoding.inv_freq(dim)
    rescale = rescale_factors(inv_freq, encoding.theta).tolist()
    lists = {"short_factor": rescale, "long_factor": rescale, "attention_factor": scaling}
    length = {"original_max_position_embeddings": encoding.length, "factor": 1.0}
    return {"rope_type": "longrope", **lists, **length, "rope_theta": encoding.theta}


def rescale_factors(inv_freq: Tensor, theta: float) -> Tensor:
    """By what plain RoPE's frequencies are divided to give these, float64; `STILL` for a pair that does not turn."""
    plain = Rope(rope_theta=theta).inv_freq(2 * len(inv_freq))[0].double()
    return torch.where(inv_freq > 0, plain / inv_freq.double(), STILL)


def is_native(encoding: Encoding) -> bool:
    """Whether the host library has a rope type that holds all of this encoding."""
    return turns_early(encoding) and not encoding.inside_attention


def frequencies_off(found: Tensor, wanted: Tensor) -> float:
    """The largest relative difference of the frequencies in a host from those `wanted`, of which some may be 0."""
    return float(((found.cpu() - wanted).abs() / wanted.clamp(min=SLOWEST)).max())


def refuse_scaled(encoding: Encoding, parameters: dict[str, Any], now: int) -> None:
    """Raise where the config already scales and the encoding would: a factor must not compound unsaid.

    `parameters`: the host's rope parameters; `now`: the length that its config states.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default" or not isinstance(encoding, Rotation) or encoding.original_max_position_embeddings is not None:
        return
    stated = parameters.get("original_max_position_embeddings")
    factor = getattr(encoding, "factor", None)
    aims = [f"{int(length * factor)}" for length in (stated, now) if length and factor is not None]
    aim = f": factor={factor} would aim at {' or '.join(aims)} tokens" if aims else ""
    raise OptionError(
        f"this config already scales ({kind}, factor {parameters.get('factor')}), so {encoding.name} has two readings, "
        f"from the length before that scaling ({stated or 'not stated'}) or from the present one ({now}){aim}. Scaling "
        "never compounds: name the length the model was pretrained on, original_max_position_embeddings=…"
    )


def check_buffers(rotary: Any, config: Any) -> None:
    """Raise where the rotary module's frequencies are not those of its config: weights on meta, or never filled in."""
    wanted = dict(type(rotary)(config).named_buffers())
    for name, _ in rotary.named_buffers():
        if grows(rotary, name):  # a type that changes its frequencies in a call keeps them beside as they were
            continue
        check_buffer(name, held(rotary, name), wanted[name])


def grows(rotary: Any, name: str) -> bool:
    """Whether a buffer holds the frequencies that the host's last call chose."""
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    chosen = [kind for kind, value in kinds.items() if value in ("dynamic", "longrope")]
    return any(name == f"{kind}_inv_freq".removeprefix("_") for kind in chosen)


def check_buffer(name: str, found: Tensor, wanted: Tensor) -> None:
    """Raise unless the frequencies `found` are those `wanted`, up to the rounding of a cast."""
    if found.is_meta:
        raise StateError(
            "the rotary frequencies are on the meta device; load or initialise the model before patching it"
        )
    if found.shape != wanted.shape:
        raise StateError(
            f"the rotary module holds {tuple(found.shape)} frequencies, its config says {tuple(wanted.shape)}"
        )
    wanted = wanted.cpu()
    off = (found.detach().float().cpu() - wanted).abs() - BFLOAT16_ROUNDING * wanted
    at = int(off.nan_to_num(nan=torch.inf).argmax())
    if not off[at] <= FLOAT16_STEP:
        raise StateError(
            f"the rotary frequencies are garbage ({name}[{at}] is {float(found[at])}, the config says "
            f"{float(wanted[at])}), as after to_empty() without initialisation; load the model with from_pretrained "
            "before patching it"
        )
