"""Tokens of a text in blocks against the tokens of the whole, for every kind of tokenizer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming import TOKENIZERS, odd_text

from hf_posenc.errors import CheckpointError, OptionError
from hf_posenc.evaluate import stream
from hf_posenc.evaluate.memory import peak_memory
from hf_posenc.evaluate.stitch import token_blocks
from hf_posenc.evaluate.stream import TextSource, first_tokens, read_text

_made: dict[str, Any] = {}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each trained once a process."""
    if request.param not in _made:
        _made[request.param] = TOKENIZERS[request.param]()
    return _made[request.param]


def cut(text: str, seed: int, longest: int) -> Iterator[str]:
    """`text` in pieces of random lengths."""
    draw = random.Random(seed)
    while text:
        size = draw.randint(1, longest)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize(("longest", "overlap"), [(2500, 500), (900, 100), (300, 20)])
def test_blocks_are_the_whole_whatever_the_cuts(tokenizer: Any, longest: int, overlap: int) -> None:
    for seed in range(12):
        text = odd_text(seed + 100, 5000)
        parts = list(token_blocks(cut(text, seed, longest), tokenizer, overlap=overlap))
        assert torch.cat(parts).tolist() == tokenizer(text)["input_ids"], seed
    assert len(parts) > 1


@pytest.mark.parametrize("run", [" ", "\n", " \n", "7", "123", "🙂", "a", "the ", "e\u0301"])
def test_runs_that_are_longer_than_a_block(tokenizer: Any, run: str) -> None:
    text = "the river of " + run * 1500 + " the lantern. " * 100
    parts = token_blocks(cut(text, 0, 700), tokenizer, overlap=50)
    assert torch.cat(list(parts)).tolist() == tokenizer(text)["input_ids"]


def test_a_first_block_of_blanks_alone(tokenizer: Any) -> None:
    text = " " * 30 + odd_text(8, 1500)
    parts = token_blocks(iter([text[:20], text[20:]]), tokenizer, overlap=200)
    assert torch.cat(list(parts)).tolist() == tokenizer(text)["input_ids"]


def test_a_file_in_blocks_of_a_few_bytes(tokenizer: Any, tmp_path: Path) -> None:
    text = odd_text(7, 3000)
    (tmp_path / "text.txt").write_bytes(text.encode())
    whole = tokenizer(text)["input_ids"]
    source = TextSource(tmp_path / "text.txt", block=333)
    assert source.all_tokens(tokenizer).tolist() == whole
    for n in (0, 1, 2, 150, len(whole) - 1, len(whole), len(whole) + 5):
        assert source.tokens(tokenizer, n).tolist() == whole[:n]


def test_a_text_in_memory_is_the_same_as_its_file(tmp_path: Path) -> None:
    text, tokenizer = odd_text(3, 2000), TOKENIZERS["bytes"]()
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    digest = hashlib.sha256(text.encode()).hexdigest()
    for source in (TextSource(text), TextSource(path), TextSource(path, name="mine", block=7)):
        assert source.sha256() == digest
        assert source.all_tokens(tokenizer).tolist() == list(text.encode())
        assert TextSource.of(source) is source
    assert (TextSource(text).name, TextSource(path).name, source.name) == ("text", "text.txt", "mine")


def test_the_digest_is_made_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Some words. " * 50)
    source = TextSource(path, block=100)
    source.all_tokens(TOKENIZERS["bytes"]())
    monkeypatch.setattr(stream, "read_text", lambda *_: pytest.fail("read again"))
    assert source.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_few_tokens_need_few_bytes_and_no_block_is_tokenised_twice(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "long.txt", TOKENIZERS["gpt2"]()
    path.write_text("The river goes past the old mill. " * 60_000)
    seen: list[int] = []

    class Counting:
        is_fast, backend_tokenizer = True, tokenizer.backend_tokenizer

        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return tokenizer(text, **options)

    found = first_tokens(path, Counting(), 1000)
    assert found.tolist() == tokenizer("The river goes past the old mill. " * 1000)["input_ids"][:1000]
    assert sum(seen) < 150_000
    seen.clear()
    assert len(TextSource(path).all_tokens(Counting())) > 100_000
    assert max(seen) < 300_000 and sum(seen) < 1.03 * path.stat().st_size


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "long.txt", TOKENIZERS["bytes"]()
    path.write_text("The river goes past the old mill. " * 60_000)
    with peak_memory(torch.device("cpu")) as peak:
        count = sum(len(part) for part in TextSource(path, block=1 << 15).blocks(tokenizer))
    assert count == path.stat().st_size
    # Some 400 bytes a token while it is at work: 800 MB for the whole text. None: a system that keeps no such mark.
    assert peak.bytes is None or peak.bytes < 80e6


def test_a_tokenizer_without_offsets_gets_the_whole_text_once() -> None:
    calls: list[str] = []

    def slow(text: str, verbose: bool) -> dict[str, list[int]]:
        calls.append(text)
        return {"input_ids": [0, *map(ord, text)]}

    text = "Some words. " * 20
    assert TextSource(text, block=50).all_tokens(slow).tolist() == [0, *map(ord, text)]
    assert calls == [text]


def test_a_text_that_is_one_word_for_a_model_that_cannot_be_joined_goes_whole() -> None:
    tokenizer, text = TOKENIZERS["unigram, one word"](), odd_text(5, 3000)
    tokenizer.backend_tokenizer.pre_tokenizer = None
    (part,) = token_blocks(cut(text, 0, 500), tokenizer)
    assert part.tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("raw", "byte"),
    [
        ("Grüße".encode("latin-1"), 2),
        ("日本🙂".encode() + b"\xff", 10),
        ("日本🙂".encode()[:-1], 6),
        (b"abc\xc3", 3),
        (b"a\xed\xa0\x80", 1),
    ],
)
def test_the_first_byte_that_is_not_utf8_is_named(raw: bytes, byte: int, block: int, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(raw)
    with pytest.raises(OptionError, match=rf"the text text\.txt is not UTF-8: byte {byte} cannot"):
        TextSource(path, block=block).all_tokens(TOKENIZERS["bytes"]())


def test_half_of_a_character_is_refused() -> None:
    with pytest.raises(OptionError, match="the text text is not Unicode: character 2 stands"):
        TextSource("ab\ud83d", block=2).all_tokens(TOKENIZERS["bytes"]())


def test_text_is_read_as_it_stands_but_for_a_mark_of_its_order(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree\n\U0001f642"
    (tmp_path / "text.txt").write_bytes(text.encode())
    for block in (1, 2, 3, 100):
        assert "".join(read_text(tmp_path / "text.txt", "text", block)) == text.removeprefix("\ufeff")


@pytest.mark.parametrize("text", ["", " ", "\n \t\n" * 40])
def test_an_empty_text_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(text)
    for source in (TextSource(text), TextSource(tmp_path / "blank.txt", block=16)):
        with pytest.raises(OptionError, match=f"the text {source.name} is empty"):
            source.all_tokens(TOKENIZERS["bytes"]())
        with pytest.raises(OptionError, match="is empty"):
            source.tokens(TOKENIZERS["bytes"](), 1000)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the text"):
        TextSource(tmp_path / "none.txt").sha256()
    with pytest.raises(CheckpointError, match="cannot read the text"):
        first_tokens(tmp_path, TOKENIZERS["bytes"](), 4)
