"""Perplexity against plain logits, the comparison's cells and refusals, passkey scoring, the report's files."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import report
from hf_posenc.demo import model_path
from hf_posenc.errors import (
    CheckpointError,
    OptionError,
    PosencError,
    ReachError,
    UnknownNameError,
    UnsupportedError,
)
from hf_posenc.evaluate import cells
from hf_posenc.evaluate.compare import compare, parse_lengths, run_comparison
from hf_posenc.evaluate.memory import is_out_of_memory, peak_memory
from hf_posenc.evaluate.passkey import passkey_accuracy
from hf_posenc.evaluate.perplexity import ppl, ppl_tail, table_reach, token_nll
from hf_posenc.evaluate.results import CompareRow, Comparison
from hf_posenc.evaluate.specs import EncodingSpec, parse_specs, resolve_specs

TEXT = "The number of Ada is 12345. The blue door moves under the stars. " * 4


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("llama"))


def plain_nll(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids.reshape(1, -1), use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids.flatten()[1:], reduction="none")


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 97 * 4, 1 << 26], ids=["one position", "ragged", "one block"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_nll_is_that_of_the_models_own_logits(model_type: str, chunk_bytes: int) -> None:
    model, ids = tiny_model(model_type), tiny_ids(31)
    assert torch.allclose(token_nll(model, ids, chunk_bytes=chunk_bytes), plain_nll(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_logits_that_are_scaled_or_capped_after_the_head(model_type: str, options: dict[str, Any]) -> None:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
    config = AutoConfig.for_model(model_type, **sizes, **special, num_key_value_heads=4, **options)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), tiny_ids(20)
    assert torch.allclose(token_nll(model, ids, chunk_bytes=999), plain_nll(model, ids), rtol=0, atol=1e-5)


def test_logits_altered_in_an_unknown_way_are_refused() -> None:
    model = tiny_model("llama")

    def doubled(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(doubled)
    with pytest.raises(UnsupportedError, match="after the head"):
        token_nll(model, tiny_ids(8))


def test_nll_of_a_patched_model_is_that_of_its_own_logits() -> None:
    model, ids = tiny_model("llama"), tiny_ids(60)
    with hf_posenc.patched(model, "yarn", factor=2):
        assert torch.allclose(token_nll(model, ids), plain_nll(model, ids), rtol=0, atol=1e-5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    model = tiny_model("llama")
    nn.init.zeros_(model.get_output_embeddings().weight)
    nll = token_nll(model, tiny_ids(23))
    assert nll.shape == (22,) and nll.dtype == torch.float32
    assert ppl(nll) == pytest.approx(97, rel=1e-6)
    assert ppl_tail(nll, 5) == pytest.approx(97, rel=1e-6)


def test_no_more_logits_than_a_block_exist_at_a_time() -> None:
    model, seen = tiny_model("llama"), []
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, out: seen.append(out.shape[1]))
    token_nll(model, tiny_ids(32), chunk_bytes=4 * 97 * 6)
    assert max(seen) == 6 and sum(seen) == 31 + 2  # every scored position once, and the last one twice for the check


def test_training_modes_come_back_module_by_module() -> None:
    model = tiny_model("llama").train()
    model.model.norm.eval()
    token_nll(model, tiny_ids(8))
    assert model.training and model.model.layers[0].training and not model.model.norm.training
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("ids", [torch.tensor([1]), torch.ones(2, 5, dtype=torch.long)])
def test_nll_wants_one_text_of_two_tokens(ids: Tensor) -> None:
    with pytest.raises(OptionError, match="one text"):
        token_nll(tiny_model("llama"), ids)


def test_ppl_tail_refuses_a_tail_longer_than_the_text() -> None:
    with pytest.raises(OptionError, match="from 1 to"):
        ppl_tail(torch.ones(4), 5)


def test_reach_of_a_learned_table() -> None:
    assert table_reach(tiny_model("gpt2")) == 32
    assert table_reach(tiny_model("llama")) is None and table_reach(tiny_model("bloom")) is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("none, linear", [("none", {}), ("linear", {})]),
        ("yarn:factor=4,beta_fast=16,linear", [("yarn", {"factor": 4, "beta_fast": 16}), ("linear", {})]),
        (
            "longrope:short_factor=[1,2],long_factor=[3, 4]",
            [("longrope", {"short_factor": [1, 2], "long_factor": [3, 4]})],
        ),
        ("learned:resize=cubic,factor=2,rope:", [("learned", {"resize": "cubic", "factor": 2}), ("rope", {})]),
        ("yarn:truncate=false,factor=2.5", [("yarn", {"truncate": False, "factor": 2.5})]),
    ],
)
def test_encodings_on_one_line(text: str, want: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse_specs(text) == [EncodingSpec(name, options) for name, options in want]


@pytest.mark.parametrize("text", ["", "factor=2,yarn", "yarn:factor", "yarn:factor=2,factor=3", "yarn,yarn"])
def test_encodings_that_cannot_be_read(text: str) -> None:
    with pytest.raises(OptionError):
        parse_specs(text)


def test_encoding_objects_and_labels() -> None:
    encoding = hf_posenc.get_encoding(hf_posenc.patch_model(tiny_model("llama"), "linear", factor=2))
    spec = parse_specs([encoding, "none"])[0]
    assert spec.name == "linear" and spec.options["factor"] == 2
    assert EncodingSpec("yarn", {"factor": 4.0}).label == "yarn (factor=4)"


def test_the_factor_goes_to_encodings_that_take_one_and_name_none() -> None:
    specs = resolve_specs(parse_specs("none,rope,linear,yarn:factor=8"), 4)
    assert [spec.options for spec in specs] == [{}, {}, {"factor": 4}, {"factor": 8}]


@pytest.mark.parametrize(
    ("text", "factor", "error", "says"),
    [
        ("none,yarm", 2, UnknownNameError, "did you mean 'yarn'"),
        ("non", None, UnknownNameError, "did you mean 'none'"),
        ("yarn:facto=2", None, UnknownNameError, "did you mean 'factor'"),
        ("none:factor=2", None, OptionError, "takes no options"),
        ("yarn:factor=0.5", None, OptionError, "factor"),
        ("yarn", math.nan, OptionError, "factor"),
        ("yarn:factor=big", None, PosencError, "factor"),
        ("none,rope", 2, OptionError, "no encoding here takes one: none, rope"),
    ],
)
def test_specs_that_are_refused(text: str, factor: float | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        resolve_specs(parse_specs(text), factor)


@pytest.mark.parametrize("lengths", ["", "8,x", "1", "8.5", [8.5], [True], []])
def test_lengths_that_are_refused(lengths: Any) -> None:
    with pytest.raises(OptionError, match="length"):
        parse_lengths(lengths)


def test_a_comparison_is_what_one_would_do_by_hand(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model("llama", vocab_size=264)
    made = run_comparison(
        model,
        tokenizer,
        "none,linear,dynamic_yarn",
        factor=2,
        lengths="48,24",
        text=TEXT,
        tail=8,
        out=tmp_path,
        progress=False,
    )
    assert [(row.encoding, row.length) for row in made.rows] == [
        (name, length) for name in ("none", "linear", "dynamic_yarn") for length in (24, 48)
    ]
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    for row in made.rows:
        with cells.apply(model, EncodingSpec(row.encoding, row.options)):
            nll = plain_nll(model, ids[: row.length])
        assert row.error is None and row.tokens == row.length - 1 == len(nll)
        assert row.ppl == pytest.approx(ppl(nll), rel=1e-5) and row.ppl_tail == pytest.approx(ppl(nll[-8:]), rel=1e-5)
    assert made.rows[0].options == {} and made.rows[2].options == {"factor": 2}
    assert hf_posenc.get_encoding(model) is None

    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert [row["ppl"] for row in stored["rows"]] == [row.ppl for row in made.rows]
    assert {"model", "model_type", "versions", "device", "dtype", "threads", "protocol", "date", "text"} <= set(
        stored["header"]
    )
    assert stored["header"]["text"]["tokens"] == len(ids) and len(stored["header"]["text"]["sha256"]) == 64
    with (tmp_path / "results.csv").open() as file:
        assert [json.loads(line["options"]) for line in csv.DictReader(file)] == [
            row["options"] for row in stored["rows"]
        ]
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_cell_past_a_tables_end_says_so_and_the_rest_goes_on(tokenizer: Any) -> None:
    model = tiny_model("gpt2", vocab_size=264)
    rows = compare(model, tokenizer, "none,rope,learned", lengths=[32, 40], text=TEXT, progress=False)
    errors = {(row.encoding, row.length): row.error for row in rows}
    for name in ("none", "learned"):
        assert errors[name, 32] is None and "32" in (errors[name, 40] or "")
    assert errors["rope", 40] is None
    assert next(row for row in rows if row.error).ppl is None


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory: …")]
)
def test_exhausted_memory_is_a_cells_error(error: Exception, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = token_nll

    def failing(model: Any, ids: Tensor) -> Tensor:
        if len(ids) == 40:
            raise error
        return real(model, ids)

    monkeypatch.setattr(cells, "token_nll", failing)
    rows = compare(
        tiny_model("llama", vocab_size=264), tokenizer, "none,rope", lengths=[40, 48], text=TEXT, progress=False
    )
    assert [row.error for row in rows] == ["out of memory at 40 tokens", None] * 2


def test_another_runtime_error_is_not_taken_for_a_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": [5000]}, "has 260 tokens; the longest length needs 5000"),
        ({"tail": 24}, "below the shortest length, 24"),
        ({"tail": 0}, "tail must be"),
        ({"text": " \n"}, "is empty"),
        ({"text": Path("no/such/file.txt")}, "cannot read the text"),
        ({"encodings": "none,yarm"}, "did you mean 'yarn'"),
        ({"encodings": "yarn:factor=2,original_max_position_embeddings=-3"}, "original_max_position_embeddings"),
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"dtype": "bfloat16"}, "model's own"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
    ],
)
def test_bad_input_is_refused_before_the_first_forward(
    change: dict[str, Any], says: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "token_nll", lambda *_: pytest.fail("a forward was run"))
    arguments = {"encodings": "none", "lengths": [24], "text": TEXT, "tokenizer": tokenizer, "progress": False} | change
    with pytest.raises(PosencError, match=says):
        compare(tiny_model("llama", vocab_size=264), **arguments)


def test_a_run_that_is_stopped_keeps_its_cells(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(model: Any, ids: Tensor) -> Tensor:
        if len(ids) == 40:
            raise KeyboardInterrupt
        return token_nll(model, ids)

    monkeypatch.setattr(cells, "token_nll", stopped)
    model = tiny_model("llama", vocab_size=264)
    with pytest.raises(KeyboardInterrupt):
        compare(model, tokenizer, "rope", lengths=[24, 40], text=TEXT, out=tmp_path, progress=False)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [row["length"] for row in stored["rows"]] == [24] and stored["complete"] is False
    assert hf_posenc.get_encoding(model) is None


def test_text_that_is_not_utf8(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(OptionError, match=r"latin\.txt is not UTF-8: byte 2"):
        compare(tiny_model("llama"), tokenizer, "none", lengths=[4], text=tmp_path / "latin.txt")


def test_a_folder_that_cannot_be_written_is_met_first(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        compare(tiny_model("llama"), tokenizer, "none", lengths=[4], text=TEXT, out=tmp_path / "file" / "out")


def test_peak_memory_sees_what_was_there_and_gone() -> None:
    with peak_memory(torch.device("cpu")) as peak:
        torch.zeros(16_000_000).add_(1)
    if peak.bytes is None:
        pytest.skip("no high-water mark on this system")
    assert 60e6 < peak.bytes < 80e6


class Parrot(nn.Module):
    """Answers a passkey prompt with its first number, or with nothing."""

    def __init__(self, tokenizer: Any, speaks: bool) -> None:
        super().__init__()
        self.tokenizer, self.speaks, self.device = tokenizer, speaks, torch.device("cpu")
        self.config = SimpleNamespace(model_type="parrot")

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **_options: Any) -> Tensor:
        answers = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            digits = "".join(c if c.isdigit() else " " for c in self.tokenizer.decode(row[mask.bool()])).split()
            answers.append(self.tokenizer(f" {digits[0]}." if self.speaks else "       ")["input_ids"])
        return torch.cat([input_ids, torch.tensor(answers)], dim=1)


def test_a_parrot_finds_every_key_and_a_mute_none(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_posenc, "get_encoding", lambda _model: None)
    assert passkey_accuracy(Parrot(tokenizer, True), tokenizer, 300, num_samples=7, batch_size=3) == 1.0
    assert passkey_accuracy(Parrot(tokenizer, False), tokenizer, 300, num_samples=7, batch_size=3) == 0.0


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_batch_size_does_not_move_a_passkey_score(name: Any, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(name))
    scores = {passkey_accuracy(model, tokenizer, 160, num_samples=6, batch_size=size) for size in (1, 4)}
    assert len(scores) == 1


def test_passkey_past_a_tables_end_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ReachError, match="ends at 32"):
        passkey_accuracy(tiny_model("gpt2"), tokenizer, 300)


def test_without_matplotlib_the_figures_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_plot", lambda: False)
    rows = [
        CompareRow("none", {}, 8, 7, math.inf, math.nan, 0.1, None),
        CompareRow("yarn", {"factor": 2}, 8, 0, error="x"),
    ]
    made = Comparison({"model": "m", "tail": 4}, rows)
    assert [path.name for path in report.write_report(tmp_path, made)] == ["results.json", "results.csv"]
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert stored[0]["ppl"] == "inf" and stored[1] == stored[1] | {"ppl": None, "error": "x"}
    assert report.error_lines(rows) == ["yarn (factor=2) at 8: x"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(CheckpointError, match="No space left"):
        report.write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
