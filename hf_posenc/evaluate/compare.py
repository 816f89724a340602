"""Perplexity of one model under several encodings, by length: the table that says which encoding to take."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError
from hf_posenc.evaluate import loading
from hf_posenc.evaluate.cells import cell_progress, measure, try_patches
from hf_posenc.evaluate.memory import CPU_MEANING, CUDA_MEANING
from hf_posenc.evaluate.perplexity import is_unpatched
from hf_posenc.evaluate.results import CompareRow, Comparison
from hf_posenc.evaluate.specs import check_support, parse_specs, resolve_specs

DEFAULT_TAIL = 1024


def parse_lengths(lengths: str | Iterable[int | str]) -> list[int]:
    """Lengths in tokens, ascending, each once: `2048,8192` or a sequence of whole numbers >= 2."""
    found = []
    for item in lengths.split(",") if isinstance(lengths, str) else lengths:
        try:
            length = int(item) if isinstance(item, str) else item
        except ValueError:
            length = None
        if not isinstance(length, int) or isinstance(length, bool) or length < 2:
            raise OptionError(f"length {item!r} is not a whole number of tokens >= 2 (for example 2048,8192)")
        found.append(length)
    if not found:
        raise OptionError("no lengths given (for example 2048,8192)")
    return sorted(set(found))


def check_tail(tail: int | None, lengths: Sequence[int]) -> int:
    """`tail`, or by default 1024 tokens or half of the shortest length, whichever is less."""
    if tail is None:
        return min(DEFAULT_TAIL, lengths[0] // 2)
    if isinstance(tail, bool) or not isinstance(tail, int) or not 1 <= tail < lengths[0]:
        raise OptionError(
            f"tail must be a whole number from 1 to below the shortest length, {lengths[0]}; got {tail!r}"
        )
    return tail


def conditions(model: Any, *, name: str, tail: int, text: Mapping[str, Any], documents: int = 1) -> dict[str, Any]:
    """The header of a report: everything that a reader needs to repeat the measurement."""
    import transformers

    import hf_posenc

    of = "the text" if documents == 1 else f"each of {documents} documents"
    return {
        "model": name,
        "model_type": model.config.model_type,
        "trained_length": loading.trained_length(model.config),
        "protocol": f"Cell (encoding, L): one forward over the first L tokens of {of}, tokens 2 to L scored; "
        "ppl = exp(mean negative log-likelihood in nats, fp32 log-softmax); "
        f"ppl_tail the same over the last {tail} of these tokens.",
        "tail": tail,
        "text": dict(text),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": CUDA_MEANING if model.device.type == "cuda" else CPU_MEANING,
        "versions": {
            "hf_posenc": hf_posenc.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def run_comparison(
    model: Any,
    tokenizer: Any = None,
    encodings: str | Iterable[Any] = "none,linear,ntk,yarn",
    *,
    lengths: str | Iterable[int | str],
    text: str | Path | loading.Text,
    factor: float | None = None,
    tail: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    gguf_file: str | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Comparison:
    """As `compare`, with the header beside the rows."""
    from hf_posenc import report, unpatch_model

    specs, sizes = resolve_specs(parse_specs(encodings), factor), parse_lengths(lengths)
    tail, text = check_tail(tail, sizes), loading.Text.of(text)
    folder = report.prepare_folder(out) if out is not None else None
    named = isinstance(model, str | Path)
    if named:
        tokenizer = tokenizer or loading.load_tokenizer(str(model), gguf_file=gguf_file)
    elif tokenizer is None or (dtype is not None and loading.parse_dtype(dtype) != model.dtype):
        raise OptionError("a loaded model needs its tokenizer, and dtype must be the model's own or left out")
    ids = _enough(loading.encode(tokenizer, text), sizes[-1], text.name)
    name = loading.public_name(str(model) if named else model.config._name_or_path, gguf_file)
    if named:
        model = loading.load_model(str(model), dtype=dtype or "float32", device=device, gguf_file=gguf_file)
        if not is_unpatched(model):
            unpatch_model(model)
    check_support(specs, model.config.model_type)
    effective = try_patches(model, specs)
    source = {"name": text.name, "sha256": text.sha256, "tokens": len(ids)}
    header = conditions(model, name=name, tail=tail, text=source) | {"encodings": effective}
    comparison, cells = Comparison(header), len(specs) * len(sizes)
    try:
        with cell_progress(cells, len(specs) * sum(sizes), progress) as advance:
            for row in measure(model, specs, [ids], sizes, tail, advance=advance):
                comparison.rows.append(row)
    finally:
        # A run that is stopped after hours keeps the cells it has.
        if folder is not None and comparison.rows:
            report.write_report(folder, comparison, complete=len(comparison.rows) == cells)
    return comparison


def _enough(ids: Tensor, longest: int, name: str) -> Tensor:
    if len(ids) < longest:
        raise OptionError(f"the text {name} has {len(ids)} tokens; the longest length needs {longest}")
    return ids


def compare(
    model: Any, tokenizer: Any = None, encodings: Any = "none,linear,ntk,yarn", **options: Any
) -> list[CompareRow]:
    """Perplexity by length of one model under several encodings; one row a cell.

    The cell (encoding, L) is one forward over the first L tokens of the text, tokens 2 ... L scored, in fp32 by
    default. The model is loaded once and patched for each encoding; `none` is the model without a patch, also where its
    folder holds one. Everything is checked before the first forward; a cell that cannot be measured (past a table's
    end, out of memory) has an `error`, and the others go on.

    Args:
        model: a loaded causal language model, or what names one: a folder, a hub id, `demo:llama`.
        tokenizer: its tokenizer; may be left out when `model` is a name.
        encodings: `none,linear,yarn:factor=4,beta_fast=16`, or a sequence of such and of `Encoding` objects.
        lengths: in tokens, `2048,8192` or a sequence.
        text: a `Path` to a UTF-8 file, or the text itself.
        factor: given to each encoding that takes one and names none of its own.
        tail: tokens of the second figure, below the shortest length; by default 1024 or half of the shortest length.
        dtype, device, gguf_file: how a named model is loaded; float32, the first GPU or else the CPU.
        out: a folder for results.json, results.csv and perplexity.png.
        progress: show a bar on stderr.

    Raises:
        PosencError: anything above is missing, misspelt, too short or not writable; nothing has been computed by then.
    """
    return run_comparison(model, tokenizer, encodings, **options).rows
