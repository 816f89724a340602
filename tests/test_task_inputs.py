"""The tasks' files, options and cache, and how answers are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from task_toys import QUESTIONS, make, word_tokenizer, write_files
from tokenizers.processors import TemplateProcessing

from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.eval_tasks import scoring, tasks
from hf_posenc.eval_tasks.cache import cache_folder, tokenizer_hash
from hf_posenc.eval_tasks.sizing import Stream, insert


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A haystack and a set of questions."""
    return write_files(tmp_path)


@pytest.mark.parametrize(
    ("rule", "prediction", "references", "score"),
    [
        (scoring.share_of_references, "1. arthur 2. kilt", ["arthur", "kilt", "fire"], 2 / 3),
        (scoring.share_of_references, "ARTHUR\x00 and kilt", ["arthur", "Kilt"], 1.0),
        (scoring.share_of_references, "", ["arthur"], 0.0),
        (scoring.any_reference, "It was the King.", ["arthur", "the king", "king arthur"], 1.0),
        (scoring.any_reference, "nobody", ["arthur", "the king"], 0.0),
        (scoring.first_integer, " 12345.", ["12345"], 1.0),
        (scoring.first_integer, " 1 12345", ["12345"], 0.0),
        (scoring.words_in_place, " a b x d", ["a b c d"], 0.75),
        (scoring.words_in_place, "", ["a b"], 0.0),
    ],
)
def test_scores_of_handed_strings(rule: scoring.Rule, prediction: str, references: list[str], score: float) -> None:
    assert rule(prediction, references) == pytest.approx(score)


def test_stream_is_cut_at_a_word() -> None:
    stream = Stream(iter(["One two three. ", "Four five. ", "Six. "]))
    assert [stream.take(n) for n in (0, 2, 3)] == [[], ["One two\n"], ["One two three. "]]
    assert stream.take(4) == ["One two three. ", "Four\n"]
    assert insert(["a ", "b "], [(1.0, "z"), (0.5, "m "), (0.5, "n ")]) == "a m n b z"


def test_documents_are_kept_and_found_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = word_tokenizer()
    assert cache_folder() == own_cache
    first = tasks.documents("vt", toy, 2000, num_samples=3)
    (file,) = (own_cache / "documents").iterdir()
    assert file.name.startswith("vt-2000-")
    monkeypatch.setattr(tasks, "_make", lambda *_: pytest.fail("made anew"))
    assert tasks.documents("vt", toy, 2000, num_samples=3) == first
    monkeypatch.undo()
    monkeypatch.setenv("HF_POSENC_CACHE", str(own_cache))
    file.write_text("[{")
    assert tasks.documents("vt", toy, 2000, num_samples=3) == first
    assert json.loads(file.read_text())[0]["task"] == "vt"


def test_documents_need_no_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "file"))
    assert len(tasks.documents("vt", word_tokenizer(), 2000, num_samples=1)) == 1


def test_tokenizer_hash_forgets_padding_and_sees_specials() -> None:
    toy = byte_tokenizer()
    before = tokenizer_hash(toy)
    toy(["a", "bbb"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(toy) == before
    end = toy.eos_token
    toy.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, toy.eos_token_id)]
    )
    assert tokenizer_hash(toy) != before


@pytest.mark.parametrize("name", tasks.TASKS)
def test_too_short_says_the_least_length_that_is_enough(name: str, files: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least") as error:
        make(name, 8, 1, **files)
    least = int(str(error.value).rpartition("at least ")[2])
    with pytest.raises(ValueError, match="at least"):
        make(name, least // 2, 1, **files)
    # Another length draws other words, of which the toy may need a few more or less.
    assert make(name, least + 40, 1, **files)[0].tokens <= least + 40


@pytest.mark.parametrize("name", [n for n, t in tasks.TASKS.items() if t.needs])
def test_a_task_without_its_file_says_which(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name} needs a file of yours, {tasks.TASKS[name].needs}=FILE: .*(UTF|JSON)"
    ):
        make(name, 4096)


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("haystack", b"", "is empty"),
        ("haystack", b" \n", "is empty"),
        ("haystack", b"caf\xe9", "not UTF-8: byte 3"),
        ("haystack", b'{"txt": 1}', "text"),
        ("qa", b"", "is empty"),
        ("qa", b"no json", "JSON"),
        ("qa", b"[]", "at least 2 questions"),
        ("qa", b'[{"question": "a"}]', "answers"),
        ("qa", b'[{"question": "a", "answers": [], "documents": ["b"]}]', "needs a text, an answer"),
        ("qa", json.dumps(QUESTIONS[:1]).encode(), "at least 2 questions"),
        (None, b"", "cannot read"),
    ],
)
def test_files_that_are_not_right(option: str | None, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if option is not None:
        path.write_bytes(content)
    name = "qa_1" if option == "qa" else "niah_single_2"
    given: dict[str, Any] = {option or "haystack": path}
    with pytest.raises((ValueError, OSError), match=message):
        make(name, 4096, 1, **given)


def test_published_question_sets_are_read(tmp_path: Path) -> None:
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"Lamp {i} is kept by {i}.",
                        "qas": [
                            {"question": f"Who keeps {i}?", "answers": [{"text": "x"}, {"text": "x"}, {"text": "y"}]},
                            {"question": "Unanswerable?", "answers": [], "is_impossible": True},
                        ],
                    }
                    for i in range(2)
                ]
            }
        ]
    }
    hotpot = [
        {"question": f"Which {i}?", "answer": "yes", "context": [["A", ["One. ", "Two."]], [f"B{i}", ["Three."]]]}
        for i in range(2)
    ]
    for content, outputs in ((squad, ("x", "y")), (hotpot, ("yes",))):
        path = tmp_path / "set.json"
        path.write_text(json.dumps(content))
        assert make("qa_1", 1000, 1, qa=path)[0].outputs == outputs
    lines = tmp_path / "set.jsonl"
    lines.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    assert make("qa_2", 1000, 1, qa=lines)[0].outputs == ("keeper 0", "the 0th keeper")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pass_key", 4096), "did you mean 'passkey'"),
        (("passkey", 0), "length=0"),
        (("passkey", 4096, 0), "num_samples=0"),
    ],
)
def test_documents_refuse(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)


@pytest.mark.parametrize(
    ("given", "found"), [("4096,1024", [1024, 4096]), (512, [512]), (["512", 256, 512], [256, 512])]
)
def test_lengths(given: Any, found: list[int]) -> None:
    assert tasks.parse_lengths(given) == found


@pytest.mark.parametrize("given", ["", "4k", [], "0", None])
def test_lengths_refuse(given: Any) -> None:
    with pytest.raises(ValueError, match="lengths"):
        tasks.parse_lengths(given)
