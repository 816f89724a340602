"""What a run asks for and cannot have: lengths past an encoding's reach, and modes that a host or an encoding loses."""

from __future__ import annotations

import inspect
import os
from typing import Any

from hf_posenc.errors import OptionError, ReachError, UnsupportedError
from hf_posenc.evaluate.limits import encoding_of, reach

from .settings import FAR, DataSettings


def check_lengths(model: Any, data: DataSettings) -> int | None:
    """Raise `ReachError` for a window past what the positions express or aim at; returns what far ones are drawn to."""
    encoding = encoding_of(model)
    aim = encoding.reach() if hasattr(encoding, "reach") else None
    end = reach(model)
    target = data.target_length if data.mode in FAR else None
    if data.mode in FAR and target is None:
        target = aim or end
        if target is None:
            raise OptionError(
                f"data: mode={data.mode!r} needs the length that the positions are drawn to, and this encoding aims at "
                "none in particular; give target_length=… (--target-length)"
            )
    longest, name = (target, "target_length") if target is not None else (data.max_length, "max_length")
    if data.mode in FAR and longest < data.max_length:
        raise OptionError(
            f"data: target_length={longest} is below max_length={data.max_length}, the length of a window; give a "
            "longer target_length (--target-length), or shorter windows (--max-length)"
        )
    if end is not None and longest > end:
        raise ReachError(
            f"{name}={longest}: the position table ends at {end}; shorten it, or stretch the table with "
            "learned, resize='interpolate', factor=…"
        )
    if aim is not None and longest > aim:
        length = encoding.original_max_position_embeddings
        raise ReachError(
            f"{name}={longest}: {encoding.name} with factor {getattr(encoding, 'factor', 1):g} aims at {aim} tokens "
            f"({length} × the factor); give factor={longest / length:g} or more, or a shorter {name}"
        )
    return target


def check_positions(model: Any, data: DataSettings) -> None:
    """Raise `UnsupportedError` where this model would drop the positions that packing and skipping are made of."""
    if data.mode != "packed" and data.mode not in FAR:
        return
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    takes = "position_ids" in inspect.signature(type(inner).forward).parameters
    if not takes and encoding_of(model) is None:
        raise UnsupportedError(
            f"mode={data.mode!r} goes by position_ids, and {inner.config.model_type} takes none as it is; patch it "
            "(its own encoding will do), or use mode='concat'"
        )


def refuse_sharded(arguments: Any, *, measured: bool) -> None:
    """Raise `UnsupportedError` where one process would have to measure a model of which it holds a part only."""
    sharded = bool(arguments.fsdp or arguments.deepspeed or os.environ.get("ACCELERATE_USE_FSDP") == "true")
    if measured and sharded:
        raise UnsupportedError(
            "evaluation on the way measures on one process, which with FSDP or DeepSpeed holds a part of the model "
            "only; train without it, and measure the result with hf-posenc compare or eval"
        )


def refuse_context_parallel(model: Any, arguments: Any, data: DataSettings) -> None:
    """Raise `UnsupportedError` where context parallelism is asked for and would drop the positions or the documents.

    It cuts a row over processes, throws the mask away and runs stock sdpa in a ring. What is done before attention (a
    rotation of Q and K, a vector on the embedding, nothing) survives; what acts inside the attention function does not.
    """
    parallel = arguments.parallelism_config
    if parallel is None or max(parallel.cp_size, parallel.sp_size) <= 1:
        return
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    encoding, used = encoding_of(model), str(inner.config._attn_implementation)
    name = encoding.name if encoding is not None else f"{inner.config.model_type}'s own encoding"
    if used != "sdpa":
        raise UnsupportedError(
            f"{name} with context parallelism: it acts inside the attention function ({used}), which context "
            "parallelism replaces by its own ring over stock sdpa, so the positions would be lost; use FSDP2 without "
            "it, or an encoding that turns Q and K before attention (rope, linear, ntk, yarn, llama3) or adds to the "
            "embedding"
        )
    if data.mode == "packed":
        raise UnsupportedError(
            "mode='packed' with context parallelism: it throws the mask away that keeps documents apart; "
            "use mode='concat'"
        )
