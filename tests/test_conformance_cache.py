"""Every encoding on every host gives the same logits however a text is cut into calls, rows and batches."""

import itertools
from typing import Any

import pytest
import torch
from pairs import (
    DYNAMIC,
    HOSTS,
    LENGTH,
    OTHERS,
    PAIRS,
    RESIZED,
    SHAPES,
    Pair,
    assert_same,
    difference,
    every_pair,
    generate,
    in_pieces,
    logits,
    only,
    reference,
)
from tiny import VOCAB, tiny_ids
from transformers import StaticCache

from hf_posenc import patch_model

PIECES = (27, 9, *[1] * 4, 20, *[1] * 8, 30)  # chunks and steps over the ends of segments at 32 and 64
TOTAL = sum(PIECES)


@pytest.mark.parametrize("pair", [*PAIRS, *OTHERS, *SHAPES, *RESIZED[:1]], ids=str)
def test_pieces_with_a_cache_equal_one_call(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(TOTAL)
    whole = logits(model, ids)
    assert_same(in_pieces(model, ids, PIECES), whole)
    static = StaticCache(config=model.config, max_cache_len=TOTAL + 20)
    assert_same(in_pieces(model, ids, PIECES, static), whole)


@every_pair
def test_every_step_alone(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(2 * LENGTH + 4)
    assert_same(in_pieces(model, ids, [1] * ids.shape[1]), logits(model, ids))


@every_pair
def test_static_cache_is_reset_between_texts(pair: Pair) -> None:
    model, first, second = pair.patched(), tiny_ids(70), tiny_ids(20, seed=1)
    static = StaticCache(config=model.config, max_cache_len=100)
    in_pieces(model, first, (60, 10), static)
    static.reset()
    assert_same(in_pieces(model, second, (14, 1, 5), static), logits(pair.patched(), second))


@every_pair
def test_padded_pieces_with_a_cache(pair: Pair) -> None:
    """Rows that stand in different segments, cut at the same places, with a dynamic and a static cache."""
    model, long, short = pair.patched(), tiny_ids(80), tiny_ids(45, seed=1)
    ids, mask = left_padded(long, short)
    for cache in (None, StaticCache(config=model.config, max_cache_len=90)):
        out = in_pieces(model, ids, (50, 10, 1, 1, 1, 17), cache, attention_mask=mask)
        assert_same(out[:1], logits(model, long))
        assert_same(out[1:, 35:], logits(model, short))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_pair
def test_generate(pair: Pair, cache: str) -> None:
    model, ids = pair.patched(), tiny_ids(2 * LENGTH - 5)
    kind = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    assert torch.equal(generate(model, ids, 9, **kind), generate(model, ids, 9, use_cache=False))


@every_pair
def test_generate_is_the_argmax_of_whole_calls(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(LENGTH - 3)
    text = torch.cat((ids, generate(model, ids, 8)), dim=1)
    assert torch.equal(logits(model, text)[:, ids.shape[1] - 1 : -1].argmax(-1), text[:, ids.shape[1] :])


@every_pair
def test_beam_search(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(2 * LENGTH - 4)
    beams = generate(model, ids, 8, num_beams=3)
    assert torch.equal(beams, generate(model, ids, 8, num_beams=3, use_cache=False))


@pytest.mark.parametrize("prompt", [LENGTH - 4, 2 * LENGTH - 6])
@every_pair
def test_prompt_lookup(pair: Pair, prompt: int) -> None:
    """Candidates are tried and most of them cropped again: the cache goes back over the ends of segments."""
    model = pair.patched()
    ids = torch.tensor([list(itertools.islice(itertools.cycle([5, 9, 2, 11, 9, 2, 7, 5, 9]), prompt))])
    # the oldest Transformers wants to be told an end, here a token that never comes, and may run one token too far
    no_end = {"eos_token_id": VOCAB}
    looked_up = generate(model, ids, 12, prompt_lookup_num_tokens=5, max_matching_ngram_size=1, **no_end)
    assert torch.equal(looked_up[:, :12], generate(model, ids, 12))


def left_padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of rows of different lengths, and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.cat((torch.full((1, width - row.shape[1]), 3), row), dim=1) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - row.shape[1]).long() for row in rows])
    return ids, mask


@every_pair
def test_left_padded_equals_alone(pair: Pair) -> None:
    """Three rows in one batch, each ending in another segment, told apart by the attention mask alone."""
    model, rows = pair.patched(), [tiny_ids(n, seed=n) for n in (90, 43, 20)]
    ids, mask = left_padded(*rows)
    together = logits(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert_same(together[i : i + 1, ids.shape[1] - row.shape[1] :], logits(model, row))


@every_pair
def test_right_padded_equals_alone(pair: Pair) -> None:
    model, long, short = pair.patched(), tiny_ids(80), tiny_ids(45, seed=1)
    ids = torch.cat((long, torch.cat((short, torch.full((1, 35), 3)), dim=1)))
    mask = (torch.arange(80)[None] < torch.tensor([[80], [45]])).long()
    together = logits(model, ids, attention_mask=mask)
    assert_same(together[:1], logits(model, long))
    assert_same(together[1:, :45], logits(model, short))


@every_pair
def test_left_padded_generate_equals_alone(pair: Pair) -> None:
    model, long, short = pair.patched(), tiny_ids(2 * LENGTH - 4), tiny_ids(LENGTH - 3, seed=1)
    ids, mask = left_padded(long, short)
    together = generate(model, ids, 8, attention_mask=mask)
    assert torch.equal(together[:1], generate(model, long, 8))
    assert torch.equal(together[1:], generate(model, short, 8))


@every_pair
def test_batch_equals_single(pair: Pair) -> None:
    model, rows = pair.patched(), torch.cat([tiny_ids(70, seed=i) for i in range(3)])
    together = logits(model, rows)
    for i in range(3):
        assert_same(together[i : i + 1], logits(model, rows[i : i + 1]))


@pytest.mark.parametrize("lengths", [(50, 70, 20), (20, 50)], ids=str)
@every_pair
def test_packed_equals_separate(pair: Pair, lengths: tuple[int, ...]) -> None:
    """Documents in one row, told apart by positions that start again, with neither mask nor cache."""
    model, texts = pair.patched(), [tiny_ids(n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    together = logits(model, torch.cat(texts, dim=1), position_ids=positions)
    separate = torch.cat([logits(model, text) for text in texts], dim=1)
    assert_same(together, separate)
    crossed = logits(model, torch.cat(texts, dim=1))
    assert difference(crossed, separate) > 1e-2, "one text would look the same: the test would prove nothing"


@every_pair
def test_short_after_long_equals_fresh(pair: Pair) -> None:
    model, short = pair.patched(), tiny_ids(24, seed=1)
    logits(model, tiny_ids(120))
    in_pieces(model, tiny_ids(70), (64, 6))
    assert torch.equal(logits(model, short), logits(pair.patched(), short))


SKIPPING = [*range(10), *range(17, 30), *range(31, 45), 60, *range(70, 81), *range(110, 140)]


@pytest.mark.parametrize("pair", [*PAIRS, *OTHERS], ids=str)
def test_positions_that_skip(pair: Pair) -> None:
    """As in position-skipping training; the mask of ones says that this is one text and not a pack."""
    ids, positions = tiny_ids(len(SKIPPING)), torch.tensor([SKIPPING])
    out = logits(pair.patched(), ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert_same(out, reference(pair, ids, SKIPPING))


@every_pair
def test_positions_that_start_late(pair: Pair) -> None:
    """A text whose first position is not 0, in one call and in pieces."""
    model, ids = pair.patched(), tiny_ids(60)
    positions = torch.arange(17, 77)[None]
    want = reference(pair, ids, positions[0].numpy())
    assert_same(logits(model, ids, position_ids=positions), want)
    assert_same(in_pieces(model, ids, (10, 20, 1, 1, 28), position_ids=positions), want)


@only("rope", "alibi", "dynamic_yarn", "learned")
def test_skipping_positions_over_a_cache(pair: Pair) -> None:
    """The keys of earlier calls keep the positions that they were given."""
    model, ids = pair.patched(), tiny_ids(len(SKIPPING))
    positions, ones = torch.tensor([SKIPPING]), torch.ones_like(ids)
    want = reference(pair, ids, SKIPPING)
    assert_same(in_pieces(model, ids, (20, 25, 1, 1, 32), position_ids=positions, attention_mask=ones), want)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("positions", ["packed", "skipping", "padded"])
def test_alibi_in_half_precision(host: str, dtype: torch.dtype, positions: str) -> None:
    """Distances beyond 256 do not fit into one 16-bit number, nor do those of positions that jump."""
    pair = Pair(host, "alibi")
    if positions == "packed":
        ids, at = tiny_ids(400), torch.cat((torch.arange(350), torch.arange(50)))[None]
        inputs: dict[str, Any] = {"position_ids": at}
    elif positions == "skipping":
        ids = tiny_ids(60)
        inputs = {"position_ids": torch.arange(60)[None] * 37, "attention_mask": torch.ones_like(ids)}
    else:
        ids, mask = left_padded(tiny_ids(400), tiny_ids(300, seed=1))
        inputs = {"attention_mask": mask}
    exact = logits(pair.patched(), ids, **inputs)
    rough = logits(pair.patched().to(dtype), ids, **inputs)
    keep = inputs["attention_mask"].bool() if positions == "padded" else torch.ones_like(ids).bool()
    off = (rough - exact)[keep].pow(2).mean().sqrt() / exact[keep].pow(2).mean().sqrt()
    assert off < (0.08 if dtype == torch.bfloat16 else 0.01)


@only(*DYNAMIC)
def test_a_prefix_does_not_change_when_text_is_appended(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(5 * LENGTH)
    whole = logits(model, ids)
    for n in (LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 3 * LENGTH, 4 * LENGTH + 1):
        assert_same(logits(model, ids[:, :n]), whole[:, :n], 2e-5)


@pytest.mark.parametrize("name", ["dynamic_ntk", "dynamic_yarn"])
def test_below_the_trained_length_dynamic_is_plain(name: str) -> None:
    pair = Pair("llama", name)
    model, ids = pair.patched(), tiny_ids(3 * LENGTH)
    assert torch.equal(logits(model, ids[:, :LENGTH]), logits(pair.stock(), ids[:, :LENGTH]))
    assert_same(logits(model, ids)[:, :LENGTH], logits(pair.stock(), ids)[:, :LENGTH], 2e-5)
    for host in ("gpt2", "bloom"):
        short = {"original_max_position_embeddings": LENGTH}
        plain = logits(Pair(host, "rope").patched(), ids)[:, :LENGTH]
        assert_same(logits(patch_model(Pair(host, name).stock(), name, **short), ids)[:, :LENGTH], plain, 2e-5)
