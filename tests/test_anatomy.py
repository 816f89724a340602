"""What `describe` says of the encoding in effect, against the independent oracle and the hosts' own weights."""

from __future__ import annotations

import json
import math
from typing import Any

import hosts
import numpy as np
import oracle
import other_hosts
import pytest
import torch
from tiny import LENGTH, tiny_model
from torch import nn

import hf_posenc
from hf_posenc.errors import OptionError
from hf_posenc.evaluate.anatomy import describe, distances

LONGEST = 4 * LENGTH
DIM = {"llama": 16, "gpt2": 12, "bloom": 12}
WIDTH = {"llama": 64, "gpt2": 48, "bloom": 48}
ROTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {"rope_theta": 500.0}),
    ("linear", {"factor": 4}),
    ("ntk", {"factor": 2}),
    ("ntk_by_parts", {"factor": 4, "beta_fast": 4}),
    ("yarn", {"factor": 4}),
    ("yarn", {"factor": 4, "attention_factor": 1.5}),
    ("llama3", {"factor": 4}),
]


def described(host: str, name: str, **options: Any) -> dict[str, Any]:
    model = tiny_model(host)
    with hf_posenc.patched(model, name, **options):
        made = describe(model, LONGEST)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    return made


def decay(omega: Any, factor: float, at: list[int]) -> list[float]:
    return [factor**2 * sum(math.cos(w * distance) for w in omega) / len(omega) for distance in at]


@pytest.mark.parametrize("host", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize(("name", "options"), ROTATIONS)
def test_a_rotation_is_that_of_the_oracle(host: str, name: str, options: dict[str, Any]) -> None:
    made = described(host, name, original_max_position_embeddings=LENGTH, **options)
    assert (made["seam"], made["kind"], made["native"]) == ("rotation", name, False)
    given = {key: value for key, value in options.items() if key != "rope_theta"}
    theta = options.get("rope_theta", 10_000)
    omega, factor = oracle.rotation(name, 0, dim=DIM[host], theta=theta, length=LENGTH, **given)
    assert made["attention_factor"] == {"all positions": pytest.approx(factor)}
    assert list(made["wavelengths"]) == ["all positions"]
    assert np.allclose(made["wavelengths"]["all positions"], 2 * math.pi / omega, rtol=1e-5)
    assert np.allclose(made["curve"]["mean"], decay(omega, factor, made["curve"]["distance"]), atol=1e-4)
    assert made["curve"]["mean"][0] == pytest.approx(factor**2)


@pytest.mark.parametrize(("name", "options"), [("dynamic_yarn", {}), ("dynamic_ntk", {"factor": 2})])
def test_a_segmented_rotation_has_a_spectrum_a_segment(name: str, options: dict[str, Any]) -> None:
    made = described("llama", name, original_max_position_embeddings=LENGTH, **options)
    assert list(made["wavelengths"]) == ["0 to 31", "32 to 63", "64 to 127"]
    omega, factor = np.ones(1), 1.0
    for segment, lambdas in made["wavelengths"].items():
        first = int(segment.split()[0])
        omega, factor = oracle.rotation(name, first, dim=16, theta=10_000, length=LENGTH, **options)
        assert np.allclose(lambdas, 2 * math.pi / omega, rtol=1e-5)
        assert made["attention_factor"][segment] == pytest.approx(factor)
    # the curve is that of a query at the far end, which turns every key with the last segment's frequencies
    assert np.allclose(made["curve"]["mean"], decay(omega, factor, made["curve"]["distance"]), atol=1e-4)


def test_longrope_has_two_segments() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
    made = described("llama", "longrope", factor=4, original_max_position_embeddings=LENGTH, **lists)
    assert list(made["wavelengths"]) == ["0 to 31", "32 to 127"]
    short, long = made["wavelengths"].values()
    assert np.allclose(np.array(long) / short, lists["long_factor"], rtol=1e-5)


def test_a_whole_call_schedule_is_asked_of_the_host_at_the_longest_length() -> None:
    made = described("llama", "dynamic_ntk", factor=2, schedule="whole", original_max_position_embeddings=LENGTH)
    theta = 10_000 * (2 * LONGEST / LENGTH - 1) ** (16 / 14)
    assert np.allclose(
        made["wavelengths"][f"a call of {LONGEST}"], 2 * math.pi / oracle.frequencies(16, theta), rtol=1e-5
    )


def test_an_unpatched_llama_is_read_from_its_own_module_and_left_alone() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": LENGTH}
    model = tiny_model("llama", rope_parameters=scaled, max_position_embeddings=4 * LENGTH)
    before = model.model.rotary_emb.inv_freq.clone()
    made = describe(model, LONGEST)
    omega, factor = oracle.rotation("yarn", 0, dim=16, theta=10_000, length=LENGTH, factor=4)
    assert (made["kind"], made["native"]) == ("rope, yarn", True)
    assert np.allclose(made["wavelengths"]["all positions"], 2 * math.pi / omega, rtol=1e-5)
    assert made["attention_factor"]["all positions"] == pytest.approx(factor)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_an_unpatched_dynamic_llama_answers_for_the_longest_call_and_keeps_its_state() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    before = model.model.rotary_emb.inv_freq.clone()
    made = describe(model, LONGEST)
    theta = 10_000 * (2 * LONGEST / LENGTH - 1) ** (16 / 14)
    assert np.allclose(made["wavelengths"]["all positions"], 2 * math.pi / oracle.frequencies(16, theta), rtol=1e-5)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize(("host", "factor"), [("llama", 1), ("gpt2", 2), ("bloom", 4), ("bloom", None)])
def test_alibi_falls_by_the_oracles_slopes(host: str, factor: int | None) -> None:
    made = describe(tiny_model(host), LONGEST) if factor is None else described(host, "alibi", factor=factor)
    assert (made["seam"], made["kind"], made["native"]) == ("score", "alibi", factor is None)
    slopes, curve = oracle.slopes(4, factor or 1), made["curve"]
    assert "wavelengths" not in made and curve["unit"] == "score"
    for name, slope in (("low", slopes.max()), ("median", np.median(slopes)), ("high", slopes.min())):
        assert np.allclose(curve[name], [oracle.alibi(distance, 0, slope) for distance in curve["distance"]])


@pytest.mark.parametrize("host", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_sinusoids_are_alike_as_the_oracles(host: str, layout: Any) -> None:
    curve = described(host, "sinusoidal", layout=layout)["curve"]
    rows = [oracle.sinusoid(distance, WIDTH[host], layout=layout) for distance in curve["distance"]]
    wanted = [row @ rows[0] / np.linalg.norm(row) / np.linalg.norm(rows[0]) for row in rows]
    assert np.allclose(curve["mean"], wanted, atol=1e-5) and curve["unit"] == "similarity"


def table_likeness(table: Any, distance: int) -> float:
    cosines = [
        float(nn.functional.cosine_similarity(table[i], table[i + distance], dim=0))
        for i in range(len(table) - distance)
    ]
    return sum(cosines) / len(cosines)


def test_a_learned_table_has_a_curve_as_far_as_it_goes_and_no_spectrum() -> None:
    model = tiny_model("gpt2")
    made = describe(model, LONGEST)
    assert (made["seam"], made["kind"], made["native"]) == ("embedding", "learned", True)
    assert "wavelengths" not in made and made["curve"]["distance"][-1] == LENGTH - 1
    table = model.transformer.wpe.weight.detach()
    wanted = [table_likeness(table, distance) for distance in made["curve"]["distance"]]
    assert np.allclose(made["curve"]["mean"], wanted, atol=1e-5)
    resized = described("gpt2", "learned", resize="interpolate", factor=2)
    assert resized["native"] is False and resized["curve"]["distance"][-1] > LENGTH


def test_no_positions_have_no_curve() -> None:
    assert described("llama", "nope") == {"seam": "none", "kind": "nope", "native": False}


def test_a_host_without_a_patch_is_said_to_be_unknown() -> None:
    assert describe(nn.Linear(2, 2), 8) == {"seam": "unknown", "kind": "Linear", "native": True}


def test_distances_are_whole_ascending_and_reach_the_longest() -> None:
    for longest in (1, 2, 100, 131_072):
        found = distances(longest)
        assert found == sorted(set(found)) and found[:2] == [0, 1] and found[-1] == longest and len(found) <= 201
    assert len(distances(131_072)) > 150


@pytest.mark.parametrize("longest", [0, -3, 2.5, True, "8"])
def test_a_longest_length_that_is_none(longest: Any) -> None:
    with pytest.raises(OptionError, match="longest"):
        describe(tiny_model("llama"), longest)


@pytest.mark.parametrize(
    ("host", "slopes"),
    [
        ("mpt", oracle.slopes(4)),
        ("falcon-alibi", oracle.slopes(6) / math.sqrt(8)),  # added before the scores are divided by sqrt(d)
    ],
)
def test_other_hosts_own_alibi(host: str, slopes: Any) -> None:
    made = describe(other_hosts.tiny_host(host), LONGEST)
    assert (made["seam"], made["kind"], made["native"]) == ("score", "alibi", True)
    for name, slope in (("low", slopes.max()), ("median", np.median(slopes)), ("high", slopes.min())):
        assert np.allclose(made["curve"][name], [-slope * distance for distance in made["curve"]["distance"]])


def test_a_tables_rows_before_the_first_position_are_none() -> None:
    model = other_hosts.tiny_host("opt")
    curve = describe(model, LONGEST)["curve"]
    table = model.model.decoder.embed_positions.weight.detach()[2:]
    assert curve["distance"][-1] == LENGTH - 1
    assert np.allclose(curve["mean"], [table_likeness(table, distance) for distance in curve["distance"]], atol=1e-5)


def test_a_host_that_keeps_no_frequencies_is_described_by_its_config() -> None:
    made = describe(other_hosts.tiny_host("gptj"), LONGEST)
    assert made["kind"] == "rope"
    assert np.allclose(made["wavelengths"]["all positions"], 2 * math.pi / oracle.frequencies(8, 10_000), rtol=1e-5)


def test_layers_with_tables_of_their_own_are_described_by_those_that_are_replaced() -> None:
    made = describe(hosts.host_model("gemma3_text"), LONGEST)
    theta = hosts.host_model("gemma3_text").config.rope_parameters["full_attention"]["rope_theta"]
    assert np.allclose(made["wavelengths"]["all positions"], 2 * math.pi / oracle.frequencies(16, theta), rtol=1e-5)
