"""Perplexity cells of a comparison: one encoding at one length, measured, or with the reason why it was not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluate.memory import free_memory, is_out_of_memory, peak_memory
from hf_posenc.evaluate.perplexity import check_reach, ppl, token_nll, windowed_nll
from hf_posenc.evaluate.results import CompareRow
from hf_posenc.evaluate.specs import NONE, EncodingSpec
from hf_posenc.evaluate.windows import by_position


def apply(model: Any, spec: EncodingSpec) -> Any:
    """A context in which `model` has the encoding `spec`; `none` leaves it as it is."""
    import hf_posenc

    return nullcontext(model) if spec.name == NONE else hf_posenc.patched(model, spec.name, **spec.options)


def try_patches(model: Any, specs: Sequence[EncodingSpec], longest: int) -> dict[str, Any]:
    """Patch once with each of `specs`: a wrong value is met before hours of work.

    Returns what a report's header says of them: `encodings`, their options, defaults too, and `anatomy`, what they do
    to distances up to `longest`.
    """
    import hf_posenc
    from hf_posenc.evaluate.anatomy import describe

    effective: dict[str, Mapping[str, Any]] = {}
    anatomy: dict[str, Mapping[str, Any]] = {}
    for spec in specs:
        try:
            with apply(model, spec):
                encoding = hf_posenc.get_encoding(model) if spec.name != NONE else None
                effective[spec.label] = dict(encoding.options()) if encoding else {}
                anatomy[spec.label] = describe(model, longest)
        except PosencError as error:
            # The same kind of error, with the encoding that it is about.
            raise type(error)(f"{spec.label}: {error}") from error
    return {"encodings": effective, "anatomy": anatomy}


def warm_up(model: Any, ids: Tensor) -> None:
    """One short forward: the first of a process sets up threads and kernels, which is no cell's time."""
    token_nll(model, ids[:16])


def _nlls(model: Any, documents: Sequence[Tensor], length: int, stride: int | None) -> list[Tensor]:
    if stride is None:
        return [token_nll(model, ids[:length]) for ids in documents]
    return [windowed_nll(model, ids, window=length, stride=stride) for ids in documents]


def measure_perplexity(
    model: Any,
    spec: EncodingSpec,
    documents: Sequence[Tensor],
    length: int,
    tail: int,
    stride: int | None = None,
) -> CompareRow:
    """One cell on a model that already has the encoding; what cannot be measured becomes the row's `error`.

    Each document's first `length` tokens are one forward; with `stride`, windows of `length` move over the whole of it.
    The mean is over all scored tokens of all documents alike.
    """
    try:
        check_reach(model, length)
        with peak_memory(model.device) as peak:
            start = time.perf_counter()
            nlls = _nlls(model, documents, length, stride)
            seconds = time.perf_counter() - start
    except PosencError as error:
        return CompareRow(spec.name, spec.options, length, 0, error=str(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free_memory(model.device)
        return CompareRow(spec.name, spec.options, length, 0, error=f"out of memory at {length} tokens")
    whole = torch.cat(nlls)
    return CompareRow(
        spec.name,
        spec.options,
        length,
        tokens=len(whole),
        ppl=ppl(whole),
        ppl_tail=ppl(torch.cat([nll[-tail:] for nll in nlls])),
        seconds=seconds,
        peak_memory_bytes=peak.bytes,
        nll_by_position=by_position(nlls, window=length, stride=stride),
    )
