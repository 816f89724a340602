"""Keys that are kept turned beside a cache: used when they may be, and never when the cache has become another."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hosts import host_model
from pairs import LENGTH, Pair, assert_same, cache_name, generate, in_pieces, logits, only
from tiny import tiny_ids, tiny_model
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from hf_posenc import late, patch_model, turned_keys

DYNAMIC = ("dynamic_yarn", "dynamic_ntk", "longrope")
FAR = 2 * LENGTH + 6  # in the third segment


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many keys were turned, a call of a layer."""
    counted: list[int] = []
    turn_on = late.turn_on

    def count(x: Tensor, *rest: Any) -> Tensor:
        counted.append(x.shape[2])
        return turn_on(x, *rest)

    monkeypatch.setattr(late, "turn_on", count)
    yield counted


def caches(model: Any, kind: str) -> Any:
    static = kind == "static"
    return StaticCache(config=model.config, max_cache_len=FAR + 40) if static else DynamicCache(config=model.config)


def step(model: Any, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
    """Logits of some more tokens."""
    found: Tensor = model(input_ids=ids, use_cache=True, **{cache_name(model): cache}, **inputs).logits
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@only(*DYNAMIC)
def test_a_step_turns_its_own_key_alone(pair: Pair, kind: str, mode: Any, turns: list[int]) -> None:
    model, ids = pair.patched(), tiny_ids(FAR + 8)
    with mode():
        cache, parts = caches(model, kind), []
        parts.append(step(model, ids[:, :FAR], cache))
        step_sizes = []
        for i in range(FAR, FAR + 8):
            turns.clear()
            parts.append(step(model, ids[:, i : i + 1], cache))
            step_sizes.append(max(turns))
    assert step_sizes[0] > 1 and set(step_sizes[1:]) == {1}
    assert_same(torch.cat(parts, dim=1), logits(model, ids))


@torch.no_grad()
def test_below_the_trained_length_nothing_is_turned_or_kept(turns: list[int]) -> None:
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn"), tiny_ids(LENGTH)
    cache = DynamicCache(config=model.config)
    for i in range(LENGTH):
        step(model, ids[:, i : i + 1], cache)
    assert not turns and turned_keys._KEPT not in vars(cache)


def crop(cache: Any) -> Callable[[Tensor], Tensor]:
    cache.crop(-3)
    return lambda ids: ids[:, :-3]


def repeat(cache: Any) -> Callable[[Tensor], Tensor]:
    cache.batch_repeat_interleave(2)
    return lambda ids: ids.repeat_interleave(2, dim=0)


def select(cache: Any) -> Callable[[Tensor], Tensor]:
    cache.batch_select_indices(torch.tensor([1]))
    return lambda ids: ids[[1]]


def reorder(cache: Any) -> Callable[[Tensor], Tensor]:
    cache.reorder_cache(torch.tensor([1, 0]))
    return lambda ids: ids[[1, 0]]


def swap_in_place(cache: Any) -> Callable[[Tensor], Tensor]:
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.copy_(tensor[[1, 0]].clone())
    return lambda ids: ids[[1, 0]]


def exchange(cache: Any) -> Callable[[Tensor], Tensor]:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[[1, 0]], layer.values[[1, 0]]
    return lambda ids: ids[[1, 0]]


ON_DYNAMIC = [("dynamic", change) for change in (crop, repeat, select, reorder, swap_in_place, exchange)]


ON_STATIC = [("static", swap_in_place), *([("static", crop)] if hasattr(StaticLayer, "crop") else [])]  # not in 5.4.0


@pytest.mark.parametrize(("kind", "change"), [*ON_DYNAMIC, *ON_STATIC])
@torch.no_grad()
def test_a_cache_that_became_another(kind: str, change: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
    """Between steps of two rows, one of them left-padded and in an earlier segment."""
    model = patch_model(tiny_model("llama"), "dynamic_yarn")
    ids = torch.cat((tiny_ids(FAR), tiny_ids(FAR, seed=1)))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    cache = caches(model, kind)
    step(model, ids[:, : FAR - 3], cache, attention_mask=mask[:, : FAR - 3])
    for i in range(FAR - 3, FAR):
        step(model, ids[:, i : i + 1], cache, attention_mask=mask[:, : i + 1])
    kept = change(cache)
    ids, mask = kept(ids), kept(mask)
    for i in range(3):
        ids = torch.cat((ids, torch.full((len(ids), 1), 5 + i)), dim=1)
        mask = torch.cat((mask, torch.ones(len(ids), 1, dtype=mask.dtype)), dim=1)
        found = step(model, ids[:, -1:], cache, attention_mask=mask)
        assert_same(found, logits(model, ids, attention_mask=mask)[:, -1:])


@torch.no_grad()
def test_one_prefill_continued_twice() -> None:
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn"), tiny_ids(FAR)
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :-1], cache)
    step(model, ids[:, -1:], cache)
    other = copy.deepcopy(cache)
    assert not getattr(other, turned_keys._KEPT).layers
    assert not pickle.loads(pickle.dumps(getattr(cache, turned_keys._KEPT))).layers
    for seed in range(4):  # the two by turns
        for one, text in ((cache, tiny_ids(4, seed=8)), (other, tiny_ids(4, seed=9))):
            found = step(model, text[:, seed : seed + 1], one)
            whole = torch.cat((ids, text[:, : seed + 1]), dim=1)
            assert_same(found, logits(model, whole)[:, -1:])


@torch.no_grad()
def test_back_and_forth_over_a_border_adds_up_to_nothing() -> None:
    """In bfloat16, where a key that was turned on from a turned one would lose a bit each time."""
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn").bfloat16(), tiny_ids(2 * LENGTH + 2)
    cache, fresh = DynamicCache(config=model.config), DynamicCache(config=model.config)
    step(model, ids[:, : 2 * LENGTH - 1], cache)
    step(model, ids[:, : 2 * LENGTH - 1], fresh)
    for _ in range(12):
        for i in range(2 * LENGTH - 1, 2 * LENGTH + 2):
            step(model, ids[:, i : i + 1], cache)
        cache.crop(-3)
    for i in range(2 * LENGTH - 1, 2 * LENGTH + 2):
        assert torch.equal(step(model, ids[:, i : i + 1], cache), step(model, ids[:, i : i + 1], fresh))


def test_modes_by_turns(turns: list[int]) -> None:
    """What inference mode has made can be written to in inference mode alone; and a step may be asked for gradients."""
    model, ids = patch_model(tiny_model("gpt2"), "dynamic_ntk"), tiny_ids(FAR + 6)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        parts = [step(model, ids[:, :FAR], cache)]
    for i, mode in enumerate([torch.inference_mode, torch.inference_mode, torch.no_grad, torch.no_grad]):
        with mode():
            parts.append(step(model, ids[:, FAR + i : FAR + i + 1], cache).clone())
    with torch.enable_grad():
        parts.append(step(model, ids[:, FAR + 4 : FAR + 5], cache).detach())
    with torch.no_grad():
        parts.append(step(model, ids[:, FAR + 5 :], cache))
        assert_same(torch.cat(parts, dim=1), logits(model, ids))


@torch.no_grad()
def test_other_positions_for_the_same_keys() -> None:
    """A mask that hides a key in front moves all others."""
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn"), tiny_ids(FAR + 2)
    cache, ones = DynamicCache(config=model.config), torch.ones(1, FAR + 2, dtype=torch.long)
    step(model, ids[:, :FAR], cache, attention_mask=ones[:, :FAR])
    step(model, ids[:, FAR : FAR + 1], cache, attention_mask=ones[:, : FAR + 1])
    fresh = copy.deepcopy(cache)
    ones[:, 0] = 0
    assert_same(
        step(model, ids[:, FAR + 1 :], cache, attention_mask=ones),
        step(model, ids[:, FAR + 1 :], fresh, attention_mask=ones),
        1e-6,
    )


@pytest.mark.parametrize("host", ["mistral", "gemma3_text", "deepseek_v2", "starcoder2"])
@torch.no_grad()
def test_windows_and_latent_keys(host: str) -> None:
    """Layers that forget old keys, and keys that are made from what is cached."""
    model, ids = patch_model(host_model(host), "dynamic_yarn"), tiny_ids(FAR + 9)
    pieces = (FAR - 8, 1, 1, 1, 5, *[1] * 9)
    for kind in ("dynamic", "static"):
        assert_same(in_pieces(model, ids, pieces, caches(model, kind)), logits(model, ids))


@torch.no_grad()
def test_an_offloaded_cache_keeps_nothing() -> None:
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn"), tiny_ids(FAR)
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    assert turned_keys.find(cache, 5) is None
    assert torch.equal(generate(model, ids, 6, num_beams=2), generate(model, ids, 6, num_beams=2, use_cache=False))


@pytest.mark.parametrize("segment", [0, 1, 2])
@torch.no_grad()
def test_a_triangle_in_the_lower_right_corner(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices' kernels are asked for, by the CPU's way of doing it."""
    model, ids = patch_model(tiny_model("llama"), "dynamic_yarn"), tiny_ids(LENGTH * (1 + segment) + 7)
    want = logits(model, ids)
    monkeypatch.setattr(late, "LOWER_RIGHT", ("cpu",))
    assert_same(logits(model, ids), want)
