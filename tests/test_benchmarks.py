"""The benchmarks' runners: that they run and write what is read from them. Figures at these sizes mean nothing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc.demo import model_path
from hf_posenc.evaluate.compare import run_comparison

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def speed(tmp_path_factory):
    out = tmp_path_factory.mktemp("speed") / "speed.json"
    done = run("speed.py", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_speed_covers_every_case_with_time_and_memory(speed):
    assert [row["case"] for row in speed["cases"]] == [
        "yarn on Llama",
        "alibi on Llama",
        "alibi on BLOOM",
        "alibi on MPT",
        "rope on GPT-2",
        "rope on GPT-2, decode",
        "alibi on Llama, decode",
        "dynamic_yarn on Llama",
        "dynamic_yarn within L",
        "dynamic_yarn on Llama, decode",
    ]
    for row in speed["cases"]:
        assert row["time"]["ratio"] == pytest.approx(row["time"]["seconds"] / row["time"]["stock_seconds"])
        assert (row["memory"] is None) == ("decode" in row["case"]) or sys.platform != "linux"


def test_speed_states_its_conditions(speed):
    conditions = speed["conditions"]
    assert conditions["quick"] and conditions["threads"] >= 1 and conditions["cpu"] and conditions["date"]
    assert set(conditions["versions"]) == {"hf_posenc", "torch", "transformers", "python"}


def test_speed_compares_models_that_compute_the_same(speed):
    differences = {row["case"]: row["time"]["max_logit_difference"] for row in speed["cases"]}
    assert differences["yarn on Llama"] == 0
    assert differences["alibi on BLOOM"] < 1e-5
    assert differences["alibi on MPT"] < 1e-5
    assert differences["dynamic_yarn within L"] == 0
    assert differences["alibi on Llama"] is None


@pytest.mark.extended
def test_every_side_is_measured_by_length(tmp_path):
    out = tmp_path / "lengths.json"
    done = run("by_length.py", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    for kind in ("prefill", "decode", "train"):
        assert set(made["time"][kind]) == set(made["memory"]) == {"llama", "gpt2", "bloom", "mpt"}
        for lengths in made["time"][kind].values():
            for rows in lengths.values():
                assert rows["stock"]["ratio"] == 1 and all(row["seconds"] > 0 for row in rows.values())
    assert set(made["bytes_held_at_a_million"].values()) == {0}, "a table that reaches a million positions was kept"


@pytest.mark.extended
def test_the_gpu_script_runs_on_the_cpu(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("gpu.py", "--small", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(out.read_text())
    assert made["correctness"] and all(row["close"] for row in made["correctness"].values()), made["correctness"]
    for hosts in made["speed"].values():
        for rows in hosts.values():
            assert all(row["prefill_seconds"] > 0 and row["decode_seconds"] > 0 for row in rows.values()), rows
            assert all(row["prefill_seconds_ratio"] for row in rows.values())


def test_the_gpu_script_says_what_it_needs_and_what_it_left_out(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("gpu.py", "--small", "--limit", "0", "--out", out)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    assert {row["not_run"] for row in made["correctness"].values()} == {"no time left"}
    assert made["conditions"]["sizes"]["dtype"] == "bfloat16"


def test_patching_writes_to_no_weight(speed):
    assert [row["encoding"] for row in speed["patch_large"]["rows"]] == ["yarn", "alibi"]
    for row in speed["patch_large"]["rows"]:
        assert row["weights_copied_or_written"] == 0
        assert row["seconds"] < 2


def test_compare_equals_stock_transformers(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((BENCHMARKS / "prose.txt").read_text()[:2000])
    llama, lengths = model_path("llama"), "128,384"
    results = tmp_path / "compare"
    run_comparison(
        str(llama), encodings="none,yarn", factor=2, lengths=lengths, text=text, tail=64, out=results, progress=False
    )
    out = tmp_path / "stock.json"
    common = ("--text", text, "--lengths", lengths, "--tail", "64", "--against", results / "results.json")
    done = run("against_stock.py", llama, *common, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert len(report["minus_compare"]) == 4
    assert all(math.isfinite(row["ppl"]) for row in report["rows"])
    assert report["largest_difference"] < 1e-3


@pytest.mark.extended
def test_search_is_put_beside_yarn(tmp_path):
    out = tmp_path / "search.json"
    done = run("search.py", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    assert set(made["unseen"]) == {"yarn", "yarn, beta_fast=8", "search"} and made["conditions"]["quick"]
    assert [row["generation"] for row in made["curve"]] == [0, 1]
    assert made["judged_ppl"][made["winner"]] == min(made["judged_ppl"].values())


def test_perplexity_is_timed_and_weighed_beside_its_forward(tmp_path):
    out = tmp_path / "perplexity.json"
    done = run("perplexity.py", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    assert made["conditions"]["quick"] and made["conditions"]["sizes"]["layers"] == 1
    time, memory = made["time"], made["memory"]
    assert time["ratio"] == pytest.approx(time["seconds"] / time["bare_seconds"])
    assert math.isfinite(memory["ppl"]) and (memory["bytes"] is not None) == (sys.platform == "linux")
    assert (time["goal"], memory["goal"]) == (1.05, 2**30)
