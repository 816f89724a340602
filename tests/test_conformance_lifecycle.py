"""Every pair through its life: in, out, copied, beside others, trained, under another attention function."""

import copy
import gc
import pickle
from typing import Any

import pytest
import snapshots
import torch
from oracle_models import reference_logits
from pairs import (
    BIASES,
    DYNAMIC,
    HOSTS,
    LENGTH,
    PAIRS,
    RESIZED,
    Pair,
    assert_same,
    difference,
    every_pair,
    generate,
    in_pieces,
    logits,
    only,
    tuned,
)
from tiny import tiny_ids
from torch import Tensor

import hf_posenc
from hf_posenc import get_encoding, patch_model, unpatch_model
from hf_posenc.errors import UnsupportedError
from hf_posenc.flex_bias import release_takes_bias

LONG = 80


def within_reach(pair: Pair) -> Tensor:
    """A text that the unpatched host can read too."""
    return tiny_ids(LENGTH if pair.host == "gpt2" else LONG)


@pytest.mark.parametrize("pair", [*PAIRS, *RESIZED, Pair("gpt2", "learned", note="own")], ids=str)
def test_unpatch_restores_bit_for_bit(pair: Pair) -> None:
    model, ids = pair.stock(), within_reach(pair)
    before, was = logits(model, ids), snapshots.of_model(model)
    pair.put_into(model)
    assert get_encoding(model) is not None
    logits(model, ids)
    generate(model, tiny_ids(20), 3)
    assert unpatch_model(model) is model
    assert get_encoding(model) is None
    assert torch.equal(logits(model, ids), before)
    assert snapshots.of_model(model) == was


@every_pair
def test_patched_again_and_again(pair: Pair) -> None:
    """In, out and in again gives the same; the context manager leaves nothing behind, also after an exception."""
    model, ids = pair.stock(), within_reach(pair)
    was, want = snapshots.of_model(model), logits(pair.patched(), ids)
    for _ in range(2):
        with pytest.raises(KeyError), hf_posenc.patched(model, pair.name, **pair.options) as same:
            assert same is tuned(model, pair.name, pair.options) and torch.equal(logits(model, ids), want)
            raise KeyError
        assert snapshots.of_model(model) == was
    for other in ("nope", "sinusoidal"):
        unpatch_model(patch_model(model, other))
    assert torch.equal(logits(pair.put_into(model), ids), want)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@every_pair
def test_copies(pair: Pair, how: str) -> None:
    """A copy has the patch, and can be unpatched alone."""
    stock, model, ids = pair.stock(), pair.patched(), within_reach(pair)
    want = logits(model, ids)
    twin: Any = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids), want) and get_encoding(twin) == get_encoding(model)
    unpatch_model(twin)
    assert torch.equal(logits(twin, ids), logits(stock, ids))
    assert twin.config.to_dict() == stock.config.to_dict() and list(twin.state_dict()) == list(stock.state_dict())
    assert torch.equal(logits(model, ids), want)
    again = copy.deepcopy(model)
    unpatch_model(model)
    del model
    gc.collect()
    assert torch.equal(logits(again, ids), want)


@every_pair
def test_other_models_are_untouched(pair: Pair) -> None:
    """One of the same family, and one that even shares the config object."""
    model, ids = pair.stock(), within_reach(pair)
    other, sharing = pair.stock(seed=1), type(model)(model.config).eval()
    models = (other, sharing)
    before = [(logits(m, ids), snapshots.of_model(m)) for m in models]
    pair.put_into(model)
    logits(model, ids)
    for m, (want, was) in zip(models, before):
        assert torch.equal(logits(m, ids), want) and snapshots.of_model(m) == was
    patch_model(sharing, "nope")
    changed = logits(sharing, ids)
    unpatch_model(model)
    assert torch.equal(logits(sharing, ids), changed)
    assert sharing.config is not model.config and model.config.to_dict() == pair.stock().config.to_dict()


def test_transformers_is_untouched() -> None:
    for pair in PAIRS:
        logits(pair.stock(), tiny_ids(8))
    was = snapshots.of_transformers()
    models = [pair.patched() for pair in PAIRS]
    for model in models:
        logits(model, tiny_ids(40))
    assert snapshots.of_transformers() == was
    for model in models:
        unpatch_model(model)
    assert snapshots.of_transformers() == was


@every_pair
def test_on_the_backbone_alone(pair: Pair) -> None:
    """`AutoModel` gives a model without a head; the patch is the same."""
    whole, ids = pair.patched(), tiny_ids(LONG)
    bare = pair.stock().base_model
    was = bare(tiny_ids(LENGTH), use_cache=False).last_hidden_state
    pair.put_into(bare)
    assert torch.equal(
        bare(ids, use_cache=False).last_hidden_state, whole.base_model(ids, use_cache=False).last_hidden_state
    )
    unpatch_model(bare)
    assert torch.equal(bare(tiny_ids(LENGTH), use_cache=False).last_hidden_state, was)


@every_pair
def test_embeddings_instead_of_ids(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(LONG)
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeds, use_cache=False).logits, logits(model, ids))


def gradients(model: Any, checkpointing: bool) -> dict[str, Tensor]:
    """Of two forwards, at different positions and lengths, before one backward."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad()
    first, second = tiny_ids(70), tiny_ids(41, seed=1)
    mask = (torch.arange(41) >= 9).long()[None]
    losses = [
        model(input_ids=first, labels=first, use_cache=False).loss,
        model(input_ids=second, labels=second, attention_mask=mask, use_cache=False).loss,
    ]
    (losses[0] + losses[1]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_pair
def test_gradients_with_and_without_checkpointing(pair: Pair) -> None:
    plain, checkpointed = gradients(pair.patched(), False), gradients(pair.patched(), True)
    silent = {"transformer.wpe.weight"} if pair.host == "gpt2" and pair.name != "learned" else set()
    assert {name for name, _ in pair.patched().named_parameters()} - set(plain) == silent
    assert checkpointed.keys() == plain.keys()
    largest = max(float(g.abs().max()) for g in plain.values())
    for name, grad in plain.items():
        assert grad.isfinite().all() and grad.abs().max() > 0
        torch.testing.assert_close(checkpointed[name], grad, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.host != "llama"], ids=str)
def test_gradients_equal_finite_differences(pair: Pair) -> None:
    """In double, along one random direction over all parameters (Llama's own norms compute in float32)."""
    model, ids = pair.patched().double(), tiny_ids(50)
    generator = torch.Generator().manual_seed(0)
    parameters = list(model.parameters())
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])

    def shifted(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, directions):
                p.add_(d, alpha=step)
            value = float(loss())
            for p, d in zip(parameters, directions):
                p.sub_(d, alpha=step)
        return value

    loss().backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions) if p.grad is not None)
    step = 1e-6
    assert (shifted(step) - shifted(-step)) / (2 * step) == pytest.approx(slope, rel=1e-3)


@every_pair
def test_eager_equals_sdpa(pair: Pair) -> None:
    """Chosen before the patch, and after it; with padding and with a cache."""
    ids, mask = tiny_ids(LONG), (torch.arange(LONG) >= 21).long()[None]
    model = pair.patched()
    want, padded = logits(model, ids), logits(model, ids, attention_mask=mask)[:, 21:]
    before = pair.stock()
    before.set_attn_implementation("eager")
    pair.put_into(before)
    after = pair.patched()
    after.set_attn_implementation("eager")
    for eager in (before, after):
        assert_same(logits(eager, ids), want)
        assert_same(logits(eager, ids, attention_mask=mask)[:, 21:], padded)
        assert_same(in_pieces(eager, ids, (30, 40, 1, 1, 8)), want)
    weights = after(ids[:, :50], output_attentions=True, use_cache=False).attentions
    assert len(weights) == 3 and all(w.shape == (1, 4, 50, 50) for w in weights)
    assert all(torch.allclose(w.sum(-1), torch.ones(1, 4, 50), atol=1e-5) for w in weights)
    if pair.host != "bloom":  # which cannot be told: Transformers knows of no sdpa for it
        after.set_attn_implementation("sdpa")
        assert torch.equal(logits(after, ids), want)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["alibi", "yarn", "learned", "nope", *(BIASES if release_takes_bias() else ())])
def test_flex_attention(name: str, when: str) -> None:
    """On Llama, the only one of the hosts that Transformers offers it for; not compiled, which takes a minute."""
    [pair] = [pair for pair in PAIRS if pair.host == "llama" and pair.name == name]
    ids, mask = tiny_ids(LONG), (torch.arange(LONG) >= 21).long()[None]
    want, model = pair.patched(), pair.stock()
    if when == "before":
        model.set_attn_implementation("flex_attention")
    pair.put_into(model)
    if when == "after":
        model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        assert_same(logits(model, ids), logits(want, ids))
        padded = logits(model, ids, attention_mask=mask)[:, 21:]
        assert_same(padded, logits(want, ids, attention_mask=mask)[:, 21:])
        assert_same(in_pieces(model, ids, (30, 40, 1, 9)), logits(want, ids))


@pytest.mark.parametrize("name", DYNAMIC)
def test_flex_attention_is_refused_by_segments(name: str) -> None:
    [pair] = [pair for pair in PAIRS if pair.host == "llama" and pair.name == name]
    model = pair.stock()
    model.set_attn_implementation("flex_attention")
    was = snapshots.of_model(model)
    with pytest.raises(UnsupportedError, match="sdpa"):
        pair.put_into(model)
    assert snapshots.of_model(model) == was


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["alibi", "dynamic_yarn", "rope", "sinusoidal"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_custom_mask(host: str, name: str, dtype: torch.dtype) -> None:
    """A caller's own 4-D mask (causal within a window) hides keys; it drops no bias and moves no position."""
    pair = Pair(host, name, {"original_max_position_embeddings": LENGTH} if name == "dynamic_yarn" else {})
    ids, step = tiny_ids(60), torch.arange(60)[:, None] - torch.arange(60)
    visible = ((step >= 0) & (step < 20))[None, None]
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -1e9)
    want = torch.from_numpy(reference_logits(pair.stock(), name, pair.options, ids, window=20))[None]
    assert_same(logits(pair.patched(), ids, attention_mask=mask, position_ids=torch.arange(60)[None]), want)
    assert_same(logits(pair.patched(), ids, attention_mask=mask), want)


@only(*DYNAMIC, "alibi")
def test_the_users_choice_of_attention_survives_the_patch(pair: Pair) -> None:
    model = pair.stock()
    was = model.config._attn_implementation
    pair.put_into(model)
    assert difference(logits(model, tiny_ids(70)), logits(pair.patched(), tiny_ids(70))) == 0
    unpatch_model(model)
    assert model.config._attn_implementation == was


@pytest.mark.parametrize("pair", [*RESIZED, Pair("gpt2", "learned", note="own"), *PAIRS[::5]], ids=str)
def test_verify_finds_nothing(pair: Pair) -> None:
    """Also where the first rows of a longer table are the old ones, and only what lies beyond them moves."""
    report = hf_posenc.verify(pair.patched(), progress=False)
    assert report.passed, report.table()
