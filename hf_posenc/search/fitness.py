"""What a candidate is measured on: texts of the target length, some for the search and others for the judgement."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.encodings import Encoding
from hf_posenc.errors import OptionError
from hf_posenc.eval_tasks.passkey import passkey_documents
from hf_posenc.evaluate.perplexity import token_nll
from hf_posenc.evaluate.stream import TextSource
from hf_posenc.patching import patched

from .settings import SearchSettings

Text = str | Path | TextSource | Sequence[str]
SEARCHED, JUDGED = 10**6, 2 * 10**6
"""Seeds of passkey documents, apart from each other and from those of a report."""


@dataclass(frozen=True)
class Sample:
    """Tokens (n,) of one text, of which the last `scored` count."""

    ids: Tensor
    scored: int


@dataclass(frozen=True)
class Samples:
    """What candidates are compared on, and what the winner is judged on."""

    searched: tuple[Sample, ...]
    judged: tuple[Sample, ...]

    def sha256(self) -> str:
        """A digest of all tokens, of both parts."""
        digest = hashlib.sha256()
        for part in (self.searched, self.judged):
            for sample in part:
                digest.update(f"{sample.scored} ".encode() + sample.ids.numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()


def loss(model: Any, encoding: Encoding, samples: Sequence[Sample]) -> float:
    """Mean negative log-likelihood of all scored tokens under an encoding, in nats; infinite where it is no number.

    One forward a sample; the model is patched for the time of the call, which costs milliseconds and copies no weight.
    """
    with patched(model, encoding):
        found = torch.cat([token_nll(model, sample.ids)[-sample.scored :] for sample in samples])
    mean = float(found.double().mean())
    return mean if math.isfinite(mean) else math.inf


def make_samples(tokenizer: Any, text: Text | None, length: int, settings: SearchSettings) -> Samples:
    """Samples of `length` tokens; raises `OptionError` for a text that is too short, or none where one is needed."""
    if settings.fitness == "passkey":
        if text is not None:
            raise OptionError("fitness='passkey' makes its own documents; leave text out, or give fitness='perplexity'")
        return Samples(*(passkeys(tokenizer, length, settings, first) for first in (SEARCHED, JUDGED)))
    if text is None:
        raise OptionError(f"fitness='perplexity' needs a text of at least {2 * length} tokens (--text)")
    rows = [row for row in documents(tokenizer, text, length, 2 * settings.samples) if len(row) == length]
    if len(rows) < 2:
        raise OptionError(
            f"the text gives {len(rows)} piece{'s' if len(rows) != 1 else ''} of factor × trained length = {length} "
            f"tokens, and 2 are the least: one to search on and one to judge by; give a text of {2 * length} tokens or "
            "more, or a smaller factor"
        )
    judged = len(rows) // 2
    samples = [Sample(row, length - 1) for row in rows]
    return Samples(tuple(samples[:-judged]), tuple(samples[-judged:]))


def documents(tokenizer: Any, text: Text, length: int, most: int) -> list[Tensor]:
    """Up to `most` rows of `length` tokens: a text cut one after another, or the beginnings of several."""
    if isinstance(text, str | Path | TextSource):
        return list(TextSource.of(text).tokens(tokenizer, most * length).split(length))
    if not text or not all(isinstance(item, str) for item in text):
        raise OptionError("text takes a text, a Path, or a list of texts, of which none may be missing")
    return [TextSource(item).tokens(tokenizer, length) for item in text[:most]]


def passkeys(tokenizer: Any, length: int, settings: SearchSettings, first: int) -> tuple[Sample, ...]:
    """Prompts with their answers, of which the answer is scored."""
    found = []
    for document in passkey_documents(tokenizer, length, settings.samples, seed=first + settings.seed):
        prompt = tokenizer(document.prompt, verbose=False)["input_ids"]
        ids = torch.tensor(tokenizer(f"{document.prompt} {document.key}", verbose=False)["input_ids"])
        found.append(Sample(ids, len(ids) - min(len(prompt), len(ids) - 1)))
    return tuple(found)
