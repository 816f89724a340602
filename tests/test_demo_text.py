"""The embedded text, the passkey generator and the checkpoints that ship."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_posenc.demo import MODEL_NAMES, ModelName, model_path
from hf_posenc.demo.train import byte_tokenizer, tail_perplexity, training_row, window
from hf_posenc.eval_tasks.passkey import (
    DEPTHS,
    MAX_NEW_TOKENS,
    fill_to_size,
    passkey_documents,
    passkey_prompt,
    passkey_score,
)
from hf_posenc.eval_tasks.text import document, sentences
from hf_posenc.evaluate.run_tasks import run_tasks

EVERY_BYTE = "".join(map(chr, range(256))) + "naïve ∑ 漢字 🙂 <s> [PAD]"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A toy of one id a word or mark that knows no word and adds nothing: only its counts matter here."""
    toy = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    toy.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=toy, unk_token="[UNK]")


def test_text_is_the_same_on_every_machine() -> None:
    text = "\n".join(document(seed, 2000) for seed in range(20)) + document(0, 500, split="held-out")
    assert document(0, 61) == "The number of Felix is 70611. What is the number of Felix? It"
    assert hashlib.sha256(text.encode("ascii")).hexdigest()[:16] == "4adfdc95efe52a11"


def test_longer_documents_continue_shorter_ones_and_splits_differ() -> None:
    assert document(5, 4096).startswith(document(5, 256))
    assert [len(document(5, n)) for n in (1, 97, 1000)] == [1, 97, 1000]
    assert all(document(i, 200) != document(i, 200, split="held-out") for i in range(50))


def test_stated_numbers_are_recalled_later() -> None:
    text = " ".join(islice(sentences(random.Random("facts"), max_facts=4), 200))
    numbers = [word.strip(".?") for word in text.split() if word.strip(".?").isdigit()]
    assert 1 <= len(set(numbers)) <= 4
    assert len(numbers) > 60


@pytest.mark.parametrize(("n_bytes", "split"), [(0, "train"), (10, "test")])
def test_document_refuses(n_bytes: int, split: str) -> None:
    with pytest.raises(ValueError, match=r"at least 1|held-out"):
        document(0, n_bytes, split=split)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_bytes", [48, 61, 127, 128, 200, 256])
def test_training_rows_have_the_asked_size(n_bytes: int) -> None:
    assert {len(training_row(seed, n_bytes)) for seed in range(40)} == {n_bytes}


def test_windows_grow_over_the_first_half() -> None:
    assert [window(p) for p in (0.0, 0.25, 0.5, 1.0)] == [48, 152, 256, 256]


@pytest.mark.parametrize("length", [128, 256, 1024, 5000])
@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_passkey_sizes_are_exact(make, length: int) -> None:
    tokenizer = make()
    for made in passkey_documents(tokenizer, length, num_samples=10):
        assert made.tokens == len(tokenizer(made.prompt)["input_ids"])
        short = length - MAX_NEW_TOKENS - made.tokens
        assert 0 <= short <= max(64, 0.05 * length)
        assert made.prompt.count(made.key) == 2
        assert made.prompt.startswith("Find the key.\n")
        assert made.prompt.endswith(" What is the pass key? The pass key is")


def test_passkey_counts_specials() -> None:
    tokenizer = byte_tokenizer()
    plain = passkey_documents(tokenizer, 300, 1)[0]
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    made = passkey_documents(tokenizer, 300, 1)[0]
    assert made.tokens == len(made.prompt) + 2 <= 290
    assert plain.tokens == len(plain.prompt)


def test_passkey_is_seeded_by_length_and_index_and_on_a_depth_grid() -> None:
    tokenizer = byte_tokenizer()
    ten = passkey_documents(tokenizer, 512, 10)
    assert passkey_documents(tokenizer, 512, 4) == ten[:4]
    assert [made.depth for made in ten] == [*DEPTHS, *DEPTHS]
    assert len({made.key for made in ten}) == 10
    assert passkey_documents(tokenizer, 512, 4, seed=1)[0].key != ten[0].key
    places = [made.prompt.index(made.key) / len(made.prompt) for made in ten[:5]]
    assert places == sorted(places)


def test_passkey_needs_few_tokenizer_calls() -> None:
    calls: list[int] = []

    def count(text: str) -> int:
        calls.append(len(text))
        return len(text)

    filler = ["The old boat waits." if i % 3 else "The quiet tower falls under the stars." for i in range(20000)]
    text, size = fill_to_size(lambda n: passkey_prompt(filler[:n], "12345", 0.5), count, 131072)
    assert size == len(text) > 131072 - 64
    assert len(calls) <= 12


def test_passkey_too_short_says_the_minimum() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="at least 120"):
        passkey_documents(tokenizer, 119)
    assert passkey_documents(tokenizer, 120, 1)[0].tokens == 110
    with pytest.raises(ValueError, match="num_samples"):
        passkey_documents(tokenizer, 256, 0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 12345. The", True),
        ("12345", True),
        (" 123456", False),
        (" 99999 12345", False),
        (" none", False),
        ("", False),
    ],
)
def test_passkey_score(text: str, right: bool) -> None:
    assert passkey_score(text, "12345") is right


def test_model_path_refuses() -> None:
    with pytest.raises(ValueError, match="llama"):
        model_path("lama")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_checkpoint_is_small_and_loads_stock(name: ModelName) -> None:
    folder: Path = model_path(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == name
    assert 1_000_000 <= model.num_parameters() <= 2_000_000
    assert model.dtype == torch.float32
    length = {"llama": "max_position_embeddings", "gpt2": "n_positions", "bloom": "seq_length"}[name]
    assert getattr(model.config, length) == 256
    assert model.generation_config.eos_token_id == 256
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_checkpoint_tokenizer_is_one_token_a_byte(name: ModelName) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path(name))
    assert tokenizer(EVERY_BYTE)["input_ids"] == list(EVERY_BYTE.encode())
    assert tokenizer.decode(list(EVERY_BYTE.encode())) == EVERY_BYTE
    assert tokenizer(f"a{tokenizer.eos_token}")["input_ids"] == [97, 256]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 256, 256)
    assert len(tokenizer) == 257


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_checkpoint_has_learned_its_text(name: ModelName) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(name)).eval()
    assert tail_perplexity(model, 256) < 2.0


# beta_fast: with 256 trained positions YaRN's own 32 turns are a wavelength of 8 tokens, which leaves it no fast pairs
CURVE = [
    ("none", {}, 256, 0.95, 1.0),
    ("none", {}, 512, 0.0, 0.05),
    ("none", {}, 1024, 0.0, 0.0),
    ("yarn", {"factor": 2, "beta_fast": 8}, 512, 0.9, 1.0),
    ("yarn", {"factor": 4, "beta_fast": 8}, 1024, 0.7, 1.0),
    ("yarn", {"factor": 4, "beta_fast": 12}, 512, 0.9, 1.0),
    ("yarn", {"factor": 4, "beta_fast": 12}, 1024, 0.7, 1.0),
]


@pytest.mark.parametrize(("name", "options", "length", "least", "most"), CURVE)
def test_llama_recalls_the_key_as_far_as_its_positions_go(
    name: str, options: dict[str, Any], length: int, least: float, most: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("llama")).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path("llama"))
    encoding = {} if name == "none" else {"encoding": name, "options": options}
    found = run_tasks(model, "passkey", length, tokenizer=tokenizer, batch_size=10, bars=False, **encoding)
    assert found is not None
    assert least <= found.tasks["passkey"].acc[length] <= most
