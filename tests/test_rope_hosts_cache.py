"""Every encoding on every RoPE decoder: the same logits however a text is cut into calls, rows and batches."""

from typing import Any

import pytest
import torch
from hosts import PRESENT, HostPair, host_model, host_pairs
from pairs import LENGTH, assert_same, difference, generate, in_pieces, logits
from tiny import tiny_ids
from transformers import StaticCache

import hf_posenc

PIECES = (
    27,
    9,
    *[1] * 3,
    22,
    *[1] * 6,
    12,
)  # chunks and steps over windows of 20 and the segments' ends at 32 and 64
TOTAL = sum(PIECES)


def static(model: Any, length: int) -> Any:
    return StaticCache(config=model.config, max_cache_len=length)


def left_padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of rows of different lengths, and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat((torch.full((1, width - row.shape[1]), 3), row), dim=1) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - row.shape[1]).long() for row in rows])
    return ids, mask


@host_pairs(4)
def test_pieces_with_a_cache_equal_one_call(pair: HostPair) -> None:
    model, ids = pair.patched(), tiny_ids(TOTAL)
    whole = logits(model, ids)
    assert_same(in_pieces(model, ids, PIECES), whole)
    assert_same(in_pieces(model, ids, PIECES, static(model, TOTAL + 20)), whole)


@host_pairs(2)
def test_every_step_alone(pair: HostPair) -> None:
    model, ids = pair.patched(), tiny_ids(LENGTH + 6)
    for cache in (None, static(model, 60)):
        assert_same(in_pieces(model, ids, [1] * ids.shape[1], cache), logits(model, ids))


@host_pairs(2)
def test_padded_pieces_with_a_cache(pair: HostPair) -> None:
    """Rows that stand in different segments, cut at the same places, with a dynamic and a static cache."""
    model, long, short = pair.patched(), tiny_ids(80), tiny_ids(45, seed=1)
    ids, mask = left_padded(long, short)
    for cache in (None, static(model, 90)):
        out = in_pieces(model, ids, (50, 10, 1, 1, 1, 17), cache, attention_mask=mask)
        assert_same(out[:1], logits(model, long))
        assert_same(out[1:, 35:], logits(model, short))


def resumes(host: str) -> bool:
    """Whether the stock host generates past its trained length as it reads: Phi-3 of 5.4.0 forgets all but a token."""
    model, ids = host_model(host), tiny_ids(LENGTH - 3)
    return torch.equal(generate(model, ids, 7), generate(model, ids, 7, use_cache=False))


@host_pairs(1)
def test_generate(pair: HostPair) -> None:
    """Over the end of a segment, with a dynamic, a static and no cache."""
    if not resumes(pair.host):
        pytest.skip("the stock host does not")
    model, ids = pair.patched(), tiny_ids(LENGTH - 3)
    want = generate(model, ids, 7, use_cache=False)
    assert torch.equal(generate(model, ids, 7), want)
    assert torch.equal(generate(model, ids, 7, cache_implementation="static", disable_compile=True), want)
    text = torch.cat((ids, want), dim=1)
    assert torch.equal(logits(model, text)[:, ids.shape[1] - 1 : -1].argmax(-1), want)


@host_pairs(1)
def test_left_padded_generate_equals_alone(pair: HostPair) -> None:
    if not resumes(pair.host):
        pytest.skip("the stock host does not")
    model, long, short = pair.patched(), tiny_ids(2 * LENGTH - 4), tiny_ids(LENGTH - 3, seed=1)
    ids, mask = left_padded(long, short)
    for kind in ({}, {"cache_implementation": "static", "disable_compile": True}):
        together = generate(model, ids, 6, attention_mask=mask, **kind)
        assert torch.equal(together[:1], generate(model, long, 6))
        assert torch.equal(together[1:], generate(model, short, 6))


@pytest.mark.extended
@host_pairs(0)
def test_beam_search(pair: HostPair) -> None:
    if not resumes(pair.host):
        pytest.skip("the stock host does not")
    model, ids = pair.patched(), tiny_ids(2 * LENGTH - 4)
    beams = generate(model, ids, 8, num_beams=3)
    assert torch.equal(beams, generate(model, ids, 8, num_beams=3, use_cache=False))


@host_pairs(4)
def test_left_padded_equals_alone(pair: HostPair) -> None:
    """Three rows in one batch, each ending in another segment, told apart by the attention mask alone."""
    model, rows = pair.patched(), [tiny_ids(n, seed=n) for n in (90, 43, 20)]
    ids, mask = left_padded(*rows)
    together = logits(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert_same(together[i : i + 1, ids.shape[1] - row.shape[1] :], logits(model, row))


@host_pairs(1)
def test_batch_equals_single(pair: HostPair) -> None:
    model, rows = pair.patched(), torch.cat([tiny_ids(70, seed=i) for i in range(3)])
    together = logits(model, rows)
    for i in range(3):
        assert_same(together[i : i + 1], logits(model, rows[i : i + 1]))


def keeps_packs_apart(host: str) -> bool:
    """Whether the stock host tells documents in one row apart by their positions: GPT-OSS asks for no such mask."""
    model, texts = host_model(host), [tiny_ids(n, seed=n) for n in (30, 14)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    together = logits(model, torch.cat(texts, dim=1), position_ids=positions)
    return difference(together[:, 30:], logits(model, texts[1])) < 1e-4


@host_pairs(1)
def test_packed_equals_separate(pair: HostPair) -> None:
    """Documents in one row, told apart by positions that start again, with neither mask nor cache."""
    assert keeps_packs_apart(pair.host) == (pair.host != "gpt_oss"), "what the stock host does"
    if pair.host == "gpt_oss":
        return
    model, texts = pair.patched(), [tiny_ids(n, seed=n) for n in (50, 70, 20)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    together = logits(model, torch.cat(texts, dim=1), position_ids=positions)
    assert_same(together, torch.cat([logits(model, text) for text in texts], dim=1))


@host_pairs(1)
def test_short_after_long_equals_fresh(pair: HostPair) -> None:
    model, short = pair.patched(), tiny_ids(24, seed=1)
    logits(model, tiny_ids(120))
    in_pieces(model, tiny_ids(70), (64, 6))
    assert torch.equal(logits(model, short), logits(pair.patched(), short))


@host_pairs(1)
def test_verify_finds_nothing(pair: HostPair) -> None:
    report = hf_posenc.verify(pair.patched(), progress=False)
    assert report.passed, report.table()


@pytest.mark.parametrize("host", [host for host in PRESENT if host != "phi3"])
def test_the_hosts_own_dynamic_type(host: str) -> None:
    """`schedule="whole"` is what a stock model does whose config says so, for short and long calls in turn."""
    own = host_model(host).config.rope_parameters
    local = own.get("full_attention")
    new = {**(local or own), "rope_type": "dynamic", "factor": 2.0}
    wide = {"head_dim": 12} if host == "mixtral" else {}  # whose default of None that type does not understand
    stock = host_model(host, rope_parameters={**own, "full_attention": new} if local else new, **wide)
    model = hf_posenc.patch_model(host_model(host), "dynamic_ntk", factor=2, schedule="whole")
    for n in (20, 90, 60, 20):
        assert torch.equal(logits(model, tiny_ids(n)), logits(stock, tiny_ids(n)))
