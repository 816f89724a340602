"""Calls that are easily got wrong: 16 bits over a long text, graphs that break, masks and caches of a caller's own."""

import copy
from typing import Any

import pytest
import torch
from pairs import HOSTS, LENGTH, assert_same, cache_name, difference, in_pieces, logits
from tiny import tiny_ids, tiny_model
from torch import Tensor

from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.errors import ReachError, StateError, UnsupportedError
from hf_posenc.patches import handover

LONG = 1500  # tokens: a slope of 1/4 reaches a bias of 375, of which bfloat16 keeps two digits


def patched(host: str, name: str, options: dict[str, Any] | None = None, **config: Any) -> Any:
    options = options or {}
    if host == "bloom" and name in ("rope", "dynamic_yarn"):
        options = {"original_max_position_embeddings": LENGTH, **options}
    return patch_model(tiny_model(host, **config), name, **options)


def left_padded(n: int, padding: int) -> Tensor:
    mask = torch.ones(1, n, dtype=torch.long)
    mask[:, :padding] = 0
    return mask


@pytest.mark.parametrize("host", HOSTS)
def test_alibi_under_autocast(host: str) -> None:
    """As close to float32 as the same model is without any positions: the bias itself loses nothing."""
    ids, found = tiny_ids(LONG), {}
    for name in ("alibi", "nope"):
        model = patched(host, name, initializer_range=0.05)
        want = logits(model, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[name] = difference(logits(model, ids), want)
    assert found["alibi"] < 0.03
    assert found["alibi"] < 1.5 * found["nope"] + 0.003


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("host", HOSTS)
def test_alibi_over_eager_in_16_bits(host: str, dtype: torch.dtype) -> None:
    """Scores that are made in the open hold a bias of hundreds, too."""
    config: dict[str, Any] = {} if host == "bloom" else {"attn_implementation": "eager"}
    inputs: dict[str, Any] = {"output_attentions": True} if host == "bloom" else {}
    ids, found = tiny_ids(LONG), {}
    for name in ("alibi", "nope"):
        model = patched(host, name, initializer_range=0.05, **config)
        want = logits(model, ids, **inputs)
        found[name] = difference(logits(model.to(dtype), ids, **inputs), want)
    assert found["alibi"] < 1.5 * found["nope"] + (0.003 if dtype == torch.bfloat16 else 0.0005)


@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_alibi_over_eager_equals_sdpa(host: str) -> None:
    """The dense bias: whole, cached in pieces, and behind padding."""
    eager, sdpa = (patched(host, "alibi", attn_implementation=base) for base in ("eager", "sdpa"))
    ids, mask = tiny_ids(60), left_padded(60, 13)
    assert_same(logits(eager, ids), logits(sdpa, ids))
    assert_same(in_pieces(eager, ids, [40, 15, 1, 1, 3]), logits(sdpa, ids))
    padded = (logits(model, ids, attention_mask=mask)[:, 13:] for model in (eager, sdpa))
    assert_same(*padded)
    assert_same(in_pieces(eager, ids, [40, 15, 1, 1, 3], attention_mask=mask)[:, 13:], logits(sdpa, ids[:, 13:]))


def test_compiled_bloom_of_many_lengths_then_padded() -> None:
    """After a few recompilations only one side of a graph break may be traced: the call must still be this one."""
    torch._dynamo.reset()
    model = patched("bloom", "dynamic_yarn")
    ids, mask = tiny_ids(74), left_padded(74, 45)
    want = logits(model, ids, attention_mask=mask)[:, 45:]
    assert_same(want, logits(model, ids[:, 45:]))
    compiled: Any = torch.compile(model, backend="eager")
    for n in range(20, 80, 6):
        assert_same(logits(compiled, ids[:, :n]), logits(model, ids[:, :n]))
    assert_same(logits(compiled, ids, attention_mask=mask)[:, 45:], want)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["alibi", "rope", "dynamic_yarn", "sinusoidal"])
def test_bloom_keeps_nothing_of_a_call(name: str) -> None:
    model, ids = patched("bloom", name), tiny_ids(20)

    def empty() -> bool:
        values = (handover._handed, handover._position_ids)
        return all(value.take() is None and value._traced is None for value in values)

    logits(model, ids, position_ids=torch.arange(20)[None] * 2)
    assert empty()
    with pytest.raises(IndexError):  # in the word embedding: inside the backbone, after its pre-hooks
        logits(model, ids + 1000, position_ids=torch.arange(20)[None])
    assert empty()


@pytest.mark.parametrize("mask", [None, torch.ones(1, 20, dtype=torch.long)], ids=["no mask", "mask"])
def test_bloom_without_its_hooks(mask: Tensor | None) -> None:
    """The last call's positions must not be taken for this one's; without a mask the host asks nobody for a bias."""
    model, ids = patched("bloom", "alibi"), tiny_ids(20)
    logits(model, ids)
    with pytest.raises(StateError, match="whole model"):
        model.transformer.forward(ids, attention_mask=mask)
    unpatch_model(model)
    model.transformer.forward(ids, attention_mask=mask)


def test_bloom_position_ids_through_peft() -> None:
    """They reach the backbone through a wrapper, and still do when the wrapper has been merged away."""
    peft: Any = pytest.importorskip("peft")
    stock, ids, positions = tiny_model("bloom"), tiny_ids(20), torch.arange(20)[None] * 3
    want = logits(patched("bloom", "rope"), ids, position_ids=positions)
    wrapped = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["query_key_value"], task_type="CAUSAL_LM"))
    patch_model(wrapped, "rope", original_max_position_embeddings=LENGTH)
    assert_same(logits(wrapped, ids, position_ids=positions), want)
    assert difference(logits(wrapped, ids), want) > 1e-2
    merged = wrapped.merge_and_unload()
    assert_same(logits(merged, ids, position_ids=positions), want)
    unpatch_model(merged)
    assert torch.equal(logits(merged, ids), logits(tiny_model("bloom"), ids))


LISTS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize("name, options", [("dynamic_ntk", {"factor": 2}), ("longrope", {"factor": 4, **LISTS})])
def test_whole_schedule_is_moved_between_long_calls(name: str, options: dict[str, Any]) -> None:
    model, ids = patched("llama", name, {**options, "schedule": "whole"}), tiny_ids(100)
    want = logits(model, ids)
    assert torch.equal(logits(model, ids), want)
    model.to("cpu")
    assert torch.equal(logits(model, ids), want)
    twin = copy.deepcopy(model)
    twin.to("cpu")
    assert torch.equal(logits(twin, ids), want)


@pytest.mark.parametrize("name", ["sinusoidal", "dynamic_yarn", "alibi"])
@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_numbers_in_a_mask_of_the_callers_own(host: str, name: str) -> None:
    """The same number on all visible keys changes no attention, and no position either."""
    model, n, padding = patched(host, name), 60, 7
    ids = tiny_ids(n)
    hidden = torch.full((n, n), torch.finfo(torch.float32).min)
    causal = hidden.triu(1)
    causal[padding:, :padding] = hidden[0, 0]  # rows that are padding see themselves, as in masks that loaders make
    offset = (causal + 0.25 * (causal == 0))[None, None]
    want = logits(model, ids, attention_mask=causal[None, None])[:, padding:]
    assert_same(logits(model, ids, attention_mask=offset)[:, padding:], want)
    negative = (causal - 2.5 * (causal == 0))[None, None]
    assert_same(logits(model, ids, attention_mask=negative)[:, padding:], want)


@pytest.mark.parametrize("name", ["alibi", "dynamic_ntk", "dynamic_yarn"])
@pytest.mark.parametrize("host", HOSTS)
def test_host_that_looks_both_ways_is_refused(host: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match="is_causal=False"):
        patched(host, name, is_causal=False)


@pytest.mark.parametrize("name", ["nope", "sinusoidal", "rope"])
@pytest.mark.parametrize("host", HOSTS)
def test_host_that_looks_both_ways_still_does(host: str, name: str) -> None:
    """What does not count on the causal order leaves the first token its sight of the last, where the host gives it."""
    stock, model = tiny_model(host, is_causal=False), patched(host, name, is_causal=False)
    ids, mask = tiny_ids(20), torch.ones(1, 20, dtype=torch.long)
    other = torch.cat((ids[:, :-1], (ids[:, -1:] + 1) % 97), dim=1)

    def sight(model: Any, **inputs: Any) -> bool:
        first, second = (logits(model, text, **inputs)[:, :1] for text in (ids, other))
        return difference(first, second) > 1e-3

    inputs: tuple[dict[str, Any], ...] = ({}, {"attention_mask": mask})
    if host == "bloom":
        inputs = (*inputs, {"output_attentions": True})
    for given in inputs:
        assert sight(model, **given) == sight(stock, **given), list(given)


@pytest.mark.parametrize("name", ["dynamic_yarn", "alibi"])
@pytest.mark.parametrize("host", HOSTS)
def test_rows_of_a_cache_in_another_order(host: str, name: str) -> None:
    """As beam search puts them, with rows of different padding: equal to a fresh call on rows in that order."""
    model, order = patched(host, name), torch.tensor([1, 0])
    ids = torch.cat((tiny_ids(63), tiny_ids(63, seed=1)))
    mask = torch.cat((left_padded(63, 40), left_padded(63, 0)))
    want = logits(model, ids[order], attention_mask=mask[order])[:, 60:]
    with torch.no_grad():
        out = model(ids[:, :60], attention_mask=mask[:, :60], use_cache=True)
        cache = out[cache_name(model)]
        cache.reorder_cache(order)
        parts = []
        for n in range(61, 64):
            out = model(
                ids[order, n - 1 : n], attention_mask=mask[order, :n], use_cache=True, **{cache_name(model): cache}
            )
            parts.append(out.logits)
    assert_same(torch.cat(parts, dim=1), want)


@pytest.mark.parametrize("name", ["dynamic_yarn", "alibi", "rope"])
@pytest.mark.parametrize("host", HOSTS)
def test_positions_that_skip_are_remembered_from_a_tuple(host: str, name: str) -> None:
    """`return_dict=False` of the first call hides the cache among the outputs; the second must find its positions."""
    model, ids = patched(host, name), tiny_ids(40)
    positions, mask = torch.arange(40)[None] * 3, torch.ones(1, 40, dtype=torch.long)
    want = logits(model, ids, position_ids=positions, attention_mask=mask)[:, 30:]
    with torch.no_grad():
        out = model(
            ids[:, :30], position_ids=positions[:, :30], attention_mask=mask[:, :30], use_cache=True, return_dict=False
        )
        cache = next(part for part in out if hasattr(part, "get_seq_length"))
        rest = {"position_ids": positions[:, 30:], "attention_mask": mask, cache_name(model): cache}
        assert_same(model(ids[:, 30:], **rest).logits, want)


def test_a_negative_position_of_gpt2() -> None:
    model = patched("gpt2", "learned")
    with pytest.raises(ReachError, match="position -1") as caught:
        logits(model, tiny_ids(4), position_ids=torch.tensor([[-1, 0, 1, 2]]))
    assert isinstance(caught.value, PosencError) and isinstance(caught.value, IndexError)
