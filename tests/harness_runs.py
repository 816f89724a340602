"""What tests of the tasks' runs share: a tiny model that reads bytes, short runs, requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from tiny import tiny_model

from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.evaluate import run_tasks as runs
from hf_posenc.evaluate.run_tasks import run_tasks


def write_llama(path: Path) -> Path:
    """A tiny Llama that reads bytes, as a checkpoint."""
    tiny_model("llama", vocab_size=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def run(model: Any, tasks: Any = "passkey", lengths: Any = 300, **options: Any) -> runs.EvalResults:
    """Four documents a length, one forward each, on the CPU, unless `options` say otherwise."""
    found = run_tasks(model, tasks, lengths, **{"num_samples": 4, "form": "loglikelihood", "device": "cpu", **options})
    assert found is not None
    return found


def bytes_model(model_type: str = "llama", **config: Any) -> Any:
    """A tiny model with a row for every byte and the end of a text."""
    return tiny_model(model_type, vocab_size=257, **config)


def request(kind: str, text: str, argument: Any) -> Instance:
    """A request of lm-eval's, of a task named some_task."""
    return Instance(request_type=kind, doc={}, arguments=(text, argument), idx=0, metadata=("some_task", 0, 1))  # type: ignore[arg-type]
