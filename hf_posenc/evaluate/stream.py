"""A long text to score, read in blocks: its tokens and its digest, in memory that does not grow with it."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import CheckpointError, OptionError
from hf_posenc.evaluate.stitch import OVERLAP, token_blocks

BLOCK = 1 << 18
"""Size of a block: bytes of a file, or characters of a text in memory."""


def read_text(path: Path, name: str, block: int = BLOCK, digest: Any = None) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of about `block` bytes; each read goes to `digest.update`, if any.

    Raises:
        CheckpointError: the file cannot be read.
        OptionError: it is not UTF-8; with the number of the first byte, from 0, that cannot be decoded.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    at, first = 0, True
    try:
        with path.open("rb") as file:
            while True:
                raw = file.read(block)
                if digest is not None:
                    digest.update(raw)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(raw, final=not raw)
                except UnicodeDecodeError as error:
                    where = at - pending + error.start
                    raise OptionError(f"the text {name} is not UTF-8: byte {where} cannot be decoded") from error
                at += len(raw)
                if text and first:
                    first, text = False, text.removeprefix("\ufeff")  # a byte order mark is none of the text's
                if text:
                    yield text
                if not raw:
                    return
    except OSError as error:
        raise CheckpointError(f"cannot read the text {path}: {error.strerror or error}") from error


def _some(texts: Iterator[str], name: str) -> Iterator[str]:
    """`texts` as they are; an error at their end where all of it was blank."""
    blank = True
    for text in texts:
        blank = blank and not text.strip()
        yield text
    if blank:
        raise OptionError(f"the text {name} is empty")


class TextSource:
    """A text to score, of any length: where it came from, the digest of its UTF-8 bytes, and its tokens.

    A file is read in blocks, as far as it is needed, and never held as a whole.
    """

    def __init__(self, text: str | Path, *, name: str | None = None, block: int = BLOCK) -> None:
        """A path to a UTF-8 file, or the text itself; `name` is for messages and reports."""
        self.name = name or (text.name if isinstance(text, Path) else "text")
        self._text, self._block = text, block
        self._sha256: str | None = None

    @classmethod
    def of(cls, text: str | Path | TextSource) -> TextSource:
        """A source as it is, anything else as one; `OptionError` for the name of a file given as a text."""
        if isinstance(text, str) and os.path.isfile(text):  # Path(text) would raise for a whole text
            raise OptionError(f"text={text!r} is a file's name, and a string is the text itself; give Path({text!r})")
        return text if isinstance(text, TextSource) else cls(text)

    def check(self) -> None:
        """Raise, before a model is loaded, for a file that cannot be read, is empty or not UTF-8; reads it once."""
        for _ in _some(self._texts(self._block), self.name):
            pass

    def sha256(self) -> str:
        """SHA-256 of the UTF-8 bytes, in hexadecimal; reads what has not been read to its end before."""
        if self._sha256 is None:
            for _ in self._texts(self._block):
                pass
        assert self._sha256 is not None
        return self._sha256

    def _texts(self, block: int) -> Iterator[str]:
        """The text in pieces; at its end the digest is known."""
        digest = hashlib.sha256()
        if isinstance(self._text, Path):
            yield from read_text(self._text, self.name, block, digest)
        else:
            for at in range(0, len(self._text), block):
                piece = self._text[at : at + block]
                try:
                    digest.update(piece.encode())
                except UnicodeEncodeError as error:
                    where = at + error.start
                    raise OptionError(f"the text {self.name} is not Unicode: character {where} stands alone") from error
                yield piece
        self._sha256 = digest.hexdigest()

    def blocks(self, tokenizer: Any, *, block: int | None = None, overlap: int = OVERLAP) -> Iterator[Tensor]:
        """All tokens, special ones too, as int64 tensors in order, in memory that does not grow with the text.

        Raises:
            CheckpointError: the file cannot be read.
            OptionError: the text is empty or not UTF-8.
        """
        return token_blocks(_some(self._texts(block or self._block), self.name), tokenizer, overlap=overlap)

    def all_tokens(self, tokenizer: Any) -> Tensor:
        """All tokens, (n,) int64: what the tokenizer makes of the whole text, special tokens too."""
        return torch.cat(list(self.blocks(tokenizer)))

    def tokens(self, tokenizer: Any, n: int) -> Tensor:
        """The first `n` tokens, or all where the text has fewer, (n,) int64; reads little more than they need."""
        found, missing = [], n
        for part in self.blocks(tokenizer, block=min(self._block, max(1 << 16, 4 * n))):
            found.append(part[:missing])
            missing -= len(found[-1])
            if missing <= 0:
                break
        return torch.cat(found)


def first_tokens(path: Path, tokenizer: Any, n: int) -> Tensor:
    """The first `n` tokens of a UTF-8 file, or all where it has fewer: see `TextSource.tokens`."""
    return TextSource(path).tokens(tokenizer, n)
