"""Encodings that show some pairs another distance: in small blocks, at borders, and far out."""

from typing import Any

import numpy as np
import oracle_host
import pytest
import torch
from oracle_distance import Distances, seen
from oracle_models import reference_logits
from pairs import DISTANCES, PAIRS, Pair, assert_same, cache_name, difference, in_pieces, logits, reference
from refusals import assert_refused
from tiny import LENGTH, tiny_ids, tiny_model

import hf_posenc.views
from hf_posenc import patch_model
from hf_posenc.attention import attend
from hf_posenc.encodings import Geometry
from hf_posenc.errors import OptionError, UnsupportedError
from hf_posenc.positions import Call
from hf_posenc.registry import create

LONG = 100
OF_LLAMA = [pair for pair in PAIRS if pair.host == "llama" and pair.name in DISTANCES]
every_distance = pytest.mark.parametrize("pair", OF_LLAMA, ids=str)
BORDERED = [pair for pair in OF_LLAMA if pair.name != "xpos"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a text has many, with several borders in each and some that fall between them."""
    monkeypatch.setattr(hf_posenc.views, "VIEW_BLOCK", 16)


def resolved(name: str, length: int, **options: Any) -> Any:
    return create(name, **options).resolve(Geometry(64, 4, 16, None, length, lambda: 1.0))


# --- what the papers state -------------------------------------------------------------------------------------------


def test_the_oracle_has_the_papers_own_numbers() -> None:
    """Dual Chunk's figure 2: chunks of 6, trained on 10. SelfExtend's figure 3: trained on 7, window 4, groups of 2."""
    sizes = {"chunk_size": 9, "local_size": 3}
    assert [seen("dual_chunk", i, 0, 10, **sizes) for i in range(6, 12)] == [6, 7, 8, 9, 9, 9]
    assert [seen("dual_chunk", i, 0, 10, **sizes) for i in (12, 15, 17)] == [9, 9, 9]
    assert [seen("dual_chunk", 11, j, 10, **sizes) for j in range(6, 12)] == [5, 4, 3, 2, 1, 0]
    groups = {"window_size": 4, "group_size": 2}
    assert [seen("self_extend", 9, j, 7, **groups) for j in range(10)] == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert [seen("rerope", 9, j, 7, window=4) for j in (0, 4, 5, 6, 9)] == [4, 4, 4, 3, 0]
    assert seen("leaky_rerope", 36, 0, 7, window=4, k=16) == 6


@pytest.mark.parametrize(
    ("pair", "both_ways"), [*((p, False) for p in OF_LLAMA), *((p, True) for p in OF_LLAMA if "rerope" in p.name)]
)
def test_distances_equal_the_oracle(pair: Pair, both_ways: bool) -> None:
    encoding = resolved(pair.name, LENGTH, **pair.options)
    at = torch.tensor([0, 1, 8, 9, 10, 11, 13, 20, 27, 28, 29, 41, 77, 1000])
    found = encoding.distance(at, at, both_ways).numpy()
    for row, i in enumerate(at.tolist()):
        for column, j in enumerate(at.tolist()):
            if both_ways or j <= i:
                want = seen(pair.name, i, j, LENGTH, both_ways, **pair.options)
                assert found[row, column] == pytest.approx(want, abs=1e-4)


def test_defaults_and_reach() -> None:
    """Published sizes where the trained length is that of the papers, and smaller ones below it."""
    assert [resolved("rerope", length).window for length in (4096, 1024, 64)] == [512, 256, 16]
    extended = resolved("self_extend", 4096)
    assert (extended.window_size, extended.group_size, extended.reach()) == (1024, 8, 25_600)
    assert resolved("leaky_rerope", 4096).reach() == (4096 - 512) * 16 + 512
    chunked = resolved("dual_chunk", 4096)
    assert (chunked.chunk_size, chunked.local_size, chunked.reach()) == (3072, 512, None)
    last = torch.tensor([extended.reach() - 1])
    assert extended.distance(last, torch.tensor([0])).max() == 4095
    assert chunked.distance(torch.tensor([10**6]), torch.arange(10**6)).max() == 3072
    assert chunked.query_factor(torch.tensor([4095, 4 * 4096 - 1])).tolist() == pytest.approx([1, 1.138629436**2])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rerope", {"window": 32}, "window=32|trained length, 32"),
        ("rerope", {"window": 0}, "window=0|>= 1"),
        ("leaky_rerope", {"k": 0.5}, "k=0.5|>= 1"),
        ("self_extend", {"window_size": 40}, "window_size=40|trained length, 32"),
        ("self_extend", {"group_size": 0}, "group_size=0|>= 1"),
        ("dual_chunk", {"chunk_size": 33}, "chunk_size=33|at most the trained length, 32"),
        ("dual_chunk", {"chunk_size": 16, "local_size": 16}, "local_size=16|chunk_size=16"),
        ("dual_chunk", {"mscale": -1.0}, "mscale=-1.0|>= 0"),
        ("xpos", {"scale_base": 0.0}, "scale_base=0.0|above 0"),
        ("xpos", {"gamma": 0.0}, "gamma=0.0|above 0"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    assert_refused(OptionError, words, lambda: patch_model(tiny_model("llama"), name, **options))


# --- the same logits, however the call is made -----------------------------------------------------------------------


@pytest.mark.parametrize("base", ["sdpa", "eager"])
@every_distance
def test_blocks_equal_the_oracle(pair: Pair, base: str) -> None:
    model, ids = pair.patched(attn_implementation=base), tiny_ids(LONG)
    want = reference(pair, ids)
    assert_same(logits(model, ids), want)
    assert_same(in_pieces(model, ids, (37, 3, 1, 1, 40, 1, 17)), want)
    with torch.enable_grad():
        assert_same(model(input_ids=ids, use_cache=False).logits.detach(), want)


@pytest.mark.parametrize("grad", [False, True], ids=["joined", "side by side"])
@every_distance
def test_rows_of_their_own(pair: Pair, grad: bool) -> None:
    """Behind padding, packed, and at positions that skip, each over the borders of blocks."""
    model, ids, short = pair.patched(), tiny_ids(LONG), tiny_ids(57, seed=1)
    batch = torch.cat((ids, torch.cat((ids[:, : LONG - 57], short), dim=1)))
    mask = torch.ones_like(batch)
    mask[1, : LONG - 57] = 0
    documents = torch.cat((torch.arange(63), torch.arange(LONG - 63)))[None]
    skipping = torch.cat((torch.arange(30), torch.arange(35, 70), torch.arange(200, 235)))[None]

    def run(x: torch.Tensor, **given: Any) -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            return model(input_ids=x, use_cache=False, **given).logits.detach()

    padded = run(batch, attention_mask=mask)
    assert_same(padded[:1], reference(pair, ids))
    assert_same(padded[1:, LONG - 57 :], reference(pair, short))
    packed = run(ids, position_ids=documents)
    assert_same(packed[:, :63], reference(pair, ids[:, :63]))
    assert_same(packed[:, 63:], reference(pair, ids[:, 63:]))
    given = {"position_ids": skipping, "attention_mask": torch.ones_like(ids)}
    assert_same(run(ids, **given), reference(pair, ids, skipping[0].numpy()))
    assert_same(in_pieces(model, ids, (40, 1, 30, 1, 28), **given), reference(pair, ids, skipping[0].numpy()))


@pytest.mark.parametrize("least", [-torch.inf, -1e9])
@every_distance
def test_a_mask_that_hides_whole_views(pair: Pair, least: float) -> None:
    """A window of the caller's own, and as many key heads as queries: whole, in chunks and in steps."""
    shape = {"num_key_value_heads": 4}
    pair, ids, step = Pair("llama", pair.name, pair.options, shape), tiny_ids(LONG), torch.arange(LONG)
    apart = step[:, None] - step
    mask = torch.zeros(1, 1, LONG, LONG).masked_fill((apart < 0) | (apart >= 8), least)
    model, want = pair.patched(), reference_logits(pair.stock(), pair.name, pair.options, ids, window=8)
    at = step[None]
    assert_same(logits(model, ids, attention_mask=mask, position_ids=at), torch.from_numpy(want)[None])
    cache, parts = None, []
    for start, end in ((0, 60), (60, 70), *((i, i + 1) for i in range(70, LONG))):
        given = {} if cache is None else {cache_name(model): cache}
        with torch.no_grad():
            out = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :, start:end, :end],
                position_ids=at[:, start:end],
                use_cache=True,
                **given,
            )
        cache = out[cache_name(model)]
        parts.append(out.logits)
    assert_same(torch.cat(parts, dim=1), torch.from_numpy(want)[None])


@pytest.mark.parametrize("pair", BORDERED, ids=str)
def test_up_to_its_border_it_is_plain(pair: Pair) -> None:
    border = resolved(pair.name, LENGTH, **pair.options).border()
    ids = tiny_ids(LONG)
    plain, found = logits(Pair("llama", "rope").patched(), ids), logits(pair.patched(), ids)
    assert_same(found[:, :border], plain[:, :border], 2e-5)
    assert difference(found[:, border:], plain[:, border:]) > 1e-2


def test_xpos_far_out() -> None:
    """Counted from the first token its factors would be 0 and infinite there; angles are exact to 1e-2 radians."""
    pair, ids = Pair("llama", "xpos", {"scale_base": 20}), tiny_ids(LONG)
    model, mask, start = pair.patched(), torch.ones_like(ids), torch.arange(LONG)
    for at in (start + 30_000, start + (start >= 50) * 30_000):
        found = logits(model, ids, attention_mask=mask, position_ids=at[None])
        assert_same(found, reference(pair, ids, at.numpy()), 1e-2)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
@every_distance
def test_gradients_of_one_layer(pair: Pair, base: str) -> None:
    """Against those of a dense attention whose scores are made pair by pair."""
    n, generator, layer = 60, torch.Generator().manual_seed(0), pair.stock().model.layers[0].self_attn
    sizes = ((1, 4, n, 16), (1, 2, n, 16), (1, 2, n, 16))
    given = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    at, causal = torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril()
    encoding = resolved(pair.name, LENGTH, **pair.options)
    call = Call(at, at, views=hf_posenc.views.describe(encoding, 16, at, at, 0))
    exact = Distances(pair.name, at[0].numpy(), causal.numpy(), dim=16, theta=1e4, length=LENGTH, **pair.options)
    plan = oracle_host.Plan(oracle_host.Facts(), layer.config, at[0], causal, distances=exact)
    found = [x.clone().requires_grad_() for x in given]
    mask = None if base == "sdpa" else torch.zeros(1, 1, n, n).masked_fill(~causal, -1e9)
    out, _ = attend(base, layer, *found, mask, scaling=0.25, posenc=call)
    (out**3).sum().backward()
    wanted = [x.clone().requires_grad_() for x in given]
    query, key, value = (x[0].repeat_interleave(4 // x.shape[1], dim=0) for x in wanted)
    scores = oracle_host.distance_scores(query, key, plan) * 0.25
    weights = torch.softmax(scores.masked_fill(~causal, -torch.inf), dim=-1)
    dense = (weights @ value).transpose(0, 1)[None]
    (dense**3).sum().backward()
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    for got, want in zip(found, wanted):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-5)


@every_distance
def test_gradients_with_checkpointing(pair: Pair) -> None:
    """Two calls before one backward, whose layers are computed again when nobody remembers the first."""
    model, first, second = pair.patched(), tiny_ids(60), tiny_ids(45, seed=1)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (first, second)).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.train()
    model.gradient_checkpointing_enable()
    for got, want in zip(gradients(), plain):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_weights_are_on_their_own_keys() -> None:
    """Those of one view a pair add up to one, and none lies on a later token."""
    for pair in OF_LLAMA:
        model, ids = pair.patched(attn_implementation="eager"), tiny_ids(50)
        with torch.no_grad():
            layers = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
        for weights in layers:
            assert weights.shape == (1, 4, 50, 50)
            assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
            assert float(weights.triu(1).abs().max()) == 0


# --- where it cannot be ----------------------------------------------------------------------------------------------


@every_distance
def test_flex_attention_is_refused(pair: Pair) -> None:
    model = pair.stock()
    model.set_attn_implementation("flex_attention")
    assert_refused(UnsupportedError, "FlexAttention|sdpa", lambda: patch_model(model, pair.name, **pair.options))


def test_positions_as_numbers_of_any_kind() -> None:
    """A map of positions keeps their shape, whatever that is."""
    for pair in OF_LLAMA:
        encoding = resolved(pair.name, LENGTH, **pair.options)
        for shape in ((3,), (2, 3), (1, 2, 3)):
            at = torch.zeros(shape, dtype=torch.long)
            for view in encoding.views():
                assert view.query(at).shape == view.key(at).shape == at.shape
        assert np.isfinite(encoding.distance(torch.arange(5), torch.arange(5)).numpy()).all()
