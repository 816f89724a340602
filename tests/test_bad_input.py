"""What is refused: with an error of the right kind, a text that helps, and nothing changed on the model."""

import math
from typing import Any

import pytest
import snapshots
import torch
from pairs import HOSTS, LENGTH, PAIRS, Pair, every_pair, logits
from refusals import assert_refused
from tiny import tiny_ids, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosencError, patch_model, support, unpatch_model
from hf_posenc.encodings import Yarn

FOUR = {"original_max_position_embeddings": LENGTH, "factor": 4}
BAD_OPTIONS = [
    ("yarm", {}, ValueError, "'yarm'|did you mean 'yarn'|alibi|longrope"),
    ("ALIBI", {}, ValueError, "'ALIBI'|did you mean 'alibi'"),
    ("nothing like it", {}, ValueError, "'nothing like it'|yarn"),
    ("", {}, ValueError, "''|yarn"),
    (None, {}, TypeError, "None|name"),
    (7, {}, TypeError, "7|int"),
    (Yarn, {}, TypeError, "name or an Encoding"),
    ("yarn", {**FOUR, "beta_fst": 3}, ValueError, "'beta_fst'|did you mean 'beta_fast'"),
    ("yarn", {**FOUR, "attn_factor": 1.2}, ValueError, "'attn_factor'|attention_factor"),
    ("yarn", {**FOUR, "qqq": 1.2}, ValueError, "'qqq'|beta_slow"),
    ("linear", {"scaling_factor": 2}, ValueError, "'scaling_factor'|did you mean 'factor'"),
    ("rope", {"theta": 1e4}, ValueError, "'theta'|rope_theta"),
    ("rope", {"factor": 2}, ValueError, "factor"),
    ("nope", {"factor": 2}, ValueError, "unknown option of nope|factor"),
    ("sinusoidal", {"factor": 2}, ValueError, "'factor'|layout"),
    ("dynamic_yarn", {**FOUR}, ValueError, "'factor'|beta_fast"),
    ("linear", {}, ValueError, "needs factor"),
    ("yarn", {}, ValueError, "needs factor"),
    ("longrope", {"factor": 4}, ValueError, "short_factor|long_factor"),
    ("linear", {"factor": "2"}, TypeError, "factor|a number|'2'|str"),
    ("linear", {"factor": None}, TypeError, "factor|a number|None"),
    ("linear", {"factor": True}, TypeError, "factor|a number|True|bool"),
    ("linear", {"factor": [2]}, TypeError, "factor|a number"),
    ("linear", {"factor": torch.tensor(2.0)}, TypeError, "factor|a number|Tensor"),
    ("yarn", {**FOUR, "truncate": 1}, TypeError, "truncate|True or False|1"),
    ("yarn", {**FOUR, "original_max_position_embeddings": 32.5}, TypeError, "original_max|whole number|32.5"),
    ("rope", {"rope_theta": "10000"}, TypeError, "rope_theta|a number|'10000'"),
    ("sinusoidal", {"layout": "interleavd"}, ValueError, "'interleavd'|did you mean 'interleaved'"),
    ("sinusoidal", {"layout": 3}, TypeError, "layout|'concat'|3"),
    ("sinusoidal", {"scale": "automatic"}, ValueError, "'automatic'|auto"),
    ("learned", {"resize": "interpolation", "factor": 2}, ValueError, "'interpolation'|did you mean 'interpolate'"),
    ("longrope", {"factor": 4, "short_factor": 1.0, "long_factor": [1.0]}, TypeError, "short_factor|list of numbers"),
    ("longrope", {"factor": 4, "short_factor": ["1"], "long_factor": [1.0]}, TypeError, "short_factor|list of numbers"),
    *(
        ("linear", {"factor": f}, ValueError, f"factor={f!r}|>= 1")
        for f in (0, -2, 0.5, 0.999, math.nan, math.inf, -math.inf)
    ),
    *(("alibi", {"factor": f}, ValueError, f"factor={f!r}|>= 1") for f in (0, -1.0, 0.5, math.nan, math.inf)),
    ("yarn", {"original_max_position_embeddings": 32, "factor": 0}, ValueError, "factor=0|>= 1"),
    ("yarn", {**FOUR, "original_max_position_embeddings": 0}, ValueError, "original_max_position_embeddings=0|length"),
    (
        "yarn",
        {**FOUR, "original_max_position_embeddings": -5},
        ValueError,
        "original_max_position_embeddings=-5|length",
    ),
    ("yarn", {**FOUR, "beta_fast": 1, "beta_slow": 32}, ValueError, "beta_fast=1|beta_slow"),
    ("yarn", {**FOUR, "attention_factor": 0}, ValueError, "attention_factor=0"),
    ("rope", {"rope_theta": 1}, ValueError, "rope_theta=1|above 1"),
    ("rope", {"rope_theta": math.nan}, ValueError, "rope_theta=nan|above 1"),
    ("rope", {"rope_theta": -1e4}, ValueError, "rope_theta=-10000.0|above 1"),
    (
        "llama3",
        {**FOUR, "low_freq_factor": 4, "high_freq_factor": 1},
        ValueError,
        "high_freq_factor=1|low_freq_factor=4",
    ),
    ("sinusoidal", {"base": 0}, ValueError, "base=0"),
    ("sinusoidal", {"scale": math.inf}, ValueError, "scale=inf"),
    ("learned", {"max_position_embeddings": 0}, ValueError, "max_position_embeddings=0|length"),
    ("learned", {"resize": "group"}, ValueError, "factor"),
    ("learned", {"factor": 2}, ValueError, "resize"),
    ("learned", {"resize": "hierarchical", "factor": 2, "alpha": 0.5}, ValueError, "alpha=0.5"),
    (
        "learned",
        {"max_position_embeddings": 9, "resize": "group", "factor": 2},
        ValueError,
        "max_position_embeddings=9",
    ),
    ("longrope", {"factor": 4, "short_factor": [0.0], "long_factor": [1.0]}, ValueError, "short_factor"),
    ("longrope", {"factor": 4, "short_factor": [math.nan], "long_factor": [1.0]}, ValueError, "short_factor"),
]


@pytest.mark.parametrize(
    ("host", "name", "options", "kind", "words"),
    [pytest.param(HOSTS[i % 3], *row, id=f"{row[0]}-{row[1]}"[:70]) for i, row in enumerate(BAD_OPTIONS)],
)
def test_names_and_options(host: str, name: Any, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    model = _shared(host)
    assert_refused(kind, words, lambda: patch_model(model, name, **options), model)


_MODELS: dict[str, Any] = {}


def _shared(host: str) -> Any:
    """One model for all refusals: they leave it as it is, which is what is tested."""
    return _MODELS.setdefault(host, tiny_model(host))


def test_options_beside_an_encoding() -> None:
    model = _shared("llama")
    assert_refused(ValueError, "factor|but(", lambda: patch_model(model, Yarn(factor=2), factor=4), model)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("option", ["short_factor", "long_factor"])
def test_longrope_lists_of_the_wrong_length(host: str, option: str) -> None:
    model, needed = _shared(host), 8 if host == "llama" else 6
    for n in (0, needed - 1, needed + 1):
        lists: dict[str, Any] = {
            key: [1.0] * (n if key == option else needed) for key in ("short_factor", "long_factor")
        }
        call = lambda lists=lists: patch_model(model, "longrope", **FOUR, **lists)  # noqa: E731
        assert_refused(ValueError, f"{option}|{n}|{needed}", call, model)


@pytest.mark.parametrize("name", ["dynamic_ntk", "ntk_by_parts", "yarn", "dynamic_yarn", "llama3"])
def test_a_length_that_no_config_states(name: str) -> None:
    model = _shared("bloom")
    options = {"factor": 4} if name in ("yarn", "ntk_by_parts") else {}
    call = lambda: patch_model(model, name, **options)  # noqa: E731
    assert_refused(ValueError, "original_max_position_embeddings", call, model)


def test_a_fresh_table_without_a_length() -> None:
    model = _shared("bloom")
    assert_refused(ValueError, "max_position_embeddings", lambda: patch_model(model, "learned"), model)


@pytest.mark.parametrize("host", ["llama", "bloom"])
def test_no_table_to_resize(host: str) -> None:
    model = _shared(host)
    call = lambda: patch_model(model, "learned", resize="group", factor=2)  # noqa: E731
    assert_refused(NotImplementedError, f"'group'|{host}", call, model)


def test_hierarchical_positions_have_an_end() -> None:
    model = _shared("gpt2")
    call = lambda: patch_model(model, "learned", resize="hierarchical", factor=LENGTH + 1)  # noqa: E731
    assert_refused(ValueError, f"{LENGTH + 1}|{LENGTH}", call, model)


def test_architectures() -> None:
    config = AutoConfig.for_model("xglm", d_model=16, ffn_dim=16, num_layers=1, attention_heads=2, vocab_size=9)
    model = AutoModelForCausalLM.from_config(config)
    assert_refused(NotImplementedError, "'xglm'|bloom|gpt2, |llama", lambda: patch_model(model, "rope"), model)
    for thing in (torch.nn.Linear(2, 2), "gpt2", None, _shared("gpt2").config):
        assert_refused(
            NotImplementedError,
            "bloom" if isinstance(thing, torch.nn.Module) else "load",
            lambda t=thing: patch_model(t, "rope"),
        )
    assert not support("xglm", "rope") and "llama" in support("xglm", "rope").reason
    assert all(support(pair.host, pair.name) for pair in PAIRS)
    assert_refused(ValueError, "'ropee'|did you mean 'rope'", lambda: support("llama", "ropee"))


@every_pair
def test_a_patched_model(pair: Pair) -> None:
    model = pair.patched()
    assert_refused(RuntimeError, f"{pair.name}|unpatch_model", lambda: patch_model(model, "nope"), model)
    unpatch_model(model)
    assert_refused(RuntimeError, "not patched", lambda: unpatch_model(model), model)


def test_a_config_that_scales_already() -> None:
    """Both readings are spelled out; the named length settles it, and the factor does not compound."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": LENGTH}
    model = tiny_model("llama", rope_parameters=scaled, max_position_embeddings=4 * LENGTH)
    call = lambda: patch_model(model, "linear", factor=2)  # noqa: E731
    assert_refused(ValueError, "yarn|4.0|64|256|original_max_position_embeddings", call, model)
    before, was = logits(model, tiny_ids(50)), snapshots.of_model(model)
    patch_model(model, "linear", factor=2, original_max_position_embeddings=LENGTH)
    want = logits(Pair("llama", "linear", {"factor": 2}).patched(), tiny_ids(50))
    assert torch.equal(logits(model, tiny_ids(50)), want)
    unpatch_model(model)
    assert torch.equal(logits(model, tiny_ids(50)), before) and snapshots.of_model(model) == was
    for name in ("alibi", "sinusoidal", "nope"):
        with hf_posenc.patched(model, name):
            want = logits(patch_model(Pair("llama", name).stock(), name), tiny_ids(50))
            assert torch.equal(logits(model, tiny_ids(50)), want), "YaRN's factor on cos and sin must be gone too"


def test_tensors_that_are_not_there() -> None:
    model = tiny_model("llama").to("meta")
    with pytest.raises(PosencError, match="meta") as caught:
        patch_model(model, "linear", factor=2)
    assert isinstance(caught.value, RuntimeError)
    for name, options in (("linear", {"factor": 2}), ("alibi", {}), ("nope", {})):
        for garbage in (0.0, math.nan, 1e30, 0.5):
            model = tiny_model("llama")
            model.model.rotary_emb.inv_freq.fill_(garbage)
            call = lambda m=model, n=name, o=options: patch_model(m, n, **o)  # noqa: E731
            assert_refused(RuntimeError, "garbage|from_pretrained", call, model)
    for host in HOSTS:
        model = tiny_model(host).to("meta")
        with pytest.raises(PosencError, match="meta"):
            patch_model(model, "nope")


def test_a_single_wrong_frequency() -> None:
    """Memory that was never filled may hold a 1 in front, of an earlier table."""
    for at, garbage in ((1, 0.0), (7, 0.5), (3, math.nan)):
        model = tiny_model("llama")
        model.model.rotary_emb.inv_freq[at] = garbage
        assert_refused(RuntimeError, "garbage", lambda m=model: patch_model(m, "linear", factor=2), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_rounded_frequencies_are_welcome(theta: float, dtype: torch.dtype) -> None:
    """`model.to(bfloat16)` before the patch is usual; the patch computes them anew."""
    rope = {"rope_type": "default", "rope_theta": theta}
    model = patch_model(tiny_model("llama", rope_parameters=rope, head_dim=64).to(dtype), "linear", factor=2)
    want = patch_model(
        tiny_model("llama", rope_parameters=rope, head_dim=64), "linear", factor=2
    ).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, want)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["rope", "yarn", "dynamic_yarn"])
def test_an_odd_rotary_width(host: str, name: str) -> None:
    """Or one so narrow that it holds no frequencies to speak of; Transformers itself builds no odd Llama."""
    width = 2 if host == "llama" else 7
    config = {"llama": {"head_dim": 2}, "gpt2": {"n_embd": 28}, "bloom": {"hidden_size": 28}}[host]
    model = tiny_model(host, **config)
    options = FOUR if name == "yarn" else {"original_max_position_embeddings": LENGTH}
    call = lambda: patch_model(model, name, **options)  # noqa: E731
    assert_refused(ValueError, f"pairs|{width} wide|even", call, model)


def test_reorder_and_upcast() -> None:
    """GPT-2 then goes past every attention function, where a bias or a late rotation would be lost."""
    for name in ("alibi", "dynamic_yarn", "dynamic_ntk"):
        model = tiny_model("gpt2", reorder_and_upcast_attn=True)
        model.set_attn_implementation("eager")
        call = lambda m=model, n=name: patch_model(m, n)  # noqa: E731
        assert_refused(NotImplementedError, "reorder_and_upcast_attn|False", call, model)
    pair = Pair("gpt2", "rope", {}, {"reorder_and_upcast_attn": True})
    model = pair.stock()
    model.set_attn_implementation("eager")
    torch.testing.assert_close(
        logits(patch_model(model, "rope"), tiny_ids(60)),
        logits(Pair("gpt2", "rope").patched(), tiny_ids(60)),
        rtol=0,
        atol=1e-3,
    )


@pytest.mark.parametrize("host", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["alibi", "dynamic_yarn"])
def test_flash_attention(host: str, name: str) -> None:
    """It takes no bias and no mask of ours: refused before the patch, and when it is chosen afterwards."""
    model = tiny_model(host)
    model.config._attn_implementation_internal = "flash_attention_2"
    call = lambda: patch_model(model, name)  # noqa: E731
    assert_refused(NotImplementedError, "flash_attention_2|sdpa|eager", call, model)
    patched = patch_model(tiny_model(host), name)
    patched.config._attn_implementation_internal = "flash_attention_2"
    assert_refused(
        NotImplementedError, "flash_attention_2|set_attn_implementation", lambda: logits(patched, tiny_ids(5))
    )


@pytest.mark.parametrize("host", ["gpt2", "bloom"])  # nothing on Llama is swapped by class
def test_another_tools_module(host: str) -> None:
    """A layer whose class somebody else has replaced is not overwritten."""
    model = tiny_model(host)
    layer = model.transformer.h[1].attn if host == "gpt2" else model.transformer.h[1].self_attention
    layer.__class__ = type("Foreign", (type(layer),), {})
    assert_refused(RuntimeError, "Foreign", lambda: patch_model(model, "rope"), model)
