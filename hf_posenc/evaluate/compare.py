"""One model under several encodings, by length, in perplexity and long-context tasks: which encoding to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError
from hf_posenc.evaluate import loading
from hf_posenc.evaluate.cells import try_patches
from hf_posenc.evaluate.conditions import conditions
from hf_posenc.evaluate.grid import Bench, fill, grid
from hf_posenc.evaluate.perplexity import is_unpatched
from hf_posenc.evaluate.results import PERPLEXITY, CompareRow, Comparison, TaskRow
from hf_posenc.evaluate.resume import held, read, take_up
from hf_posenc.evaluate.specs import check_support, parse_specs, resolve_specs
from hf_posenc.evaluate.stream import TextSource
from hf_posenc.evaluate.task_cells import TaskPlan, TaskSettings, build_documents, plan_tasks
from hf_posenc.evaluate.windows import windows

DEFAULT_TAIL = 1024


def parse_lengths(lengths: int | str | Iterable[int | str]) -> list[int]:
    """Lengths in tokens, ascending, each once: `2048,8192`, 2048 or a sequence of whole numbers >= 2."""
    found = []
    lengths = [lengths] if isinstance(lengths, int) else lengths
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


def _loaded(model: Any, tokenizer: Any, dtype: Any, device: str | None, gguf_file: str | None) -> tuple[Any, Any, str]:
    """The model without a patch, its tokenizer, and its name for a report."""
    from hf_posenc import unpatch_model

    if isinstance(model, str | Path):
        name = loading.public_name(str(model), gguf_file)
        tokenizer = tokenizer or loading.load_tokenizer(str(model), gguf_file=gguf_file)
        model = loading.load_model(str(model), dtype=dtype or "float32", device=device, gguf_file=gguf_file)
        if not is_unpatched(model):
            unpatch_model(model)
        return model, tokenizer, name
    if tokenizer is None or (dtype is not None and loading.parse_dtype(dtype) != model.dtype):
        raise OptionError("a loaded model needs its tokenizer, and dtype must be the model's own or left out")
    return model, tokenizer, loading.public_name(model.config._name_or_path, gguf_file)


def run_comparison(
    model: Any,
    tokenizer: Any = None,
    encodings: str | Iterable[Any] = "none,linear,ntk,yarn",
    *,
    lengths: int | str | Iterable[int | str],
    text: str | Path | TextSource | None = None,
    tasks: str | Iterable[str] = (),
    factor: float | None = None,
    tail: int | None = None,
    stride: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    gguf_file: str | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    progress: bool = True,
    **task_options: Any,
) -> Comparison:
    """As `compare`, with the header beside the rows."""
    from hf_posenc import report

    specs, sizes = resolve_specs(parse_specs(encodings), factor), parse_lengths(lengths)
    settings = TaskSettings.of(task_options)
    plan = plan_tasks(tasks, settings) if tasks else TaskPlan()
    if text is None and not plan.tasks:
        raise OptionError("nothing to measure: give a text for perplexity, tasks (for example passkey), or both")
    source = None if text is None else TextSource.of(text)
    if source is not None:
        tail = check_tail(_earlier_tail(out, sizes) if tail is None and resume else tail, sizes)
        source.check()
    folder = report.prepare_folder(out) if out is not None else None
    bench = Bench(*_loaded(model, tokenizer, dtype, device, gguf_file), tail, stride, settings)
    if source is not None:
        bench.texts.append(_tokens(source, bench.tokenizer, sizes, stride))
    bench.documents.update(build_documents(bench.tokenizer, plan, sizes, settings))
    check_support(specs, bench.model.config.model_type)
    scored = source and {"name": source.name, "sha256": source.sha256(), "tokens": len(bench.texts[0])}
    asked = settings.described() if plan.tasks else None
    what: dict[str, Any] = {"tail": tail, "stride": stride, "text": scored or None, "tasks": asked}
    header = conditions(bench.model, bench.tokenizer, name=bench.name, **what)
    header |= try_patches(bench.model, specs, sizes[-1]) | {"not_run": plan.not_run}
    measures = [*([PERPLEXITY] if source else []), *plan.tasks]
    cells = [
        cell
        for cell in grid(specs, measures, sizes)
        if cell.measure == PERPLEXITY or (cell.measure, cell.length) in bench.documents
    ]
    with held(folder):
        begun = take_up(folder, header, resume)
        return fill(bench, cells, begun, folder, progress=progress)


def _earlier_tail(out: str | Path | None, lengths: Sequence[int]) -> int | None:
    """The tail of the run that a folder holds, where it fits: shorter lengths may then join it."""
    earlier = read(Path(out).expanduser()) if out is not None else None
    tail = None if earlier is None else earlier.header.get("tail")
    return tail if isinstance(tail, int) and tail < lengths[0] else None


def _tokens(source: TextSource, tokenizer: Any, lengths: Sequence[int], stride: int | None) -> Tensor:
    """As many tokens as the cells read: all of the text where windows move over it."""
    longest = lengths[-1]
    ids = source.tokens(tokenizer, longest) if stride is None else source.all_tokens(tokenizer)
    if len(ids) < longest:
        raise OptionError(f"the text {source.name} has {len(ids)} tokens; the longest length needs {longest}")
    if stride is not None:
        for length in lengths:
            windows(len(ids), length, stride)
    return ids


def compare(
    model: Any, tokenizer: Any = None, encodings: Any = "none,linear,ntk,yarn", **options: Any
) -> list[CompareRow | TaskRow]:
    """Perplexity and task scores by length of one model under several encodings; one row a cell.

    The perplexity cell (encoding, L) is one forward over the first L tokens of the text, tokens 2 ... L scored, in fp32
    by default; with `stride`, windows of L tokens move over the whole text, and every token is scored once. The model
    is loaded once and patched for each encoding; `none` is the model without a patch, also where its folder holds one.
    Everything is checked before the first forward; a cell that cannot be measured (past a table's end, out of memory)
    has an `error`, and the others go on.

    Args:
        model: a loaded causal language model, or what names one: a folder, a hub id, `demo:llama`.
        tokenizer: its tokenizer; may be left out when `model` is a name.
        encodings: `none,linear,yarn:factor=4,beta_fast=16`, or a sequence of such and of `Encoding` objects.
        lengths: in tokens, `2048,8192` or a sequence.
        text: a `Path` to a UTF-8 file, or the text itself; without one there are no perplexities.
        tasks: `passkey,niah_single_1`, `ruler_no_files`, ... (`hf_posenc.eval_tasks`), each scored at every length.
        factor: given to each encoding that takes one and names none of its own.
        tail: tokens of the second figure, below the shortest length; by default 1024 or half of the shortest length.
        stride: tokens by which windows move, below the shortest length; by default one window.
        form, num_samples, seed, haystack, qa, batch_size: of the tasks, as in `run_tasks`.
        dtype, device, gguf_file: how a named model is loaded; float32, the first GPU or else the CPU.
        out: a folder for report.html, results.json, CSV and PNG. Each cell is there as soon as it is measured, and a
            further run into the same folder, under the same conditions, measures only what is missing.
        resume: False measures all cells anew, whatever `out` holds.
        progress: show a bar on stderr.

    Raises:
        PosencError: anything above is missing, misspelt, too short or not writable; nothing has been computed by then.
    """
    comparison = run_comparison(model, tokenizer, encodings, **options)
    return [*comparison.rows, *comparison.task_rows]
