"""What is refused: with an error of the right kind, a text that helps, and nothing changed on the model."""

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import snapshots
import torch
from pairs import HOSTS, LENGTH, PAIRS, Pair, cache_name, every_pair, logits
from tiny import tiny_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosencError, get_encoding, patch_model, support, unpatch_model
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.encodings import Encoding, Yarn
from hf_posenc.patches import PATCHES, find_patch


def assert_refused(kind: type[Exception], words: str, call: Any, model: Any = None) -> None:
    """`call` raises a `PosencError` that is a `kind` too, says all `words` (split at |), and leaves `model` alone."""
    was = None if model is None else snapshots.of_model(model)
    with pytest.raises(PosencError) as caught:
        call()
    assert isinstance(caught.value, kind), f"{type(caught.value).__mro__}"
    for word in words.split("|"):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if model is not None:
        assert snapshots.of_model(model) == was


FOUR = {"original_max_position_embeddings": LENGTH, "factor": 4}
BAD_OPTIONS = [
    ("yarm", {}, ValueError, "'yarm'|did you mean 'yarn'|alibi|longrope"),
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
    ("nope", {"factor": 2}, ValueError, "nope takes no options|factor"),
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
    config = AutoConfig.for_model(
        "opt", hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    model = AutoModelForCausalLM.from_config(config)
    assert_refused(NotImplementedError, "'opt'|bloom, gpt2, llama", lambda: patch_model(model, "rope"), model)
    for thing in (torch.nn.Linear(2, 2), "gpt2", None, _shared("gpt2").config):
        assert_refused(
            NotImplementedError,
            "bloom" if isinstance(thing, torch.nn.Module) else "load",
            lambda t=thing: patch_model(t, "rope"),
        )
    assert not support("opt", "rope") and "llama" in support("opt", "rope").reason
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


# --- checkpoints -----------------------------------------------------------------------------------------------------


def written(pair: Pair, folder: Path, **record: Any) -> Path:
    """A checkpoint of a patched model, with fields of its record changed (None: taken out)."""
    pair.patched().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in record.items():
        config["hf_posenc"].pop(key)
        if value is not None:
            config["hf_posenc"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"version": 99}, "newer|99|pip install"),
        ({"version": "1"}, "hf_posenc"),
        ({"version": None}, "hf_posenc"),
        ({"encoding": None}, "corrupt|encoding"),
        ({"encoding": "tomorrows_rope"}, "tomorrows_rope"),
        ({"encoding": ["yarn"]}, "corrupt|encoding"),
        ({"options": "factor=4"}, "corrupt|options"),
        ({"options": {"factor": -1}}, "factor"),
        ({"options": {"unknown": 1}}, "unknown"),
        ({"native": None}, "corrupt|native"),
        ({"base": {"vocab_size": 3}}, "corrupt|base"),
        ({"base": {"__class__": "x"}}, "corrupt|base"),
    ],
    ids=str,
)
@pytest.mark.parametrize("host", HOSTS)
def test_records(host: str, record: dict[str, Any], words: str, tmp_path: Path) -> None:
    pair = Pair(host, "alibi", {"factor": 4})
    folder = written(pair, tmp_path, **record)
    assert_refused(OSError, words, lambda: hf_posenc.from_pretrained(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert_refused(RuntimeError, "patch", lambda: patch_model(plain, "nope"), plain)


@pytest.mark.parametrize("foreign", ["yarn", 3, ["yarn"], {}, {"method": "yarn"}, True], ids=str)
def test_foreign_records(foreign: Any, tmp_path: Path) -> None:
    folder = written(Pair("llama", "alibi"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hf_posenc": foreign}))
    assert_refused(OSError, "hf_posenc|config.json", lambda: hf_posenc.from_pretrained(folder))


def test_folders(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert_refused(OSError, "missing", lambda: hf_posenc.from_pretrained(missing))
    file = tmp_path / "file"
    file.write_text("")
    assert_refused(OSError, "file|folder", lambda: hf_posenc.from_pretrained(file))
    (tmp_path / "empty").mkdir()
    assert_refused(OSError, "empty", lambda: hf_posenc.from_pretrained(tmp_path / "empty"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert_refused(OSError, "broken", lambda: hf_posenc.from_pretrained(broken))
    no_weights = written(Pair("llama", "alibi"), tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    assert_refused(OSError, "no_weights", lambda: hf_posenc.from_pretrained(no_weights))
    cut = written(Pair("llama", "alibi"), tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert_refused(OSError, "cut", lambda: hf_posenc.from_pretrained(cut))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = written(Pair("llama", "alibi"), tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(Pair("llama", "alibi").stock().state_dict(), folder / "pytorch_model.bin")
    assert_refused(OSError, "safetensors", lambda: hf_posenc.from_pretrained(folder))


def test_an_unwritable_folder(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "alibi")
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (blocked, blocked / "below"):
        assert_refused(OSError, f"{path}|write", lambda p=path: save_pretrained(model, p), model)
    if os.geteuid() != 0:  # root may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        assert_refused(OSError, "locked|write", lambda: save_pretrained(model, locked / "model"), model)


def test_an_adapter_without_its_record(tmp_path: Path) -> None:
    """PEFT's own `save_pretrained` keeps no config; a guess would be wrong without a word."""
    from peft import LoraConfig, get_peft_model

    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(patch_model(base, "alibi"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "adapter"
    assert_refused(OSError, "posenc_config.json|encoding=", lambda: hf_posenc.from_pretrained(folder))
    assert get_encoding(hf_posenc.from_pretrained(folder, encoding="alibi")) == get_encoding(model)
    (folder / "posenc_config.json").write_text("{")
    assert_refused(OSError, "posenc_config.json", lambda: hf_posenc.from_pretrained(folder))


# --- a transaction ---------------------------------------------------------------------------------------------------


ERRORS = [AssertionError("no effect"), KeyboardInterrupt(), PosencError("no"), RuntimeError("out of memory")]


@pytest.mark.parametrize(("pair", "error"), [(p, ERRORS[i % 4]) for i, p in enumerate(PAIRS)], ids=str)
def test_a_failed_proof_rolls_back(pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.stock()
    was, want = snapshots.of_model(model), logits(model, tiny_ids(LENGTH))

    def fail(*_: Any) -> None:
        assert snapshots.of_model(model) != was, "the proof is made on the changed model"
        raise error

    monkeypatch.setattr(type(find_patch(pair.host)), "prove", fail)
    with pytest.raises(type(error)):
        patch_model(model, pair.name, **pair.options)
    monkeypatch.undo()
    assert snapshots.of_model(model) == was and get_encoding(model) is None
    assert torch.equal(logits(model, tiny_ids(LENGTH)), want)
    patch_model(model, pair.name, **pair.options)
    assert torch.equal(logits(model, tiny_ids(70)), logits(pair.patched(), tiny_ids(70)))


def test_an_encoding_that_lies_is_found_out() -> None:
    """The proof compares the host's frequencies with the encoding's own formula."""

    class Broken(Yarn):
        name = "yarn"

        def inv_freq(self, dim: int) -> Any:
            inv_freq, scale = super().inv_freq(dim)
            return inv_freq * 1.01, scale

    model = tiny_model("llama")
    assert_refused(AssertionError, "differ|put back", lambda: patch_model(model, Broken(factor=4)), model)


def test_every_patch_is_in_the_table() -> None:
    assert tuple(sorted(PATCHES)) == tuple(sorted(HOSTS))
    assert isinstance(get_encoding(patch_model(copy.deepcopy(_shared("llama")), "nope")), Encoding)


# --- memory ----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation gave out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.elements:
                # a view that repeats its elements takes no memory
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, min(held, tensor.numel()))
        return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("host", HOSTS)
def test_alibi_never_makes_a_bias_of_heads_by_n_by_n(host: str, padded: bool) -> None:
    n, heads = 512, 4
    model, ids = patch_model(tiny_model(host), "alibi"), tiny_ids(n)
    mask = (torch.arange(n + 1) >= 100 * padded).long()[None]
    with torch.no_grad(), LargestTensor() as forward:
        out = model(input_ids=ids, attention_mask=mask[:, :n], use_cache=True)
    with torch.no_grad(), LargestTensor() as step:
        model(input_ids=ids[:, :1], attention_mask=mask, use_cache=True, **{cache_name(model): out[cache_name(model)]})
    assert forward.elements < heads * n * n, "no mask for every head"
    assert step.elements < 4 * n * 64
    if not padded and host != "bloom":
        assert forward.elements < n * n, "no mask at all"
