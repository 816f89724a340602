"""What the tests of fine-tuning share: tiny byte models on disk, a text, and a short run."""

from pathlib import Path
from typing import Any

from tiny import tiny_model

from hf_posenc import finetune
from hf_posenc.demo.train import VOCAB_SIZE, byte_tokenizer
from hf_posenc.eval_tasks.text import document
from hf_posenc.finetuning.output import FinetuneResult

TEXTS = [document(i, 60 + 7 * i) for i in range(20)]
YARN: dict[str, Any] = {"encoding": "yarn", "options": {"factor": 4}}
QUIET: dict[str, Any] = {"logging_steps": 1, "save_steps": 2, "learning_rate": 2e-3, "disable_tqdm": True}


def save_base(folder: Path, host: str = "llama", **config: Any) -> str:
    """A tiny model with a byte tokenizer beside it."""
    tiny_model(
        host, vocab_size=VOCAB_SIZE, eos_token_id=256, pad_token_id=256, bos_token_id=256, **config
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def tune(base: Any, out: Path, texts: Any = TEXTS, **how: Any) -> FinetuneResult:
    """A run of four steps on windows of 48 bytes."""
    training = {**QUIET, **how.pop("training", {})}
    return finetune(
        base, how.pop("tokenizer", None), texts, out=out, **{"max_length": 48, "steps": 4, **how}, training=training
    )
