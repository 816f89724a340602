"""Documents built to a size in tokens, in a few tokenizer calls, from text that comes sentence by sentence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.errors import OptionError

from .passkey import Counter, fill_to_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """One prompt, `input + answer_prefix`, with its references and its exact size.

    `tokens` counts the prompt as the tokenizer encodes it, specials included; `tokens + max_new_tokens <= length`.
    `target` is a right continuation of the prompt, of `target_tokens` tokens. `depth` is the share of the context that
    stands before the answer, 0 (first) to 1 (last), None where the answer is everywhere. `distance` is the number of
    tokens back to what is to be copied; a `control` has nothing to copy from.
    """

    task: str
    index: int
    length: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    target: str
    max_new_tokens: int
    tokens: int
    target_tokens: int
    depth: float | None = None
    distance: int | None = None
    control: bool = False

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix


def counter(tokenizer: PreTrainedTokenizerBase) -> Counter:
    """Counts tokens the way the model will see a text: with the specials that the tokenizer adds."""

    def count(text: str) -> int:
        # verbose=False: a tokenizer's own warning about long inputs says nothing about the model at hand.
        return len(tokenizer(text, verbose=False)["input_ids"])

    return count


class Stream:
    """Sentences on demand, each with the separator that follows it; sized in words, the last sentence cut to fit.

    A word is a finer step than a sentence: with it a document of any tokenizer comes within a few tokens of its length.
    """

    def __init__(self, sentences: Iterator[str]) -> None:
        self._source = sentences
        self._sentences: list[str] = []
        self._ends: list[int] = []

    def take(self, words: int) -> list[str]:
        """The first `words` words as a list of sentences."""
        if words < 1:
            return []
        while not self._ends or self._ends[-1] < words:
            made = next(self._source)
            self._sentences.append(made)
            self._ends.append((self._ends[-1] if self._ends else 0) + len(made.split()))
        at = bisect_left(self._ends, words)
        if self._ends[at] == words:
            return self._sentences[: at + 1]
        rest = words - (self._ends[at - 1] if at else 0)
        return [*self._sentences[:at], " ".join(self._sentences[at].split()[:rest]) + "\n"]


def insert(sentences: Sequence[str], placed: Sequence[tuple[float, str]]) -> str:
    """One text of `sentences` with each string of `placed` at its depth (0 ... 1) of them; equal depths keep order."""
    pieces: list[str] = []
    done = 0
    for depth, text in sorted(placed, key=lambda item: item[0]):
        at = round(depth * len(sentences))
        pieces += [*sentences[done:at], text]
        done = at
    return "".join([*pieces, *sentences[done:]]).rstrip()


@dataclass(frozen=True)
class Place:
    """Which document is to be built."""

    task: str
    index: int
    length: int


@dataclass(frozen=True)
class Answer:
    """How the answer begins (part of the prompt), what counts as right, a right continuation, and its least room."""

    prefix: str
    outputs: Sequence[str]
    target: str
    max_new_tokens: int


def finish(
    place: Place, answer: Answer, render: Callable[[int], str], count: Counter, depth: float | None = None
) -> Document:
    """The largest document of at most `place.length` tokens: `render(n)` is the input with n words of padding.

    The answer is given at least its `max_new_tokens`, and as many more as its target needs with this tokenizer.

    Raises:
        OptionError: the length has no room for the prompt without padding; says the smallest that has.
    """
    bare = count(render(0) + answer.prefix)
    target_tokens = count(render(0) + answer.prefix + answer.target) - bare
    room = max(answer.max_new_tokens, target_tokens)
    if bare + room > place.length:
        raise OptionError(
            f"length={place.length} is too short for {place.task}: with this tokenizer its prompt without padding has "
            f"{bare} tokens and the answer {room}, so give at least {bare + room}"
        )
    prompt, tokens = fill_to_size(lambda n: render(n) + answer.prefix, count, place.length - room)
    return Document(
        place.task,
        place.index,
        place.length,
        prompt.removesuffix(answer.prefix),
        answer.prefix,
        tuple(answer.outputs),
        answer.target,
        max_new_tokens=room,
        tokens=tokens,
        target_tokens=target_tokens,
        depth=depth,
    )
