"""The user's own texts: an essay to hide needles in, a set of questions with the documents that answer them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.errors import CheckpointError, OptionError

HAYSTACK_FORMAT = 'a UTF-8 text of essays, or JSON with the text under "text"'
QA_FORMAT = (
    'JSON or JSON lines of {"question": ..., "answers": [...], "documents": [...]}, '
    "or a SQuAD or HotpotQA file as published"
)


@dataclass(frozen=True)
class Question:
    """A question, its answers (aliases of one another) and the documents that it can be answered from."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def read_text(path: str | Path, option: str) -> str:
    """The text of a file that the user named with `option`; a `PosencError` says what is wrong with it."""
    file = Path(path).expanduser()
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"cannot read {option}={file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{option}={file} is not UTF-8: byte {error.start} cannot be decoded") from error
    if not text.strip():
        raise OptionError(f"{option}={file} is empty; give {HAYSTACK_FORMAT if option == 'haystack' else QA_FORMAT}")
    return text


def essay_sentences(text: str) -> list[str]:
    """The sentences of an essay file's content, blanks made single."""
    if text.lstrip().startswith("{"):
        try:
            text = str(json.loads(text)["text"])
        except (ValueError, KeyError) as error:
            raise OptionError(f"haystack: begins like JSON and is not {HAYSTACK_FORMAT} ({error})") from error
    return [part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]


def _squad(data: dict[str, Any]) -> list[Question]:
    return [
        Question(qa["question"], tuple(dict.fromkeys(a["text"] for a in qa["answers"])), (paragraph["context"],))
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if qa["answers"]
    ]


def _one(item: dict[str, Any]) -> Question:
    if "context" in item and "answer" in item:  # HotpotQA: [title, [sentence, ...]]
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in item["context"])
        return Question(item["question"], (item["answer"],), documents)
    return Question(item["question"], tuple(item["answers"]), tuple(item["documents"]))


def questions(text: str) -> list[Question]:
    """The questions of a file's content, over two documents or more, so that there is something to tell apart."""
    try:
        try:
            data = json.loads(text)
        except ValueError:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = _squad(data) if isinstance(data, dict) and "data" in data else [_one(item) for item in data]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"qa: not {QA_FORMAT} ({type(error).__name__}: {error})") from error
    if any(not (q.question.strip() and q.documents and all(q.answers) and q.answers) for q in found):
        raise OptionError(f"qa: every question needs a text, an answer and a document; give {QA_FORMAT}")
    if len({document for q in found for document in q.documents}) < 2 or len(found) < 2:
        raise OptionError(f"qa: at least 2 questions over 2 documents are needed, found {len(found)}; give {QA_FORMAT}")
    return found
