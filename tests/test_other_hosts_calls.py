"""The hosts that are no rotary decoders: the same logits however a text is cut into calls, rows and batches."""

import pytest
import torch
from other_hosts import CACHED, ENCODERS, OWN, PAIRS, VARIED, Pair, every, on_stock_path, pair, text
from pairs import LENGTH, assert_same, cache_name, difference, generate, in_pieces, logits
from torch import Tensor
from transformers import StaticCache

PIECES = (27, 9, *[1] * 4, 20, *[1] * 8, 30)  # chunks and steps over the ends of segments at 32 and 64
TOTAL = sum(PIECES)
DECODERS = [p for p in VARIED if p.host == "bert-decoder"]


@every([*CACHED, *VARIED])
def test_pieces_with_a_cache_equal_one_call(pair: Pair) -> None:
    model, ids = pair.patched(), text(TOTAL)
    whole = logits(model, ids)
    assert_same(in_pieces(model, ids, PIECES), whole)
    static = StaticCache(config=model.config, max_cache_len=TOTAL + 20)
    assert_same(in_pieces(model, ids, PIECES, static), whole)
    static.reset()
    assert_same(in_pieces(model, ids[:, 20:40], (14, 1, 5), static), logits(model, ids[:, 20:40]))


@every([p for p in [*PAIRS, *DECODERS] if p.host not in ENCODERS])
def test_generate(pair: Pair) -> None:
    """With a cache and without; a host that has none is asked for one all the same, as `generate` does by default."""
    model, ids = pair.patched(), text(2 * LENGTH - 5)
    want = generate(model, ids, 9, use_cache=False)
    assert torch.equal(generate(model, ids, 9), want)
    whole = torch.cat((ids, want), dim=1)
    assert torch.equal(logits(model, whole)[:, ids.shape[1] - 1 : -1].argmax(-1), want)
    if pair in CACHED:
        assert torch.equal(generate(model, ids, 9, cache_implementation="static", disable_compile=True), want)


def left_padded(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """One batch of rows of different lengths, behind a token that is no padding token to any host, and its mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat((torch.full((1, longest - row.shape[1]), 7), row), dim=1) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - row.shape[1]).long() for row in rows])
    return ids, mask


@every([*PAIRS, *VARIED])
def test_left_padded_equals_alone(pair: Pair) -> None:
    model, rows = pair.patched(), [text(n, seed=n) for n in (90, 43, 20)]
    ids, mask = left_padded(*rows)
    together = logits(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert_same(together[i : i + 1, ids.shape[1] - row.shape[1] :], logits(model, row))


@every(PAIRS)
def test_right_padded_equals_alone(pair: Pair) -> None:
    model, long, short = pair.patched(), text(80), text(45, seed=1)
    ids = torch.cat((long, torch.cat((short, torch.full((1, 35), 7)), dim=1)))
    mask = (torch.arange(80)[None] < torch.tensor([[80], [45]])).long()
    assert_same(logits(model, ids, attention_mask=mask)[1:, :45], logits(model, short))


@every(CACHED)
def test_padded_pieces_with_a_cache(pair: Pair) -> None:
    model, long, short = pair.patched(), text(80), text(45, seed=1)
    ids, mask = left_padded(long, short)
    for cache in (None, StaticCache(config=model.config, max_cache_len=90)):
        out = in_pieces(model, ids, (50, 10, 1, 1, 1, 17), cache, attention_mask=mask)
        assert_same(out[:1], logits(model, long))
        assert_same(out[1:, 35:], logits(model, short))


@every([p for p in PAIRS if p.host not in ENCODERS])
def test_left_padded_generate_equals_alone(pair: Pair) -> None:
    model, long, short = pair.patched(), text(2 * LENGTH - 4), text(LENGTH - 3, seed=1)
    ids, mask = left_padded(long, short)
    together = generate(model, ids, 8, attention_mask=mask)
    assert torch.equal(together[:1], generate(model, long, 8))
    assert torch.equal(together[1:], generate(model, short, 8))


@every(PAIRS)
def test_batch_equals_single_and_short_after_long_equals_fresh(pair: Pair) -> None:
    model, rows = pair.patched(), torch.cat([text(70, seed=i) for i in range(3)])
    together = logits(model, rows)
    for i in range(3):
        assert_same(together[i : i + 1], logits(model, rows[i : i + 1]))
    assert torch.equal(logits(model, rows[:1, :24]), logits(pair.patched(), rows[:1, :24]))


PACKING = [p for p in PAIRS if p.host in ("mpt", "falcon", "falcon-alibi", "gptj") and not on_stock_path(p)]


@every(PACKING)
def test_packed_equals_separate(pair: Pair) -> None:
    """Documents in one row, told apart by positions that start again.

    OPT, the encoders and the oldest Falcon on its stock path know no packs.
    """
    model, texts = pair.patched(), [text(n, seed=n) for n in (50, 70, 20)]
    positions = torch.cat([torch.arange(n) for n in (50, 70, 20)])[None]
    together = logits(model, torch.cat(texts, dim=1), position_ids=positions)
    separate = torch.cat([logits(model, row) for row in texts], dim=1)
    assert_same(together, separate)
    assert difference(logits(model, torch.cat(texts, dim=1)), separate) > 1e-2


@every([p for p in CACHED if p.name in ("rope", "alibi", "dynamic_yarn")])
def test_positions_that_skip_over_a_cache(pair: Pair) -> None:
    """The keys of earlier calls keep the positions that they were given."""
    model, ids = pair.patched(), text(60)
    positions, ones = torch.arange(60)[None] * 2 + torch.arange(60)[None] % 3, torch.ones_like(ids)
    want = pair.reference(ids, positions[0].numpy())
    assert_same(in_pieces(model, ids, (20, 25, 1, 1, 13), position_ids=positions, attention_mask=ones), want)


@every([p for p in PAIRS if p.host not in ("openai-gpt", *ENCODERS) and p.name in ("rope", "alibi", "dynamic_yarn")])
def test_numbers_in_a_mask_of_the_callers_own(pair: Pair) -> None:
    """A caller's 4-D mask (causal within a window) hides keys; it drops no bias and moves no position."""
    model, ids, step = pair.patched(), text(40), torch.arange(40)[:, None] - torch.arange(40)
    whole = (step >= 0)[None, None]
    at = torch.arange(40)[None]
    assert_same(logits(model, ids, attention_mask=whole, position_ids=at), logits(model, ids))
    window = (whole & (step < 12)).expand(1, 1, 40, 40)
    near = logits(model, ids, attention_mask=window, position_ids=at)
    numbers = torch.zeros(window.shape).masked_fill(~window, -1e9)
    assert_same(logits(model, ids, attention_mask=numbers, position_ids=at), near)
    assert difference(near, logits(model, ids)) > 1e-2


@pytest.mark.parametrize("host", ["mpt", "opt", "falcon", "falcon-alibi", "gptj"])
@pytest.mark.parametrize("name", ["alibi", "dynamic_yarn"])
def test_rows_of_a_cache_in_another_order(host: str, name: str) -> None:
    """As beam search puts them, with rows of different padding."""
    model, order = pair(host, name).patched(), torch.tensor([1, 0])
    ids, mask = left_padded(text(63), text(40, seed=1))
    want = logits(model, ids[order], attention_mask=mask[order])[:, 60:]
    with torch.no_grad():
        out = model(ids[:, :60], attention_mask=mask[:, :60], use_cache=True)
    cache = out[cache_name(model)]
    cache.reorder_cache(order)
    parts = []
    for n in range(61, 64):
        inputs = {"attention_mask": mask[order, :n], cache_name(model): cache, "use_cache": True}
        parts.append(logits(model, ids[order, n - 1 : n], **inputs))
    assert_same(torch.cat(parts, dim=1), want)
    beams = generate(model, text(40), 6, num_beams=3)
    assert torch.equal(beams, generate(model, text(40), 6, num_beams=3, use_cache=False))
    assert OWN[host]
