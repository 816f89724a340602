"""The documents of the long-context tasks: their sizes, their bytes, and what they say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_toys import make, odd_tokenizer, word_tokenizer, write_files
from tokenizers.processors import TemplateProcessing

from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.eval_tasks import niah, passkey, tasks

# The lengths at which both toy tokenizers have room for every task.
LENGTHS = (8000, 12345)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A haystack and a set of questions."""
    return write_files(tmp_path)


def test_the_thirteen_are_there() -> None:
    assert len(tasks.RULER) == 13
    assert [name for name, task in tasks.RULER.items() if task.needs is None] == [
        *("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    ]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tokenizer", [byte_tokenizer, word_tokenizer, odd_tokenizer])
@pytest.mark.parametrize("name", tasks.TASKS)
def test_sizes_are_exact_and_full(name: str, tokenizer: Callable[[], Any], length: int, files: dict[str, Any]) -> None:
    toy = tokenizer()
    for document in make(name, length, tokenizer=toy, **files):
        assert document.tokens == len(toy(document.prompt)["input_ids"])
        short = length - document.max_new_tokens - document.tokens
        assert 0 <= short <= 64
        assert document.target_tokens == len(toy(document.prompt + document.target)["input_ids"]) - document.tokens
        assert document.target_tokens <= document.max_new_tokens


@pytest.mark.parametrize("name", ["passkey", "niah_single_1", "vt", "copy_distance"])
def test_specials_count(name: str) -> None:
    toy = byte_tokenizer()
    end = toy.eos_token
    toy.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, toy.eos_token_id)]
    )
    for document in make(name, 2000, tokenizer=toy):
        assert document.tokens == len(document.prompt) + 2 <= 2000 - document.max_new_tokens


def test_few_tokenizer_calls(files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    counter = tasks.counter

    def counting(tokenizer: Any) -> Callable[[str], int]:
        count = counter(tokenizer)

        def counted(text: str) -> int:
            calls.append(len(text))
            return count(text)

        return counted

    monkeypatch.setattr(tasks, "counter", counting)
    for name in tasks.TASKS:
        calls.clear()
        made = make(name, 65536, 1, **files)
        assert len(calls) <= 12 * len(made), name


# One digest a task: the same bytes on every machine and in every version that says it has not changed them.
DIGESTS = {
    "passkey": "37d3f3c50a2c",
    "copy_distance": "412a3f0b67e1",
    "niah_single_1": "f7dc498fdfb8",
    "niah_single_2": "37c81ac5b4ca",
    "niah_single_3": "b2ff07fea3e4",
    "niah_multikey_1": "ad84c0f09f8a",
    "niah_multikey_2": "e7f555b68f68",
    "niah_multikey_3": "63a4d3562522",
    "niah_multivalue": "39af444df8c2",
    "niah_multiquery": "dc276acfb835",
    "vt": "d6c7e864bc65",
    "cwe": "58a39a1665a4",
    "fwe": "46e51f5e30cc",
    "qa_1": "5eb83bf9928d",
    "qa_2": "6994b201ae2b",
}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_bytes_are_the_same_on_every_machine(name: str, files: dict[str, Any]) -> None:
    text = "\n".join(document.prompt + document.target for document in make(name, 4096, 3, **files))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == DIGESTS[name]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_document_depends_on_its_seed_length_and_index_alone(name: str, files: dict[str, Any]) -> None:
    six = make(name, 3000, 6, **files)
    each = 2 if name == "copy_distance" else 1
    assert make(name, 3000, 2, **files) == six[: 2 * each]
    assert len({document.prompt for document in six}) == 6 * each
    assert make(name, 3000, 1, seed=1, **files)[0].prompt != six[0].prompt
    if tasks.TASKS[name].has_depth:
        assert [document.depth for document in six[::each]] == [*passkey.DEPTHS, passkey.DEPTHS[0]]
    else:
        assert {document.depth for document in six} == {None}


@pytest.mark.parametrize("name", [n for n, t in tasks.TASKS.items() if t.has_depth])
def test_depths_are_where_they_are_said_to_be(name: str, files: dict[str, Any]) -> None:
    each = 2 if name == "copy_distance" else 1
    places = []
    for document in make(name, 6000, 5, **files)[::each]:
        wanted = {"vt": f"VAR {document.outputs[0]} = ", "copy_distance": "Once: "}.get(name, document.outputs[0])
        places.append(document.input.index(wanted) / len(document.input))
    assert places == sorted(places)
    # vt has a solved example before its context, qa its task twice.
    assert places[0] < 0.3 and places[-1] > 0.75


@pytest.mark.parametrize("name", niah.SETUPS)
def test_every_needle_that_is_asked_for_is_there_once(name: str, files: dict[str, Any]) -> None:
    setup = niah.SETUPS[name]
    for document in make(name, 3000, 4, **files):
        assert len(document.outputs) == setup.queries * setup.values
        for value in document.outputs:
            assert document.prompt.count(f" is: {value}.") == 1
        keys = set(re.findall(r"for (\S+) is: ", document.input))
        assert len(keys) == setup.keys if setup.haystack != "needle" else len(keys) > 20
        asked = document.input.rpartition("?")[0].rpartition(" for ")[2]
        assert sum(key in asked for key in keys) == setup.queries


def test_chain_of_variables_can_be_followed() -> None:
    for document in make("vt", 2000, 4):
        value = document.prompt.rpartition("assigned the value ")[2].split(",")[0]
        context = document.input.rpartition("Memorize")[2]
        variables = re.findall(rf"VAR (\w+) = {value}\n", context)
        for new, old in re.findall(r"VAR (\w+) = VAR (\w+)\n", context):
            assert old == variables[-1]
            variables.append(new)
        assert tuple(variables) == document.outputs and len(variables) == 5


@pytest.mark.parametrize("length", [2000, 6000])
def test_common_and_frequent_words_are_so(length: int) -> None:
    from collections import Counter

    common = make("cwe", length, 1)[0]
    numbers = Counter(re.findall(r"\d+\. (\S+)", common.input.rpartition("Below is")[2]))
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    assert {numbers[word] for word in common.outputs} == {often}
    assert {n for word, n in numbers.items() if word not in common.outputs} == {seldom}
    frequent = make("fwe", length, 1)[0]
    ranks = Counter(frequent.input.partition("coded words. ")[2].partition("\n")[0].split()).most_common(5)
    assert ranks[0][0] == "..." and tuple(word for word, _ in ranks[1:4]) == frequent.outputs
    assert ranks[3][1] > ranks[4][1]


def test_what_is_copied_stands_once_before_and_not_in_the_control() -> None:
    copies, controls = make("copy_distance", 4096, 5)[::2], make("copy_distance", 4096, 5)[1::2]
    assert all(document.prompt.count(document.outputs[0]) == 1 and not document.control for document in copies)
    assert all(document.outputs[0] not in document.prompt and document.control for document in controls)
    distances = [document.distance or 0 for document in copies]
    assert distances == sorted(distances, reverse=True) and distances[0] > 3900 and distances[-1] < 30
