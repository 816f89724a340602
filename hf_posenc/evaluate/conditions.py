"""The header of a report: the conditions under which every figure was measured, and whether two runs share them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from hf_posenc.eval_tasks.cache import tokenizer_hash
from hf_posenc.evaluate.loading import trained_length
from hf_posenc.evaluate.memory import CPU_MEANING, CUDA_MEANING

ALWAYS = ("model", "weights", "config", "tokenizer", "dtype", "attention", "device", "versions")
OF_TEXT = ("sha256", "documents", "tail", "stride")
OF_TASKS = ("tasks",)
"""The entries of a header that a figure depends on: cells of two runs stand in one table only where these are equal."""

SAMPLE = 64


def weights_digest(model: nn.Module) -> str:
    """A short digest of names, shapes and a few dozen values of every parameter: tells a retrained model from an old.

    Not of all values: it must be quick for a model of many gigabytes.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(b"" if sample.is_meta else sample.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def config_digest(config: Any) -> str:
    """A short digest of all that a config says of the model itself."""
    values = {key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "hf_posenc")}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def protocol(tail: int, stride: int | None, documents: int) -> str:
    """How the perplexity of a cell is made, in words."""
    of = "the text" if documents == 1 else f"each of {documents} documents"
    scored = (
        f"one forward over the first L tokens of {of}, tokens 2 to L scored"
        if stride is None
        else f"windows of L tokens that move by {stride} over {of}, every token from the second on scored once, in the "
        "first window that holds it"
    )
    return (
        f"Cell (encoding, L): {scored}; ppl = exp(mean negative log-likelihood in nats, fp32 log-softmax); ppl_tail "
        f"the same over the last {tail} of these tokens."
    )


def conditions(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    tail: int | None = None,
    stride: int | None = None,
    text: Mapping[str, Any] | None = None,
    documents: int = 1,
    tasks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that a reader needs to repeat a measurement; JSON values only."""
    import transformers

    import hf_posenc

    cuda = model.device.type == "cuda"
    return {
        "model": name,
        "model_type": model.config.model_type,
        "weights": weights_digest(model),
        "config": config_digest(model.config),
        "tokenizer": tokenizer_hash(tokenizer)[:16],
        "trained_length": trained_length(model.config),
        "protocol": None if tail is None else protocol(tail, stride, documents),
        "tail": tail,
        "stride": stride,
        "text": None if text is None else dict(text),
        "documents": documents,
        "tasks": None if tasks is None else dict(tasks),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": torch.cuda.get_device_name(model.device) if cuda else str(model.device),
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": CUDA_MEANING if cuda else CPU_MEANING,
        "versions": {
            "hf_posenc": hf_posenc.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first entry that figures depend on in which two headers differ, with both values; None where there is none.

    What only one of the two measured at all (perplexity of a text, tasks) is no difference.
    """
    old, new = ({**header, "sha256": (header.get("text") or {}).get("sha256")} for header in (old, new))
    shared = [
        key
        for name, keys in (("text", OF_TEXT), ("tasks", OF_TASKS))
        if old.get(name) and new.get(name)
        for key in keys
    ]
    for key in (*ALWAYS, *shared):
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        key = "text (sha256)" if key == "sha256" else key
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            inner = next(k for k in {**before, **now} if before.get(k) != now.get(k))
            return f"{key} {inner}: {before.get(inner)} there, {now.get(inner)} here"
        return f"{key}: {before} there, {now} here"
    return None
