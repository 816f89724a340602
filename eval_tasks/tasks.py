"""Every task by name: what it needs, how its documents are made, how an answer is scored.

    documents("niah_single_1", tokenizer, 4096, num_samples=20, seed=0)

Document i of a task depends on (task, seed, length, i), the tokenizer and the user's file alone: the same bytes on
every machine. Its depth is `DEPTHS[i % 5]`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_posenc.errors import OptionError, unknown

from . import copy_distance, niah, passkey, qa, scoring, sources, variable_tracking, word_extraction
from .cache import cached, tokenizer_hash
from .passkey import DEPTHS, Counter
from .sizing import Document, Place, counter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Needs = Literal["haystack", "qa"]
NUM_SAMPLES = 20
SUFFIX = "_loglikelihood"
"""Of a task's name in its second form: the likelihood of the right answer, one forward and no decoding."""


@dataclass(frozen=True)
class Task:
    """One task. `build(place, count, rng=, depth=, ...)` makes one document, or one and its control."""

    build: Callable[..., Document | list[Document]]
    score: scoring.Rule = scoring.share_of_references
    needs: Needs | None = None
    has_depth: bool = True


def _passkey(place: Place, count: Counter, *, rng: random.Random, depth: float) -> Document:
    made = passkey.build_passkey(count, place.length, rng=rng, depth=depth)
    prefix, target = " The pass key is", f" {made.key}"
    return Document(
        place.task,
        place.index,
        place.length,
        made.prompt.removesuffix(prefix),
        prefix,
        (made.key,),
        target,
        max_new_tokens=passkey.MAX_NEW_TOKENS,
        tokens=made.tokens,
        # In context: a tokenizer may write the key otherwise when it stands alone.
        target_tokens=count(made.prompt + target) - made.tokens,
        depth=depth,
    )


_NIAH = {
    name: Task(niah.build, needs="haystack" if setup.haystack == "essay" else None)
    for name, setup in niah.SETUPS.items()
}
RULER: dict[str, Task] = {
    **_NIAH,
    "vt": Task(variable_tracking.build),
    "cwe": Task(word_extraction.build_cwe, has_depth=False),
    "fwe": Task(word_extraction.build_fwe, has_depth=False),
    "qa_1": Task(qa.build, scoring.any_reference, "qa"),
    "qa_2": Task(qa.build, scoring.any_reference, "qa"),
}
TASKS: dict[str, Task] = {
    "passkey": Task(_passkey, scoring.first_integer),
    "copy_distance": Task(copy_distance.build, scoring.words_in_place),
    **RULER,
}


def find_task(name: str) -> Task:
    """The task `name`, or the error that names the nearest one."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def missing_file(name: str, *, haystack: object = None, qa: object = None) -> str | None:
    """Why the task cannot be built without a file of the user's, or None where it can."""
    needs = find_task(name).needs
    if needs is None or (needs == "haystack" and haystack) or (needs == "qa" and qa):
        return None
    wanted = sources.HAYSTACK_FORMAT if needs == "haystack" else sources.QA_FORMAT
    return f"{name} needs a file of yours, {needs}=FILE: {wanted}; nothing is downloaded (ruler_no_files needs none)"


def _sources(task: Task, haystack: str | Path | None, qa: str | Path | None) -> tuple[str, dict[str, Any]]:
    """The digest of the file that the task is made from, and what `build` is given of it."""
    if task.needs == "haystack" and haystack is not None:
        text = sources.read_text(haystack, "haystack")
        return hashlib.sha256(text.encode()).hexdigest(), {"essay": sources.essay_sentences(text)}
    if task.needs == "qa" and qa is not None:
        text = sources.read_text(qa, "qa")
        return hashlib.sha256(text.encode()).hexdigest(), {"questions": sources.questions(text)}
    return "", {}


def _make(
    name: str, task: Task, count: Counter, length: int, num_samples: int, seed: int, extra: Any
) -> list[Document]:
    made: list[Document] = []
    for i in range(num_samples):
        depth = {"depth": DEPTHS[i % len(DEPTHS)]} if task.has_depth else {}
        rng = random.Random(f"{name}/{seed}/{length}/{i}")
        document = task.build(Place(name, i, length), count, rng=rng, **depth, **extra)
        made += [document] if isinstance(document, Document) else document
    return made


def documents(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    haystack: str | Path | None = None,
    qa: str | Path | None = None,
    cache: bool = True,
) -> list[Document]:
    """`num_samples` documents of at most `length` tokens, prompt, specials and answer together.

    `copy_distance` has a control beside each. With `cache` they are kept in the user's cache folder.

    Raises:
        UnknownNameError: no such task; names the nearest.
        OptionError: `length` is too short (says the minimum), a number below 1, a file missing or not as it should be.
        CheckpointError: a file that cannot be read.
    """
    task = find_task(name)
    for option, value in (("length", length), ("num_samples", num_samples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{option}={value!r}: give a whole number of at least 1")
    reason = missing_file(name, haystack=haystack, qa=qa)
    if reason is not None:
        raise OptionError(reason)
    digest, extra = _sources(task, haystack, qa)
    make = partial(_make, name, task, counter(tokenizer), length, num_samples, seed, extra)
    if not cache:
        return make()
    key = {"task": name, "length": length, "seed": seed, "num_samples": num_samples, "source": digest}
    return cached({**key, "tokenizer": tokenizer_hash(tokenizer)}, make)


def parse_lengths(lengths: int | str | Iterable[Any]) -> list[int]:
    """`4096,16384`, 4096 or a sequence as lengths in tokens, ascending, each once."""
    items: Any = [lengths] if isinstance(lengths, int) else lengths
    try:
        found = sorted({int(item) for item in (items.split(",") if isinstance(items, str) else items)})
    except (TypeError, ValueError) as error:
        raise OptionError(f"lengths {lengths!r} are not whole numbers of tokens (for example 4096,16384)") from error
    if not found or found[0] < 1:
        raise OptionError(f"lengths {lengths!r}: give whole numbers of tokens (for example 4096,16384)")
    return found
