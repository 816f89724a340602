"""Tokenizers of every kind, trained on the spot, and texts that are hard to cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_posenc.demo.train import byte_tokenizer

LATIN = ["the", "of", "a", "in", "river", "lantern", "Strasse", "naïve", "cafés", "Übermut", "don't", "we'll"]
WORDS = [*LATIN, "ΑΒΓ", "жизнь", "東京", "ありがとう", "🙂", "👩\u200d👩\u200d👧", "e\u0301te\u0301"]
DIGITS = r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def odd_text(seed: int, size: int) -> str:
    """Words of several scripts among runs of blanks and newlines, long numbers, long words and special tokens."""
    draw = random.Random(seed)
    pieces: list[str] = []
    length = 0
    while length < size:
        kind = draw.random()
        if kind < 0.7:
            piece = draw.choice(WORDS) + " " * draw.choice([0, 1, 1, 1, 1, 2])
        elif kind < 0.78:
            piece = draw.choice(" \n\t\u00a0") * draw.randint(1, 40)
        elif kind < 0.84:
            piece = "".join(draw.choices("0123456789", k=draw.randint(1, 60)))
        elif kind < 0.9:
            piece = draw.choice(["ab", "ß", "-", "🙂", "é", "xyz"]) * draw.randint(1, 70)
        elif kind < 0.92:
            piece = draw.choice(["<s>", "</s>", "[CLS]", "\r\n", "\ufeff", "\u200d"])
        else:
            piece = draw.choice(".,;!?") + draw.choice([" ", "\n", "  "])
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)


def wrapped(tokenizer: Tokenizer, special: str | None = None) -> Any:
    """As Transformers has it; with `special`, a template that puts special tokens around a text."""
    if special is not None:
        marks = [(mark, tokenizer.token_to_id(mark)) for mark in special.split() if mark != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=special, special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def corpus() -> list[str]:
    return [odd_text(seed, 4000) for seed in range(3)]


def byte_level(pattern: str | None, prefix: bool) -> Any:
    """As GPT-2's, or with the pattern of Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if prefix:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return wrapped(tokenizer, None if prefix else "<s> $A")


def one_word() -> Any:
    """As Llama 2's: blanks are marks, the whole text is one word, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(marks)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=specials, show_progress=False, limit_alphabet=60, max_token_length=12
    )
    tokenizer.train_from_iterator([word for text in corpus() for word in text.split(" ")], trainer)
    return wrapped(tokenizer, "<s> $A")


def unigram(prepend: str, *, one_word: bool = False) -> Any:
    """As T5's: compatibility forms, runs of blanks made one; with `one_word` the whole text is one word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if one_word:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
        tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, normalizers.Replace(" ", "▁")])
    return wrapped(tokenizer, "$A </s>" if prepend == "first" else "<s> $A </s>")


def word_piece() -> Any:
    """As BERT's: lower case without accents; words of more than 100 characters are unknown."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False, limit_alphabet=70
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrapped(tokenizer, "[CLS] $A [SEP]")


def stripped() -> Any:
    """Cuts blanks off both ends of a text; a special token in the text takes the blanks before it."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "of": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", lstrip=True)])
    return wrapped(tokenizer)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_tokenizer,
    "gpt2": lambda: byte_level(None, prefix=False),
    "prefix space": lambda: byte_level(None, prefix=True),
    "llama3": lambda: byte_level(DIGITS, prefix=False),
    "one word": one_word,
    "unigram": lambda: unigram("always"),
    "unigram, first": lambda: unigram("first"),
    "unigram, one word": lambda: unigram("never", one_word=True),
    "word piece": word_piece,
    "stripped": stripped,
}
