"""Every encoding on every host: it moves the logits, to where an oracle that shares no code says, and stays exact."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle_models import learned_rows, rotations, sinusoidal_rows
from pairs import (
    HOSTS,
    LENGTH,
    NATIVE,
    OTHERS,
    PAIRS,
    RESIZED,
    ROTATIONS,
    SHAPES,
    Pair,
    assert_same,
    difference,
    every_pair,
    logits,
    reference,
)
from tiny import tiny_ids, tiny_model

from hf_posenc import get_encoding, patch_model
from hf_posenc.patching import find_backbone
from hf_posenc.positions import DescribeCall

LONG = 144
FAR = 32_768  # phases must be exact up to here


@every_pair
def test_logits_move(pair: Pair) -> None:
    ids = tiny_ids(LENGTH)
    stock, patched = logits(pair.stock(), ids), logits(pair.patched(), ids)
    moved = difference(patched, stock)
    if pair.dynamic and pair.host == "llama" and pair.name != "longrope":
        assert moved == 0, "below the trained length a dynamic encoding is the plain model, bit for bit"
        beyond = tiny_ids(3 * LENGTH)
        moved = difference(logits(pair.patched(), beyond), logits(pair.stock(), beyond))
    assert moved > 1e-2


@pytest.mark.parametrize("host", HOSTS)
def test_the_native_encoding_changes_nothing(host: str) -> None:
    """Bit for bit; only BLOOM's attention goes from `baddbmm` to sdpa, which is equal up to rounding."""
    model, ids = tiny_model(host), tiny_ids(LENGTH)
    before = logits(model, ids)
    after = logits(patch_model(model, NATIVE[host]), ids)
    if host == "bloom":
        assert_same(after, before, 1e-5)
    else:
        assert torch.equal(after, before)


@pytest.mark.parametrize("pair", [*PAIRS, *OTHERS, *RESIZED, *SHAPES], ids=str)
def test_logits_equal_the_oracle(pair: Pair) -> None:
    ids = tiny_ids(LONG)
    assert_same(logits(pair.patched(), ids), reference(pair, ids))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["rope", "alibi", "sinusoidal", "nope"])
def test_without_options(host: str, name: str) -> None:
    pair = Pair(host, name)
    ids = tiny_ids(LONG)
    assert_same(logits(pair.patched(), ids), reference(pair, ids))


def test_gpt2_own_table_up_to_its_end() -> None:
    pair = Pair("gpt2", "learned")
    assert_same(logits(pair.patched(), tiny_ids(LENGTH)), reference(pair, tiny_ids(LENGTH)))


@pytest.mark.parametrize("pair", [pair for pair in [*PAIRS, *OTHERS, *SHAPES] if pair.name in ROTATIONS], ids=str)
def test_frequencies_equal_the_oracle(pair: Pair) -> None:
    model = pair.patched()
    encoding: Any = get_encoding(model)
    dim = model.config.hidden_size // model.config.num_attention_heads
    dim = getattr(model.config, "head_dim", None) or dim
    positions = np.array([0, LENGTH - 1, LENGTH, 2 * LENGTH, 1000])
    for t, (want, scale) in zip(positions, rotations(pair.stock().config, pair.name, positions, **pair.options)):
        if pair.dynamic:
            found = encoding.segment_inv_freq(dim, int(encoding.segment(torch.tensor([t]))))
        else:
            found = encoding.inv_freq(dim)
        np.testing.assert_allclose(found[0].double().numpy(), want, rtol=2e-6)
        assert found[1] == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize(
    "pair", [p for p in [*PAIRS, *OTHERS, *RESIZED] if p.name in ("learned", "sinusoidal")], ids=str
)
def test_tables_equal_the_oracle(pair: Pair) -> None:
    model, stock = pair.patched(), pair.stock()
    _, backbone = find_backbone(model)
    positions = np.arange(LONG)
    state = {key: value.double().numpy() for key, value in stock.state_dict().items()}
    rows = learned_rows if pair.name == "learned" else sinusoidal_rows
    want = rows(state, stock.config, positions, **pair.options)
    if pair.name == "sinusoidal":
        found = get_encoding(model).vectors(torch.arange(LONG), stock.config.hidden_size)  # type: ignore[union-attr]
    else:
        found = (backbone.wpe if pair.host == "gpt2" else backbone.posenc).weight[:LONG]
    np.testing.assert_allclose(found.detach().double().numpy(), want, atol=2e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 25, 32, 40, 71])
@pytest.mark.parametrize("factor", [1, 2.5])
def test_slopes_equal_the_oracle(heads: int, factor: float) -> None:
    from hf_posenc.encodings import Alibi

    np.testing.assert_allclose(Alibi(factor=factor).slopes(heads).numpy(), oracle.slopes(heads, factor), rtol=1e-6)


def tables_in_use(model: Any, positions: torch.Tensor) -> torch.Tensor:
    """cos + i·sin (n, pairs) that a query at each of `positions` is turned with in all, early and late."""
    _, backbone = find_backbone(model)
    hook = next((h for h in backbone._forward_pre_hooks.values() if isinstance(h, DescribeCall)), None)
    found = []
    for t in positions[0]:
        at = t.reshape(1, 1)
        call = None if hook is None else hook.describe({"input_ids": at, "position_ids": at})
        early = call is None or call.cos is None
        cos, sin = backbone.rotary_emb(next(model.parameters()), at) if early else (call.cos, call.sin)
        turned = torch.complex(cos[0, 0].double(), sin[0, 0].double())
        for turn in () if call is None else call.turns:
            late = turn.tables.between(0, 1, at.device)
            turned = turned * torch.complex(*(table[0, 0].double() for table in late))
        found.append(turned[: len(turned) // 2])
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.name in ROTATIONS], ids=str)
def test_phases_stay_exact_in_half_precision(pair: Pair, dtype: torch.dtype) -> None:
    positions = np.array([0, 1, LENGTH, 777, FAR - 1])
    model = pair.patched().to(dtype)
    wanted = rotations(pair.stock().config, pair.name, positions, **pair.options)
    in_use = tables_in_use(model, torch.from_numpy(positions)[None])
    for i, (t, (inv_freq, scale)) in enumerate(zip(positions, wanted)):
        phase = torch.from_numpy(t * inv_freq)
        off = (in_use[i] / scale - torch.polar(torch.ones_like(phase), phase)).abs().max()
        assert off < 1e-2, f"{off:.3g} rad at position {t}"


@pytest.mark.parametrize(("how", "share"), [("bfloat16", 0.25), ("half", 0.03)])
@every_pair
def test_half_precision_is_close(pair: Pair, how: str, share: float) -> None:
    """At far positions where the encoding has no end; rounded frequencies or positions would give a share near 1."""
    ids = tiny_ids(2 * LENGTH + 5)
    start = 0 if pair.name == "learned" else FAR - 100
    positions = torch.arange(start, start + ids.shape[1])[None]
    exact = logits(pair.patched(), ids, position_ids=positions)
    rough = logits(getattr(pair.patched(), how)(), ids, position_ids=positions)
    share *= 2 if pair.name == "dual_chunk" else 1  # whose temperature makes far scores larger, and their rounding
    assert (rough - exact).pow(2).mean().sqrt() < share * exact.pow(2).mean().sqrt()


@every_pair
def test_meta_and_back(pair: Pair) -> None:
    """A trip over the meta device loses every tensor: what is not in the state dict must come back by itself."""
    model, ids = pair.patched(), tiny_ids(LONG)
    before, state = logits(model, ids), {key: value.clone() for key, value in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(logits(model, ids), before)
