"""The tasks through lm-eval: oracle and silent models, groups, a user's tasks, the command, two processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
import typer
from harness_runs import bytes_model, run, write_llama
from lm_eval.api.model import LM
from task_toys import word_tokenizer, write_files
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.errors import OptionError, PosencError, UnknownNameError
from hf_posenc.eval_tasks.tasks import RULER, SUFFIX, TASKS
from hf_posenc.evaluate import run_tasks as runs
from hf_posenc.evaluate import task_rounds
from hf_posenc.evaluate.cli_eval import SETTINGS, eval_command
from hf_posenc.evaluate.task_plan import task_manager

ROOT = Path(__file__).parent.parent
LENGTHS = [1500, 2000]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all: documents are a function of what names them.
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path_factory.getbasetemp() / "documents"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {option: str(path) for option, path in write_files(tmp_path_factory.mktemp("files")).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes, as a checkpoint."""
    return write_llama(tmp_path_factory.mktemp("llama"))


class Oracle(LM):
    """Echoes the references; with `knows=False` it is silent. No document may ask for more than its length."""

    def __init__(self, knows: bool) -> None:
        super().__init__()
        self.knows = knows

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        assert all(request.args[1] == request.doc["target"] for request in requests)
        return [(0.0, True) if self.knows else (-9.0, False) for _ in requests]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            assert request.args[0] == request.doc["input"] + request.doc["answer_prefix"]
            assert request.args[1]["max_gen_toks"] == request.doc["max_new_tokens"]
        return [", ".join(request.doc["outputs"]) if self.knows else "" for request in requests]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


@pytest.mark.parametrize("suffix", ["", SUFFIX])
def test_oracle_scores_one_and_silence_nothing(suffix: str, files: dict[str, str]) -> None:
    names = [name + suffix for name in TASKS]
    metadata = {"max_seq_lengths": LENGTHS, "num_samples": 5, "tokenizer": word_tokenizer(), **files}
    with runs.quiet_lm_eval():
        loaded = task_manager(names, None, metadata).load(names)["tasks"]
        for knows, score in ((True, 1.0), (False, 0.0)):
            found = task_rounds._evaluate(Oracle(knows), loaded)
            assert found is not None
            for name in names:
                scores = runs._scores(found[name])
                assert scores.acc == dict.fromkeys(LENGTHS, score), name
                assert not scores.other
                if TASKS[name.removesuffix(SUFFIX)].has_depth:
                    row = dict.fromkeys((0.0, 0.25, 0.5, 0.75, 1.0), score)
                    assert scores.by_depth == dict.fromkeys(LENGTHS, row), name
            for task in loaded.values():
                for instance in task.instances:
                    instance.resps.clear()
                    instance.filtered_resps.clear()


class Copier(Oracle):
    """Finds a copied word six times as likely, in nats, as one it has not seen."""

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        nats = [6.0 if request.doc["control"] else 1.0 for request in requests]
        return [(-each * request.doc["target_tokens"], False) for each, request in zip(nats, requests)]


def test_gain_is_the_controls_nll_less_the_copies() -> None:
    name = "copy_distance" + SUFFIX
    metadata = {"max_seq_lengths": LENGTHS, "num_samples": 3, "tokenizer": word_tokenizer()}
    with runs.quiet_lm_eval():
        found = task_rounds._evaluate(Copier(True), task_manager([name], None, metadata).load([name])["tasks"])
    assert found is not None
    scores = runs._scores(found[name])
    assert scores.gain == pytest.approx(dict.fromkeys(LENGTHS, 5.0))
    assert scores.nll == pytest.approx(dict.fromkeys(LENGTHS, 1.0))


def test_a_length_that_a_limit_left_without_documents_has_no_score() -> None:
    metadata = {"max_seq_lengths": LENGTHS, "num_samples": 2, "tokenizer": word_tokenizer()}
    names = ["copy_distance" + SUFFIX, "fwe"]
    with runs.quiet_lm_eval():
        loaded = task_manager(names, None, metadata).load(names)
        found = lm_eval.evaluator.evaluate(Oracle(True), loaded, limit=1, bootstrap_iters=0)
    assert found is not None
    scores = [runs._scores(found["results"][name]) for name in names]
    assert all(score.acc[1500] == 1.0 and math.isnan(score.acc[2000]) for score in scores)
    assert math.isnan(scores[0].gain[2000])


def test_a_loaded_model_is_patched_for_the_run_alone() -> None:
    model, tokenizer = bytes_model(), byte_tokenizer()
    found = run(model, tokenizer=tokenizer, encoding="ntk", options={"factor": 8.0})
    assert found.header["encoding"] == "ntk" and found.header["options"]["factor"] == 8
    assert hf_posenc.get_encoding(model) is None
    assert found.tasks != run(model, tokenizer=tokenizer).tasks
    with pytest.raises(ValueError, match="tokenizer"):
        run(model)


def test_groups_leave_out_what_lacks_a_file_and_say_why() -> None:
    found = run(bytes_model(), "ruler", 1500, tokenizer=byte_tokenizer(), num_samples=1)
    ran = {name.removesuffix(SUFFIX) for name in found.tasks}
    assert ran == {"niah_single_1", "niah_multikey_2", "niah_multikey_3", "fwe", "vt"}
    assert {name.split(" at ")[0].removesuffix(SUFFIX) for name in found.not_run} == set(RULER) - ran
    assert "qa=FILE" in found.not_run["qa_1_loglikelihood"]
    assert "at least" in found.not_run["cwe_loglikelihood at 1500"]
    nll = [scores.nll[1500] for scores in found.tasks.values()]
    assert found.groups["ruler_loglikelihood"].nll[1500] == pytest.approx(sum(nll) / 5)
    assert len(found.members["ruler_loglikelihood"]) == 5
    json.dumps(found.as_json())


def test_where_memory_ends_the_rest_still_stands() -> None:
    model = bytes_model()
    plain = run(model, "passkey,niah_single_1", [700, 1500], tokenizer=byte_tokenizer(), num_samples=2)

    def full(_module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if (args[0] if args else inputs["input_ids"]).shape[1] > 900:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    model.register_forward_pre_hook(full, with_kwargs=True)
    found = run(model, "passkey,niah_single_1", [700, 1500], tokenizer=byte_tokenizer(), num_samples=2)
    assert found.not_run == {
        "passkey_loglikelihood at 1500": "out of memory at 1500 tokens",
        "niah_single_1_loglikelihood at 1500": "out of memory at 1500 tokens",
    }
    for name, scores in found.tasks.items():
        assert scores.nll == {700: plain.tasks[name].nll[700]}


def test_a_length_past_what_the_options_aim_at_is_run_and_noted() -> None:
    found = run(bytes_model(), tokenizer=byte_tokenizer(), lengths=[200, 300], encoding="yarn", options={"factor": 8.0})
    assert found.notes == ["yarn aims at 256 tokens: the scores at 300 are past that"]
    assert set(found.tasks["passkey_loglikelihood"].acc) == {200, 300}


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ("passkeyy", {}, "unknown task 'passkeyy'; did you mean 'passkey'"),
        ("", {}, "no tasks given"),
        ("niah_single_2", {}, "niah_single_2 needs a file of yours, haystack=FILE"),
        ("passkey,lm_eval:ruler", {}, "either all or none"),
        ("passkey", {"form": "guess"}, "unknown form 'guess'"),
        ("passkey", {"lengths": "3oo"}, "lengths"),
        ("passkey", {"lengths": 50}, "at least"),
        ("passkey", {"num_samples": 0}, "num_samples=0"),
        ("passkey", {"encoding": "yarm"}, "did you mean 'yarn'"),
        ("passkey", {"include_path": "no/such/folder"}, "no such folder"),
    ],
)
def test_run_tasks_refuses(tasks: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((PosencError, ValueError), match=message):
        run(bytes_model(), tasks, **{"lengths": 300, "tokenizer": byte_tokenizer(), **options})


def test_a_broken_file_in_a_folder_of_tasks_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("task: mine\n")
    (tmp_path / "broken.yaml").write_text("task: [unclosed\n")
    with pytest.raises(OptionError, match=r"broken\.yaml cannot be read as a task"):
        run(bytes_model(), "passkey", tokenizer=byte_tokenizer(), include_path=tmp_path)
    (tmp_path / "broken.yaml").write_text("- a\n- list\n")
    with pytest.raises(OptionError, match=r"broken\.yaml cannot be read as a task"):
        run(bytes_model(), "passkey", tokenizer=byte_tokenizer(), include_path=tmp_path)


def test_a_task_of_the_users_own_runs(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([{"q": f"{i} and", "a": " more"} for i in range(3)]))
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.json}}}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: q\ndoc_to_target: a\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    found = run(bytes_model(), ["mine", "passkey"], tokenizer=byte_tokenizer(), include_path=tmp_path)
    assert found.tasks["mine"].other == {"acc": 0.0}
    assert found.tasks["passkey_loglikelihood"].nll


def command(*arguments: object) -> Any:
    app = typer.Typer()
    app.command("eval", context_settings=SETTINGS)(eval_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_a_table_and_writes_json(folder: Path, tmp_path: Path) -> None:
    result = command(
        *(folder, "--encoding", "yarn", "--factor", 8, "--tasks", "passkey,copy_distance", "--lengths", "300,420"),
        *("--num-samples", 2, "--form", "loglikelihood", "--out", tmp_path, "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in ("passkey", "300", "420", "gain by an earlier copy", "written to"))
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["header"]["options"]["factor"] == 8
    assert set(written["tasks"]["copy_distance_loglikelihood"]["gain"]) == {"300", "420"}
    assert str(folder) not in json.dumps(written)


def test_other_flags_are_lm_evals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import __main__ as main

    seen: list[list[str]] = []
    monkeypatch.setattr(main, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    result = command(
        *(folder, "--encoding", "longrope", "--option", "short_factor=[1,1]", "--tasks", "ruler_no_files"),
        *("--option", "long_factor=[2,2]", "--option", "factor=2", "--lengths", "300", "--limit", "1", "--log_samples"),
    )
    assert result.exit_code == 0, result.output
    (arguments,) = seen
    assert arguments[:2] == ["lm_eval", "run"] and arguments[-3:] == ["--limit", "1", "--log_samples"]
    given = dict(zip(arguments[2:-3:2], arguments[3:-3:2]))
    assert given["--model"] == "hf-posenc" and given["--tasks"] == "ruler_no_files"
    assert json.loads(given["--model_args"])["short_factor"] == [1, 1]
    assert json.loads(given["--metadata"])["max_seq_lengths"] == [300]
    assert (Path(given["--include_path"]) / "ruler.yaml").is_file()
    assert list(sys.argv) != arguments


def test_a_misspelt_flag_is_met_with_the_nearest(folder: Path) -> None:
    result = command(folder, "--tasks", "passkey", "--lengths", "300", "--num_smples", "3")
    assert isinstance(result.exception, UnknownNameError) and "did you mean '--num-samples'?" in str(result.exception)


def test_every_task_has_its_two_files_and_they_say_little() -> None:
    folder = ROOT / "eval_tasks" / "harness"
    for name in TASKS:
        for suffix in ("", SUFFIX):
            lines = (folder / f"{name}{suffix}.yaml").read_text().splitlines()
            assert f"task: {name}{suffix}" in lines and f"  generator: {name}" in lines and len(lines) <= 6
    for suffix in ("", SUFFIX):
        listed = (folder / f"ruler{suffix}.yaml").read_text()
        assert all(f"  - {name}{suffix}\n" in listed for name in RULER)


PARALLEL = """
import json, sys
from hf_posenc.evaluate.run_tasks import run_tasks
found = run_tasks(sys.argv[1], "passkey,copy_distance", [300, 420], form="loglikelihood", num_samples=1, device="cpu")
if found is not None:
    print("FOUND", json.dumps({"processes": found.header["processes"], **{n: s.nll for n, s in found.tasks.items()}}))
"""


def test_two_processes_share_the_work_and_change_no_score(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script), str(folder)]
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    assert found.pop("processes") == 2
    # One document a length: neither process has seen both lengths of passkey.
    alone = run(str(folder), "passkey,copy_distance", [300, 420], num_samples=1)
    for name, nll in found.items():
        assert {int(n): value for n, value in nll.items()} == pytest.approx(alone.tasks[name].nll, abs=1e-5)
