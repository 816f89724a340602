"""The cells of a comparison: one encoding at one length, measured, or with the reason why it could not be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluate.memory import is_out_of_memory, peak_memory
from hf_posenc.evaluate.perplexity import check_reach, ppl, token_nll
from hf_posenc.evaluate.results import CompareRow
from hf_posenc.evaluate.specs import NONE, EncodingSpec


def apply(model: Any, spec: EncodingSpec) -> Any:
    """A context in which `model` has the encoding `spec`; `none` leaves it as it is."""
    import hf_posenc

    return nullcontext(model) if spec.name == NONE else hf_posenc.patched(model, spec.name, **spec.options)


def try_patches(model: Any, specs: Sequence[EncodingSpec]) -> dict[str, Mapping[str, Any]]:
    """Patch once with each of `specs`: a wrong value is met before hours of work. Returns all options, defaults too."""
    import hf_posenc

    effective: dict[str, Mapping[str, Any]] = {}
    for spec in specs:
        effective[spec.label] = {}
        if spec.name == NONE:
            continue
        try:
            with apply(model, spec):
                encoding = hf_posenc.get_encoding(model)
                effective[spec.label] = dict(encoding.options()) if encoding else {}
        except PosencError as error:
            # The same kind of error, with the encoding that it is about.
            raise type(error)(f"{spec.label}: {error}") from error
    return effective


def _score(model: Any, documents: Sequence[Tensor], length: int, tail: int) -> tuple[float, float]:
    nlls = [token_nll(model, ids[:length]) for ids in documents]
    return ppl(torch.cat(nlls)), ppl(torch.cat([nll[-tail:] for nll in nlls]))


def measure_cell(model: Any, spec: EncodingSpec, documents: Sequence[Tensor], length: int, tail: int) -> CompareRow:
    """One cell on a model that already has the encoding; what cannot be measured becomes the row's `error`.

    Each document's first `length` tokens are one forward; the mean is over all scored tokens of all documents alike.
    """
    tokens = len(documents) * (length - 1)
    base = CompareRow(spec.name, spec.options, length, tokens)
    try:
        check_reach(model, length)
        with peak_memory(model.device) as peak:
            start = time.perf_counter()
            whole, last = _score(model, documents, length, tail)
            seconds = time.perf_counter() - start
    except PosencError as error:
        return _failed(base, str(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        return _failed(base, f"out of memory at {length} tokens")
    return CompareRow(spec.name, spec.options, length, tokens, whole, last, seconds, peak.bytes)


def _failed(row: CompareRow, why: str) -> CompareRow:
    return CompareRow(row.encoding, row.options, row.length, 0, error=why)


def measure(
    model: Any,
    specs: Sequence[EncodingSpec],
    documents: Sequence[Tensor],
    lengths: Sequence[int],
    tail: int,
    *,
    advance: Callable[[str, int], None] = lambda label, length: None,
) -> Iterator[CompareRow]:
    """All cells, each when it is measured, encodings outermost (one patch each); `advance(label, length)` follows."""
    token_nll(model, documents[0][:16])  # the first forward of a process sets up threads and kernels: not a cell's time
    for spec in specs:
        with apply(model, spec):
            for length in lengths:
                yield measure_cell(model, spec, documents, length, tail)
                advance(spec.label, length)


@contextmanager
def cell_progress(cells: int, tokens: int, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr with the time left; its step is a token, since a long cell takes longer than a short one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(f"cell 0/{cells}", total=tokens)
        done = 0

        def advance(label: str, length: int) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=length, description=f"cell {done}/{cells}  {label:.24} {length}")

        yield advance
