"""Biases that are a curve of the distance: blocks against the whole, gradients, memory, what is trained and kept."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BIASES, TRAINED, Pair, assert_same, cache_name, difference, logits, tuned
from safetensors.torch import load_file, save_file
from tiny import tiny_ids, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_posenc
from hf_posenc import biases, patch_model, unpatch_model
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.encodings import Fire, Kerple, T5Bias
from hf_posenc.encodings.bias import LEAST, bounded, t5_bucket
from hf_posenc.errors import CheckpointError, OptionError, UnsupportedError
from hf_posenc.flex_bias import release_takes_bias

HOSTS = {"t5_bias": "llama", "kerple": "gpt2", "fire": "bloom", "sandwich": "llama"}
OPTIONS = {"fire": {"initial_length": 24}, "t5_bias": {"num_buckets": 16, "max_distance": 60}}
PAIRS = [Pair(HOSTS[name], name, OPTIONS.get(name, {})) for name in BIASES]
each = pytest.mark.parametrize("pair", PAIRS, ids=str)


def eager(pair: Pair) -> Any:
    model = pair.stock()
    model.set_attn_implementation("eager")
    return pair.put_into(model)


def calls(n: int) -> dict[str, dict[str, Any]]:
    """What may come with a text of n tokens."""
    left, right = torch.ones(1, n, dtype=torch.long), torch.ones(1, n, dtype=torch.long)
    left[:, :9], right[:, -9:] = 0, 0
    hole = left.clone()
    hole[:, 30:40] = 0
    skipping = torch.cat((torch.arange(17, 40), torch.arange(51, 51 + n - 23)))[None]
    packed = torch.cat((torch.arange(33), torch.arange(n - 33)))[None]
    apart = (packed.diff(dim=1, prepend=torch.zeros(1, 1)) < 0).cumsum(1)
    visible = (apart[:, :, None] == apart[:, None]) & torch.ones(n, n, dtype=torch.bool).tril()
    return {
        "plain": {},
        "left": {"attention_mask": left},
        "right": {"attention_mask": right},
        "hole": {"attention_mask": hole},
        "late": {"position_ids": torch.arange(100, 100 + n)[None]},
        "skipping": {"position_ids": skipping, "attention_mask": torch.ones_like(left)},
        "packed": {"position_ids": packed},
        "own mask": {"position_ids": packed, "attention_mask": visible[:, None]},
    }


@pytest.mark.parametrize("call", calls(70))
@each
def test_blocks_equal_the_whole(pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 16 rows, which do not divide the length, against scores that eager makes all at once."""
    monkeypatch.setattr(biases, "ROWS", 16)
    ids, given = tiny_ids(70), calls(70)[call]
    seen = torch.ones(70, dtype=torch.bool) if "attention_mask" not in given else given["attention_mask"][0, -1] != 0
    seen = seen if seen.ndim == 1 and call != "own mask" else torch.ones(70, dtype=torch.bool)
    if "attention_mask" in given and given["attention_mask"].ndim == 2:
        seen = given["attention_mask"][0].bool()
    assert_same(logits(pair.patched(), ids, **given)[:, seen], logits(eager(pair), ids, **given)[:, seen], 2e-5)


def gradients(model: Any, checkpointing: bool | None) -> dict[str, Tensor]:
    """Of two forwards at different positions before one backward; `checkpointing`: None, or whether it re-enters."""
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    first, second = tiny_ids(70), tiny_ids(41, seed=1)
    mask = (torch.arange(41) >= 9).long()[None]
    loss = model(input_ids=first, labels=first, use_cache=False).loss
    labels = second.masked_fill(torch.arange(41) < 10, -100)  # what padding gives differs by kernel, and is nobody's
    loss = loss + model(input_ids=second, labels=labels, attention_mask=mask, use_cache=False).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "not-reentrant", "reentrant"])
@each
def test_gradients_equal_the_dense_reference(
    pair: Pair, checkpointing: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biases, "TUNED_ROWS", 16)
    monkeypatch.setattr(biases, "ROWS", 16)
    want, got = gradients(eager(pair), None), gradients(pair.patched(), checkpointing)
    assert want.keys() == got.keys()
    assert sum("posenc" in name for name in got) == {"t5_bias": 1, "kerple": 2, "fire": 6, "sandwich": 0}[pair.name]
    largest = max(float(g.abs().max()) for g in want.values())
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=2e-5 * largest)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives, in numbers of its storage."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.seen = max(self.seen, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("padded", [False, True])
@each
def test_no_tensor_of_all_scores(pair: Pair, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n × n numbers, in prefill, in decode and in a backward; a padding mask is the host's."""
    monkeypatch.setattr(biases, "TUNED_ROWS", 16)
    monkeypatch.setattr(biases, "ROWS", 16)
    n = 768
    ids, model = tiny_ids(n), pair.patched(vocab_size=128)
    mask = {"attention_mask": (torch.arange(n) >= 5).long()[None]} if padded else {}
    allowed = n * n + n if padded else n * n * 3 // 4
    with Largest() as forward, torch.no_grad():
        out = model(ids, use_cache=True, **mask)
    assert forward.seen < allowed
    mask = {"attention_mask": torch.nn.functional.pad(mask["attention_mask"], (0, 1), value=1)} if padded else {}
    with Largest() as decode, torch.no_grad():
        model(ids[:, :1], **{cache_name(model): getattr(out, cache_name(model))}, **mask)
    assert decode.seen < allowed
    if not padded:
        with Largest() as both:
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert both.seen < allowed


@pytest.mark.parametrize("name", BIASES)
def test_patching_draws_no_random_numbers(name: str) -> None:
    model = tiny_model("llama")
    state = torch.random.get_rng_state()
    first = copy.deepcopy(patch_model(model, name).model.posenc.state_dict())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    again = patch_model(unpatch_model(model), name).model.posenc.state_dict()
    assert all(torch.equal(again[key], value) for key, value in first.items())
    if name in ("kerple", "fire"):
        other = patch_model(unpatch_model(model), name, seed=1).model.posenc.state_dict()
        assert not all(torch.equal(other[key], value) for key, value in first.items())


def test_buckets_are_those_of_t5() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-400, 400)
    for buckets, most in ((32, 128), (16, 60), (8, 300)):
        for both in (False, True):
            want = T5Attention._relative_position_bucket(-distance, both, buckets, most)
            assert torch.equal(t5_bucket(distance, buckets, most, both), want)


def test_a_bounded_parameter_can_come_back() -> None:
    p = torch.tensor([-1.0, 0.5, 3.0], requires_grad=True)
    held = bounded(p, 2.0)
    torch.testing.assert_close(held.detach(), torch.tensor([LEAST, 0.5, 2.0]))
    held.sum().backward()
    assert p.grad is not None and p.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_in_16_bits_are_computed_with_in_32(name: str) -> None:
    """At distances whose logarithms a 16-bit number could not tell apart."""
    module = tuned(patch_model(tiny_model("llama"), name), name, {}).model.posenc.to(torch.bfloat16)
    exact = copy.deepcopy(module).double()
    places = torch.arange(30_000, 30_100)[None]
    found = module(places[:, -1:], places)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact(places[:, -1:], places), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BIASES)
def test_autocast_and_half_precision_stay_close(name: str) -> None:
    pair, ids = Pair("llama", name), tiny_ids(100)
    exact = logits(pair.patched(), ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = logits(pair.patched(), ids)
    assert (rough - exact).pow(2).mean().sqrt() < 0.25 * exact.pow(2).mean().sqrt()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    Pair("llama", "kerple").patched().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.posenc.a": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"posenc\.a in .* is \(3,\), its record says \(4,\)"):
        hf_posenc.from_pretrained(tmp_path)
    save_file({k: v for k, v in tensors.items() if not k.endswith("posenc.p")}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"names kerple, and no file there holds its posenc\.p"):
        hf_posenc.from_pretrained(tmp_path)


def test_lora_on_all_linear_maps_leaves_the_bias_alone_or_trains_it_whole(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    tiny_model("llama").save_pretrained(tmp_path / "base")
    pair = Pair("llama", "fire")
    for kept in (None, ["posenc"]):
        model = pair.put_into(hf_posenc.from_pretrained(tmp_path / "base"))
        config = peft.LoraConfig(target_modules="all-linear", modules_to_save=kept, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        names = {name for name, p in model.named_parameters() if p.requires_grad and "posenc" in name}
        assert len(names) == (6 if kept else 0) and not any("lora" in name for name in names)
        if not kept:
            with pytest.raises(CheckpointError, match="modules_to_save"):
                save_pretrained(model, tmp_path / "lost")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fire" else pytest.mark.extended) for name in TRAINED]
)
def test_fine_tuning_trains_and_keeps_it(name: str, tmp_path: Path) -> None:
    from tuning import save_base, tune

    base = save_base(tmp_path / "base", "llama")
    result = tune(base, tmp_path / "out", encoding=name, options={})
    trained = logits(result.model.eval(), tiny_ids(70))
    fresh = hf_posenc.from_pretrained(base, encoding=name).model.posenc.state_dict()
    loaded = hf_posenc.from_pretrained(tmp_path / "out")
    assert_same(logits(loaded, tiny_ids(70)), trained)
    after = loaded.base_model.model.model.posenc.modules_to_save["default"].state_dict()
    assert all(not torch.equal(after[key], value) for key, value in fresh.items())


if release_takes_bias():

    @pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
    @pytest.mark.parametrize("name", BIASES)
    def test_flex_attention_has_no_backward_on_the_cpu(name: str) -> None:
        model = Pair("llama", name, OPTIONS.get(name, {})).patched()
        model.set_attn_implementation("flex_attention")
        with pytest.raises(UnsupportedError, match="no backward on the CPU"):
            model(tiny_ids(80))


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_a_release_whose_flex_attention_takes_no_bias_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.flex_bias.release_takes_bias", lambda: False)
    monkeypatch.setattr("hf_posenc.patches.base.release_takes_bias", lambda: False)
    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedError, match="takes no bias in FlexAttention, and kerple needs one"):
        patch_model(model, "kerple")
    model = patch_model(tiny_model("llama"), "kerple")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedError, match="takes no bias in FlexAttention, and kerple needs one"):
        model(tiny_ids(80))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("t5_bias", {"num_buckets": 6}, "multiple of 4"),
        ("t5_bias", {"max_distance": 16}, "beyond half"),
        ("t5_bias", {"max_distance": 10**12}, "up to 1048576"),
        ("kerple", {"seed": -1}, "seed"),
        ("fire", {"initial_c": 0.0}, "1e-6 or more"),
        ("fire", {"initial_c": 1e-300}, "1e-6 or more"),
        ("fire", {"initial_length": 0.5}, "at least 1"),
        ("sandwich", {"bar_d": 7}, "even"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        patch_model(tiny_model("llama"), name, **options)


def test_where_they_start() -> None:
    """T5's table from ALiBi's penalty at the nearest distance of each bucket, the others within their ranges."""
    table = T5Bias().module(4).weight
    assert table[:, 0].tolist()[:17] == [-0.25 * d for d in range(17)] and table.shape == (32, 4)
    assert table[-1, 0] > -0.25 * 128
    both = T5Bias().module(4, both_ways=True).weight
    assert torch.equal(both[:16], both[16:]) and both[15, 0] > -0.25 * 128
    curve = Kerple().module(64)
    assert curve.a.min() >= LEAST and curve.a.max() <= 1 and 1 < curve.p.max() <= 2
    network = Fire(initial_c=0.2).module(4)
    assert network.c.item() == pytest.approx(0.2) and network.m.item() == 1


def test_difference_is_felt() -> None:
    """The oracle's parameters are large enough that a bias that is left out shows."""
    for pair in PAIRS:
        nope = Pair(pair.host, "nope").patched()
        assert difference(logits(pair.patched(), tiny_ids(70)), logits(nope, tiny_ids(70))) > 1e-2
