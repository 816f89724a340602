"""What tests of the tasks share: toy tokenizers, a haystack and questions of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_posenc.eval_tasks import tasks
from hf_posenc.eval_tasks.sizing import Document

ESSAY = " ".join(f"Sentence {i} of the essay {'goes on and ' * (i % 9)}ends." for i in range(80))


QUESTIONS = [
    {
        "question": f"Who keeps lamp {i}?",
        "answers": [f"keeper {i}", f"the {i}th keeper"],
        "documents": [f"Lamps {i}. " + "They burn at night. " * 9 + f"Lamp {i} has keeper {i}."],
    }
    for i in range(6)
]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word or mark; knows no word and adds nothing: only its counts matter here."""
    toy = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    toy.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=toy, unk_token="[UNK]")


def odd_tokenizer() -> PreTrainedTokenizerFast:
    """Begins every text with a mark and a blank, and makes any run of blanks one."""
    toy = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1}, unk_token="[UNK]"))
    toy.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    toy.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    toy.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=toy, unk_token="[UNK]", bos_token="<s>")


def make(name: str, length: int, n: int = 5, *, tokenizer: Any = None, **options: Any) -> list[Document]:
    return tasks.documents(name, tokenizer or word_tokenizer(), length, num_samples=n, cache=False, **options)


def write_files(folder: Path) -> dict[str, Any]:
    """A haystack and a set of questions."""
    (folder / "essay.txt").write_text(ESSAY)
    (folder / "qa.json").write_text(json.dumps(QUESTIONS))
    return {"haystack": folder / "essay.txt", "qa": folder / "qa.json"}
