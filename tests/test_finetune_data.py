"""What a row is made of: sources, cutting, packing, skipping; and the rules of masks that keep documents apart."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import HOSTS, assert_same, difference, logits
from tiny import LENGTH, tiny_ids, tiny_model
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.demo.train import END_ID, byte_tokenizer
from hf_posenc.errors import OptionError
from hf_posenc.finetuning.collator import Collator
from hf_posenc.finetuning.settings import DataSettings
from hf_posenc.finetuning.sources import open_source
from hf_posenc.finetuning.windows import Row, Windows, packed_row, scattered, skipping

TOKENIZER = byte_tokenizer()
ENCODINGS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic_yarn": {},
    "alibi": {},
    "sinusoidal": {},
    "learned": {"max_position_embeddings": 4 * LENGTH},
}


def patched(host: str, name: str) -> Any:
    options = dict(ENCODINGS[name])
    if host == "bloom" and "yarn" in name:
        options["original_max_position_embeddings"] = LENGTH
    return patch_model(tiny_model(host), name, **options)


def rows(texts: list[str], count: int, seed: int = 0, target: int | None = None, **settings: Any) -> list[Row]:
    data = DataSettings.of({"max_length": 16, "shuffle": 1, **settings})
    return list(itertools.islice(Windows(open_source(texts, data), TOKENIZER, data, seed, target), count))


def text(ids: Tensor) -> str:
    return "".join("|" if i == END_ID else chr(i) for i in ids.tolist())


def test_documents_are_cut_one_after_another() -> None:
    made = rows(["The first one.", "  ", "And a second one."], 3)
    assert [text(row["input_ids"]) for row in made] == ["The first one.|A", "nd a second one.", "The first one.|A"]
    assert all(torch.equal(row["labels"], row["input_ids"]) and set(row) == {"input_ids", "labels"} for row in made)


def test_packed_positions_restart_and_no_document_predicts_another() -> None:
    [row] = rows(["abc", "defgh", "ij", "kl"], 1, mode="packed")
    assert text(row["input_ids"]) == "abc|defgh|ij|kl|"
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]
    assert [i for i, label in enumerate(row["labels"].tolist()) if label == -100] == [0, 4, 10, 13]
    assert "attention_mask" not in row, "a mask would hide the restarts"
    long = rows(["a" * 20, "b" * 11], 2, mode="packed")
    assert long[1]["position_ids"].tolist()[:6] == [0, 1, 2, 3, 4, 0], "the rest of a document begins anew"


def test_skips_ascend_within_the_target_and_carry_a_mask() -> None:
    for seed in range(50):
        at = skipping(random.Random(seed), 16, 64, 3)
        steps = at.diff()
        assert at[0] == 0 and at[-1] < 64 and (steps >= 1).all() and (steps > 1).sum() <= 2
    reach = [int(skipping(random.Random(seed), 16, 64, 2)[-1]) for seed in range(200)]
    assert max(reach) == 63 and min(reach) == 15, "the whole range is drawn from, both ends included"
    [row] = rows(["x" * 40], 1, mode="pose", target=64)
    assert row["attention_mask"].tolist() == [1] * 16 and torch.equal(row["labels"], row["input_ids"])


def test_randomised_positions_ascend_within_the_target_and_carry_a_mask() -> None:
    drawn = torch.stack([scattered(random.Random(seed), 16, 64) for seed in range(400)])
    assert (drawn.diff(dim=1) >= 1).all() and drawn.min() == 0 and drawn.max() == 63
    counts = drawn.flatten().bincount(minlength=64)
    assert len(counts) == 64 and counts.min() > 60, "every position is as likely: 100 of 400"
    assert torch.equal(scattered(random.Random(3), 16, 16), torch.arange(16))
    one, two = rows(["x" * 40], 2, mode="randomized", target=64)
    for row in (one, two):
        assert row["attention_mask"].tolist() == [1] * 16 and torch.equal(row["labels"], row["input_ids"])
        assert len(row["position_ids"]) == 16
    assert not torch.equal(one["position_ids"], two["position_ids"])


def test_a_tasks_documents_label_the_answer() -> None:
    made = [*itertools.islice(Windows(None, TOKENIZER, DataSettings(("task:passkey",), 160), 3), 60)]
    assert {len(row["input_ids"]) for row in made} != {160} and max(len(row["input_ids"]) for row in made) <= 160
    for row in made:
        answer = row["input_ids"][row["labels"] != -100]
        assert len(answer) == 6 and text(answer).strip() in text(row["input_ids"][:-6])
    batch = Collator(END_ID)(made[:4])
    assert batch["labels"][batch["attention_mask"] == 0].unique().tolist() in ([], [-100])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, max(len(r["input_ids"]) for r in made[:4]))


def test_a_stream_is_a_function_of_its_seed() -> None:
    texts = [f"This is document number {i}." for i in range(30)]
    one, two, other = (rows(texts, 40, seed=seed, shuffle=8) for seed in (1, 1, 2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, two))
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other))
    in_order = {text(row["input_ids"]) for row in rows(texts, 53)}
    assert {text(row["input_ids"]) for row in one} <= in_order


def read(name: Any, **settings: Any) -> list[tuple[str, bool, bool]]:
    data = DataSettings.of({"source": str(name), "max_length": 8, **settings})
    return [tuple(piece) for piece in open_source(None, data).read()]


def test_sources(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three", "n": 1}\n\n{"text": "four"}\n')
    (tmp_path / "c.json").write_text(json.dumps([{"body": "five"}, {"body": "six"}]))
    (tmp_path / "texts").mkdir()
    for name in ("2.txt", "1.md"):
        (tmp_path / "texts" / name).write_text(name)
    assert read(tmp_path / "a.txt") == [("one\ntwo\n", True, True)]
    assert [piece[0] for piece in read(tmp_path / "b.jsonl")] == ["three", "four"]
    assert [piece[0] for piece in read(tmp_path / "c.json", column="body")] == ["five", "six"]
    assert [piece[0] for piece in read(tmp_path / "texts")] == ["1.md", "2.txt"]
    table = datasets.Dataset.from_dict({"text": ["seven", "eight"]})
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "d.parquet")
    for name in ("saved", "d.parquet"):
        assert [piece[0] for piece in read(tmp_path / name)] == ["seven", "eight"]
    for held in (table, table.to_iterable_dataset(), ["seven", "eight"]):
        assert [piece.text for piece in open_source(held, DataSettings(max_length=8)).read()] == ["seven", "eight"]


def test_a_long_text_is_read_in_parts_of_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.finetuning.sources.BLOCK", 10)
    (tmp_path / "a.txt").write_text("first line\nsecond\nthird one\nend")
    pieces = read(tmp_path / "a.txt")
    assert "".join(piece[0] for piece in pieces) == "first line\nsecond\nthird one\nend" and len(pieces) > 1
    assert [piece[1] for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert [piece[2] for piece in pieces] == [*[False] * (len(pieces) - 1), True]


def grads(model: Any, checkpointing: bool, **inputs: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch, summed over its labels."""
    model.train()
    model.config.use_cache = False  # as the Trainer sets it; with a cache, restarts would not be seen
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    model.zero_grad()
    labels = inputs.pop("labels")
    out = model(**inputs).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_grads(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=2e-5 * largest)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("host", HOSTS)
def test_packed_is_separate_documents_in_loss_and_gradients(host: str, name: str) -> None:
    model = patched(host, name)
    lengths = (23, 1, 40)
    documents = [tiny_ids(n, seed=n) for n in lengths]
    first = torch.zeros(sum(lengths), dtype=torch.bool)
    first[[0, 23, 24]] = True
    batch = Collator()([packed_row(torch.cat(documents, dim=1)[0], first)] * 2)
    loss, found = grads(model, False, **batch)
    again, checkpointed = grads(model, True, **batch)
    alone = [grads(model, False, input_ids=ids, labels=ids) for ids in documents if ids.shape[1] > 1]
    assert loss == pytest.approx(2 * sum(each[0] for each in alone), rel=1e-5) == again
    assert_equal_grads(found, {key: 2 * sum(each[1][key] for each in alone) for key in alone[0][1]})
    assert_equal_grads(checkpointed, found)
    whole = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    leaking, _ = grads(model, False, **whole, labels=batch["labels"])
    assert abs(leaking - loss) > 1e-2, "the test would see a leak"


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("host", HOSTS)
def test_a_skip_is_seen_across_and_moves_positions(host: str, name: str) -> None:
    model, ids = patched(host, name), tiny_ids(30)
    at = torch.arange(30) + 70 * (torch.arange(30) >= 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": at[None]}
    want = logits(model, ids, attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % 90
    moved = logits(model, other, attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
    assert difference(moved[:, 12:], want[:, 12:]) > 1e-4, "what stands after the skip sees what stands before"
    plain = logits(model, ids, attention_mask=batch["attention_mask"])
    assert_same(want[:, :12], plain[:, :12])
    assert difference(want[:, 12:], plain[:, 12:]) > 1e-3, "the skip counts"
    _, straight = grads(model, False, **batch, labels=ids)
    _, checkpointed = grads(model, True, **batch, labels=ids)
    assert_equal_grads(checkpointed, straight)


@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_no_text(texts: list[str]) -> None:
    with pytest.raises(OptionError, match="no text"):
        rows(texts, 1)


def test_less_text_than_one_window() -> None:
    for mode in ("concat", "packed"):
        with pytest.raises(OptionError, match="texts has 6 tokens, less than one window of 16"):
            rows(["ab", "cd"], 1, mode=mode)


def test_workers_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"This is document number {i}." for i in range(30)]
    alone = [text(row["input_ids"]) for row in rows(texts, 12)]
    for worker in (0, 1, 2):
        info = SimpleNamespace(id=worker, num_workers=3)
        monkeypatch.setattr("hf_posenc.finetuning.windows.get_worker_info", lambda info=info: info)
        assert [text(row["input_ids"]) for row in rows(texts, 4)] == alone[worker::3]
