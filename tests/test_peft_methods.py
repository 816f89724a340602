"""LoRA, DoRA, IA³ and prefix tuning around a patched model, and a patch within a model that PEFT has wrapped."""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from oracle_models import reference_logits
from pairs import PAIRS, Pair, assert_same, difference, generate, logits
from peft_methods import METHODS, PREFIX, wrap
from tiny import tiny_ids
from torch import Tensor
from transformers import DynamicCache

from hf_posenc import get_encoding, patched, unpatch_model, verify
from hf_posenc.positions import cache_argument

SOME = [pair for pair in PAIRS if pair.name in ("yarn", "dynamic_yarn", "alibi", "learned", "sinusoidal")]
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # so PEFT passes it


def fast_and_extended(pairs: list[Pair]) -> Any:
    """Some pairs at once, the others under the marker."""
    return pytest.mark.parametrize(
        "pair",
        [pytest.param(p, id=str(p), marks=[] if p in pairs else [pytest.mark.extended]) for p in PAIRS],
    )


def oracle(pair: Pair, method: str, ids: Tensor) -> Tensor:
    """The reference's logits over the weights that PEFT itself merges into an unpatched model."""
    merged = wrap(pair.stock(), method, pair.host).merge_and_unload()
    return torch.from_numpy(reference_logits(merged, pair.name, pair.options, ids))[None]


@pytest.mark.parametrize("method", METHODS)
@fast_and_extended(SOME[::3])
def test_before_after_and_around(pair: Pair, method: str) -> None:
    """Patched before PEFT wraps it, after, merged: the reference's logits; unpatched within: as if never patched."""
    ids, short = tiny_ids(60), tiny_ids(24)
    before, after = wrap(pair.patched(), method, pair.host), wrap(pair.stock(), method, pair.host)
    own = logits(after, short)
    pair.put_into(after)
    want = logits(before, ids)
    assert_same(want, oracle(pair, method, ids).to(want))
    assert torch.equal(logits(after, ids), want) and get_encoding(after) == get_encoding(before)
    assert torch.equal(generate(before, tiny_ids(40), 3), generate(before, tiny_ids(40), 3, use_cache=False))
    unpatch_model(after)
    assert torch.equal(logits(after, short), own)
    with patched(after, "nope"):
        assert difference(logits(after, short), own) > 1e-3
    assert torch.equal(logits(after, short), own)
    assert_same(logits(before.merge_and_unload(), ids), want)


@pytest.mark.parametrize("method", [*METHODS, "prefix"])
@pytest.mark.parametrize("name", ["yarn", "alibi"])
def test_copies_of_an_adapted_model(name: str, method: str) -> None:
    """deepcopy, pickle and torch.save of the whole wrapper; each copy can be unpatched alone."""
    [pair] = [pair for pair in PAIRS if (pair.host, pair.name) == ("llama", name)]
    model, ids = wrap(pair.patched(), method, "llama"), tiny_ids(40)
    want = logits(model, ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(logits(twin, ids), want) and get_encoding(twin) == get_encoding(model)
        unpatch_model(twin)
        assert torch.equal(logits(twin, ids[:, :24]), logits(wrap(pair.stock(), method, "llama"), ids[:, :24]))
    assert torch.equal(logits(model, ids), want)


def prefix_of(model: Any, ids: Tensor) -> Tensor:
    """What PEFT's prefix holds to stand for the keys and values of real tokens, (tokens, all layers' both)."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    rows = [tensor[0].transpose(0, 1) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return torch.stack(rows, dim=1).flatten(1)


@cache
def stock_generates(host: str) -> bool:
    """Whether PEFT's prefix is there in `generate` of an unpatched model: some pairs of releases leave it out."""
    model, ids = wrap(Pair(host, "nope").stock(), "prefix", host), tiny_ids(12)
    whole = ids
    for _ in range(4):
        whole = torch.cat((whole, logits(model, whole)[:, -1:].argmax(-1)), dim=1)
    try:
        return torch.equal(generate(model, ids, 4), whole[:, 12:])
    except (Warning, RuntimeError):  # of arguments that are not taken, or shapes that do not fit
        return False


@fast_and_extended(SOME[::2])
def test_a_prefix_is_so_many_tokens(pair: Pair) -> None:
    """A prefix made of the keys and values of real tokens gives what those tokens give, patched before or after."""
    real, ids = tiny_ids(PREFIX, seed=8), tiny_ids(50)
    want = logits(pair.patched(), torch.cat((real, ids), dim=1))[:, PREFIX:]
    held = prefix_of(pair.patched(), real)
    after = wrap(pair.stock(), "prefix", pair.host)
    for model in (wrap(pair.patched(), "prefix", pair.host), pair.put_into(after)):
        model.prompt_encoder["default"].embedding.weight.data.copy_(held)
        with torch.no_grad():
            assert_same(model(input_ids=ids).logits, want)
            masked = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert_same(masked, want)
        if stock_generates(pair.host):
            plain = generate(pair.patched(), torch.cat((real, ids), dim=1), 4)
            assert torch.equal(generate(model, ids, 4), plain)


@pytest.mark.parametrize("method", ["dora", "ia3", "prefix"])
def test_only_the_adapter_is_trained(method: str) -> None:
    [pair] = [pair for pair in PAIRS if (pair.host, pair.name) == ("llama", "dynamic_yarn")]
    model, ids = wrap(pair.patched(), method, "llama").train(), tiny_ids(60)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0)
        assert moved == parameter.requires_grad, name


def test_verify_within_an_adapter() -> None:
    report = verify(wrap(Pair("llama", "alibi").patched(), "dora", "llama"), progress=False)
    assert report.passed, report.table()
