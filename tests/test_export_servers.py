"""What vLLM and llama.cpp are given, and what they are refused: the table, the keys, the lengths, the GGUF file."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import export_table
import gguf
import numpy as np
import oracle
import pytest
import snapshots
import torch
from hosts import PRESENT, ROPE_HOSTS, host_model
from other_hosts import tiny_host
from pairs import HOSTS, Pair, logits
from refusals import assert_refused
from tiny import LENGTH, tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import demo, export, get_encoding, patch_model
from hf_posenc.exporting import gguf_file
from hf_posenc.exporting.targets import for_gguf, row, subject

# encoding → how vLLM and llama.cpp hold it on a RoPE host
ON_LLAMA = {
    "rope": ("config", "config"),
    "linear": ("config", "config"),
    "ntk": ("config", "config"),
    "ntk_by_parts": ("config", "config"),
    "yarn": ("config", "config"),
    "llama3": ("config", "config"),
    "longrope": ("approximation", "approximation"),
    "dynamic_ntk": ("approximation", "refused"),
    "dynamic_yarn": ("refused", "refused"),
    "alibi": ("refused", "refused"),
    "sinusoidal": ("refused", "refused"),
    "learned": ("refused", "refused"),
    "nope": ("refused", "refused"),
    **dict.fromkeys(("rerope", "leaky_rerope", "self_extend", "dual_chunk", "xpos"), ("refused", "refused")),
}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"factor": 2} for name in ("linear", "ntk", "ntk_by_parts", "yarn", "llama3", "dynamic_ntk")},
    "longrope": {"factor": 2, **LISTS},
    "learned": {"max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.model_path("llama"))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ON_LLAMA)
def test_the_table(host: str, name: str, tokenizer: Any, tmp_path: Path) -> None:
    """Every refusal raises with the words of the table and writes nothing; everything else is written."""
    options = {**OPTIONS.get(name, {})}
    if host == "bloom" and name not in ("alibi", "learned", "nope", "sinusoidal"):
        options["original_max_position_embeddings"] = LENGTH
    if name == "longrope" and host != "llama":
        options |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    model = patch_model(tiny_model(host), name, **options)
    verdicts = {verdict.target: verdict for verdict in row(subject(model))}
    own = {"gpt2": "learned", "bloom": "alibi"}.get(host)
    want = ON_LLAMA[name] if host == "llama" else (("config",) * 2 if name == own else ("refused",) * 2)
    assert (verdicts["vllm"].how, verdicts["gguf"].how) == want
    for target in ("vllm", "gguf"):
        place, verdict = tmp_path / target, verdicts[target]
        if verdict.refused:
            call = partial(export, model, place, target, tokenizer=tokenizer)
            assert_refused(NotImplementedError, f"{name}|{verdict.text}", call, model)
            assert not place.exists()
        else:
            made = export(model, place, target, tokenizer=tokenizer)
            assert made.verdict == verdict and (place / "tokenizer.json").is_file()
            assert "posenc" not in config_of(place)["model_type"] and "auto_map" not in config_of(place)


@pytest.mark.parametrize("target", ["vllm", "gguf"])
@pytest.mark.parametrize("name", ["linear", "ntk", "yarn", "ntk_by_parts", "llama3", "rope"])
def test_keys_of_both_versions(name: str, target: Any, tokenizer: Any, tmp_path: Path) -> None:
    """What version 4 reads says the same as what version 5 reads, and the folder loads here with the same logits."""
    model = patch_model(tiny_model("llama"), name, **OPTIONS.get(name, {}))
    made = export(model, tmp_path / "out", target, tokenizer=tokenizer)
    raw = config_of(made.path)
    parameters = raw["rope_parameters"]
    assert raw["rope_theta"] == parameters["rope_theta"]
    if parameters["rope_type"] == "default":
        assert "rope_scaling" not in raw
    else:
        assert raw["rope_scaling"]["type"] == raw["rope_scaling"]["rope_type"] == parameters["rope_type"]
        assert raw["rope_scaling"]["factor"] == 2.0
    if name != "rope":
        assert raw["max_position_embeddings"] == 2 * LENGTH
    if target == "vllm":
        length = LENGTH if name == "rope" else 2 * LENGTH
        assert made.load == (f"vllm serve {made.path} --max-model-len {length}",)
    loaded = AutoModelForCausalLM.from_pretrained(made.path)
    assert torch.equal(logits(loaded, tiny_ids(60)), logits(model, tiny_ids(60)))


def test_a_temperature_of_its_own_for_vllm(tokenizer: Any, tmp_path: Path) -> None:
    """vLLM multiplies 0.1 ln s + 1 by `attn_factor`, and reads no `attention_factor`; the usual one is left out."""
    usual = patch_model(tiny_model("llama"), "yarn", factor=4)
    raw = config_of(export(usual, tmp_path / "usual", "vllm", tokenizer=tokenizer).path)
    assert not {"attention_factor", "attn_factor"} & set(raw["rope_parameters"])
    for name, options, want in (("yarn", {"attention_factor": 1.5}, 1.5), ("ntk_by_parts", {}, 1.0)):
        model = patch_model(tiny_model("llama"), name, factor=4, **options)
        raw = config_of(export(model, tmp_path / name, "vllm", tokenizer=tokenizer).path)
        for parameters in (raw["rope_parameters"], raw["rope_scaling"]):
            assert parameters["attn_factor"] * oracle.temperature(4) == pytest.approx(want)
    model = patch_model(tiny_model("llama"), "longrope", factor=2, **LISTS, attention_factor=0.7)
    raw = config_of(export(model, tmp_path / "long", "vllm", tokenizer=tokenizer).path)
    assert raw["rope_parameters"]["short_mscale"] == raw["rope_parameters"]["long_mscale"] == 0.7


@pytest.mark.parametrize("name", ["dynamic_ntk", "longrope"])
def test_approximations_say_so(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """The folder holds the host library's own type, and its record says that this is what it is."""
    model = patch_model(tiny_model("llama"), name, **OPTIONS[name])
    was, before = snapshots.of_model(model), logits(model, tiny_ids(60))
    made = export(model, tmp_path / "out", "vllm", tokenizer=tokenizer)
    now = snapshots.of_model(model)
    assert all(now[key] == was[key] for key in was if key != "modules"), "all but the numbers of hooks"
    assert torch.equal(logits(model, tiny_ids(60)), before)
    assert made.notes and "pproximation" in made.notes[-1] and made.load[0].endswith(f"--max-model-len {2 * LENGTH}")
    loaded = AutoModelForCausalLM.from_pretrained(made.path)
    whole = patch_model(tiny_model("llama"), name, **OPTIONS[name], schedule="whole")
    assert get_encoding(loaded) == get_encoding(whole)
    assert torch.equal(logits(loaded, tiny_ids(60)), logits(whole, tiny_ids(60)))
    assert "pproximation" in (made.path / "README.md").read_text()


def test_dynamic_ntk_without_a_factor(tokenizer: Any, tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "dynamic_ntk")
    call = lambda: export(model, tmp_path / "out", "vllm", tokenizer=tokenizer)  # noqa: E731
    assert_refused(NotImplementedError, "factor|give dynamic_ntk one", call, model)


COMPLETED: list[tuple[str, dict[str, Any], bool]] = [
    ("yarn", {"factor": 2, "attention_factor": 1.3}, True),
    ("yarn", {"factor": 4, "truncate": False, "beta_fast": 4}, True),
    ("ntk_by_parts", {"factor": 2}, True),
    ("longrope", {"factor": 2, **LISTS}, True),
    ("longrope", {"factor": 2, **LISTS, "attention_factor": 0.9}, True),
    ("yarn", {"factor": 2}, False),
    ("llama3", {"factor": 2}, False),
]


@pytest.mark.parametrize(("name", "options", "lost"), COMPLETED, ids=str)
def test_what_the_converter_drops_is_put_back(
    name: str, options: dict[str, Any], lost: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """In a file such as the converter writes; numbers against the oracle."""
    made = export(patch_model(tiny_model("llama"), name, **options), tmp_path / "out", "gguf", tokenizer=tokenizer)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(options["factor"])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((4, 8), dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    before = file.read_bytes()
    done = gguf_file.complete(file, made.path)
    assert done == any("gguf_file" in line for line in made.load) == lost
    if not done:
        assert file.read_bytes() == before
        return
    reader = gguf.GGUFReader(str(file))
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert (tensors["token_embd.weight"] == 1).all()
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    factor = reader.fields["llama.rope.scaling.attn_factor"].contents()
    wanted = {"dim": 16, "theta": 10000.0, "length": LENGTH}
    for t, tensor in ((0, "rope_factors_short.weight"), (LENGTH, "rope_factors_long.weight"), (0, "rope_freqs.weight")):
        if tensor in tensors:
            inv_freq, scale = oracle.rotation(name, t, **wanted, **options)
            assert np.allclose(oracle.frequencies(16, 10000.0) / tensors[tensor], inv_freq, rtol=1e-5)
            assert factor == pytest.approx(scale)
    if len(tensors) == 1:
        _, scale = oracle.rotation(name, 0, **wanted, **options)
        assert factor * oracle.temperature(options["factor"]) == pytest.approx(scale)


WINDOW = {"sliding_window": 20}
# what the converter or the graph of a host makes of an encoding, where it is not what Llama's do
BY_HOST: list[tuple[str, dict[str, Any], str | None, dict[str, Any], str]] = [
    ("mistral", WINDOW, "ntk", {"factor": 4}, "no window.*20 tokens"),
    ("mistral", {"sliding_window": 4 * LENGTH}, "ntk", {"factor": 4}, ""),
    ("mistral", {"sliding_window": None}, "yarn", {"factor": 4, "beta_fast": 8}, "puts back"),
    ("starcoder2", WINDOW, "linear", {"factor": 4}, "no window"),
    ("qwen2", {}, "linear", {"factor": 4}, "no window"),
    ("qwen3", {}, "yarn", {"factor": 4}, ""),
    ("qwen3", {}, "yarn", {"factor": 4, "beta_fast": 8}, "beta_fast=32, beta_slow=1"),
    ("qwen3", {}, "yarn", {"factor": 4, "truncate": False}, "rounded ramp"),
    ("qwen3", {}, "p_rope", {}, "no factors a pair"),
    ("cohere", {}, "yarn", {"factor": 4}, "use_qk_norm"),
    ("cohere", {"use_qk_norm": False}, "yarn", {"factor": 4}, "puts back"),
    ("gemma2", {}, "linear", {"factor": 4}, "puts back"),
    ("gemma3_text", {}, "linear", {"factor": 4}, ""),
    ("gemma3_text", {}, "ntk_by_parts", {"factor": 4}, "does not compute 'yarn'"),
    ("stablelm", {"qk_layernorm": False}, "yarn", {"factor": 4}, "puts back"),
    ("phi", {"qk_layernorm": False}, "rope", {"rope_theta": 300}, "puts back"),
    ("phi3", {"sliding_window": None}, "linear", {"factor": 4}, "puts back"),
    ("phi3", {"sliding_window": None}, "rope", {"rope_theta": 300}, ""),
    ("gpt_neox", {}, "rope", {}, "rotary_pct"),
    ("deepseek_v3", {}, "yarn", {"factor": 4}, "no run of llama.cpp"),
    ("deepseek_v3", {}, None, {}, "no run of llama.cpp"),
    ("falcon", {}, "linear", {"factor": 4}, "puts back"),
    ("falcon-alibi", {}, "alibi", {}, "ALiBi"),
    ("opt", {}, "learned", {"resize": "interpolate", "factor": 4}, "does not know"),
    ("openai-gpt", {}, "learned", {"resize": "interpolate", "factor": 4}, "does not know"),
    ("roberta", {}, "learned", {"resize": "interpolate", "factor": 4}, "loaded by AutoModelForMaskedLM"),
    ("mpt", {}, "alibi", {}, "class of its authors"),
]


@pytest.mark.parametrize(("host", "config", "name", "options", "words"), BY_HOST, ids=str)
def test_llamacpp_by_host(
    host: str, config: dict[str, Any], name: str | None, options: dict[str, Any], words: str
) -> None:
    """Refused where the converter fails or the graph computes another thing; tests/test_export_llamacpp.py runs it."""
    if host in ROPE_HOSTS and host not in PRESENT:
        pytest.skip("Transformers 5.4 has not this architecture, and the oldest supported release runs this, too")
    model = host_model(host, **config) if host in PRESENT else tiny_host(host, **config)
    model = model if name is None else patch_model(model, name, **options)
    verdict = for_gguf(subject(model))
    assert re.search(words, verdict.text), verdict.text
    fine = words in ("", "puts back") or name is None
    assert verdict.refused != fine and (words == "puts back") == ("puts back" in verdict.text)


def test_a_rotation_that_the_converter_drops(tokenizer: Any, tmp_path: Path) -> None:
    """All of it is put into the file: base, type, factor, length, and a temperature of its own."""
    stock = host_model("cohere", use_qk_norm=False)
    file, want = tmp_path / "model.gguf", {"type": "yarn", "factor": 4, "original_context_length": LENGTH}
    for number, (name, options, values) in enumerate(
        [
            ("yarn", {"factor": 4}, want),
            ("ntk_by_parts", {"factor": 4}, {**want, "attn_factor": 1 / oracle.temperature(4)}),
            ("linear", {"factor": 4, "rope_theta": 300}, {"type": "linear", "factor": 4}),
            ("rope", {"rope_theta": 300}, {"type": "none"}),
        ]
    ):
        model = patch_model(copy.deepcopy(stock), name, **options)
        made = export(model, tmp_path / str(number), "gguf", tokenizer=tokenizer)
        assert "gguf_file" in made.load[-1]
        writer = gguf.GGUFWriter(str(file), "command-r")
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_tensor("token_embd.weight", np.ones((4, 8), dtype=np.float32))
        for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(writer, step)()
        assert gguf_file.complete(file, made.path)
        prefix = "command-r.rope."
        fields = gguf.GGUFReader(str(file)).fields
        found = {key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)}
        assert found.pop("freq_base") == options.get("rope_theta", stock.config.rope_parameters["rope_theta"])
        betas = {found.pop(f"scaling.yarn_{key}", None) for key in ("beta_fast", "beta_slow")}
        assert betas == ({32, 1} if values["type"] == "yarn" else {None})
        assert found == pytest.approx({f"scaling.{key}": value for key, value in values.items()})


def test_key_heads_of_a_falcon(tokenizer: Any, tmp_path: Path) -> None:
    """The converter goes by their number, the host by `multi_query`; nothing changes here."""
    model = tiny_host("falcon")
    made = export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert config_of(made.path)["num_kv_heads"] == 1 < model.config.num_kv_heads
    loaded = AutoModelForCausalLM.from_pretrained(made.path)
    assert torch.equal(logits(loaded, tiny_ids(30)), logits(model, tiny_ids(30)))


def test_files_that_cannot_be_completed(tokenizer: Any, tmp_path: Path) -> None:
    model = Pair("llama", "ntk_by_parts", {"factor": 2}).patched()
    made = export(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert_refused(OSError, "broken", lambda: gguf_file.complete(broken, made.path))
    assert_refused(OSError, "missing", lambda: gguf_file.complete(tmp_path / "missing.gguf", made.path))
    assert_refused(OSError, "config.json", lambda: gguf_file.complete(broken, tmp_path))
    plain = export(tiny_model("llama"), tmp_path / "plain", "gguf", tokenizer=tokenizer)
    assert not gguf_file.complete(broken, plain.path), "nothing that it could lack"
    assert sorted(tmp_path.glob(".gguf*")) == []


def test_the_page_shows_this_table() -> None:
    """docs/serve.md and docs/llamacpp.md; `python tests/export_table.py` writes it."""
    found = export_table.TABLE.search(export_table.PAGE.read_text())
    assert found is not None and found[2] == export_table.export_table()
    by_host = export_table.HOST_TABLE.search(export_table.HOST_PAGE.read_text())
    assert by_host is not None and by_host[2] == export_table.hosts_table()
