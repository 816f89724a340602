"""What the textbooks state about position encodings, and numbers from the papers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pairs import DYNAMIC, HOSTS, LENGTH, PAIRS, ROTATIONS, Pair, assert_same, difference, generate, logits, only
from tiny import tiny_ids
from torch import Tensor

from hf_posenc import encodings as e
from hf_posenc import get_encoding, patch_model, unpatch_model
from hf_posenc.encodings import frequencies
from hf_posenc.encodings.absolute import resize_table, sinusoid
from hf_posenc.encodings.score import alibi_slopes
from hf_posenc.errors import ReachError
from hf_posenc.rotation import cos_sin, rotate


def resolved(name: str, dim: int, length: int, theta: float = 1e4, **options: Any) -> Any:
    """An encoding with everything filled in, without any model."""
    geometry = e.Geometry(64, 4, dim, theta, length, lambda: 1.0)
    return {cls.name: cls for cls in vars(e).values() if hasattr(cls, "name")}[name](**options).resolve(geometry)


@only(*ROTATIONS)
def test_rotated_scores_depend_on_the_distance_alone(pair: Pair) -> None:
    encoding: Any = get_encoding(pair.patched())
    dim = 16 if pair.host == "llama" else 12
    sets = [encoding.segment_inv_freq(dim, k) for k in range(3)] if pair.dynamic else [encoding.inv_freq(dim)]
    q, k = torch.randn(2, 1, 1, 1, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for inv_freq, scale in sets:

        def turned(x: Tensor, t: int, inv_freq: Tensor = inv_freq, scale: float = scale) -> Tensor:
            angles = torch.cat((t * inv_freq.double(),) * 2)[None, None]
            return rotate(x, angles.cos() * scale, angles.sin() * scale)

        def score(i: int, j: int) -> float:
            return float((turned(q, i) * turned(k, j)).sum())

        for i, j in ((5, 3), (40, 0), (7, 7)):
            assert score(i + 1000, j + 1000) == pytest.approx(score(i, j), abs=1e-9)
        assert abs(score(5, 3) - score(5, 2)) > 1e-3
        assert score(7, 7) == pytest.approx(float((q * k).sum()) * scale**2)


@only("rope", "linear", "ntk", "ntk_by_parts", "yarn", "llama3", "alibi", "nope")
def test_relative_encodings_do_not_see_a_shift(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(60)
    for shift in (1, 50, 4000):
        moved = logits(model, ids, position_ids=torch.arange(60)[None] + shift)
        assert_same(moved, logits(model, ids), 1e-3 if shift == 4000 else 1e-4)


@only("sinusoidal", "learned")
def test_absolute_encodings_do_see_a_shift(pair: Pair) -> None:
    model, ids = pair.patched(), tiny_ids(60)
    moved = logits(model, ids, position_ids=torch.arange(60)[None] + 50)
    assert difference(moved, logits(model, ids)) > 1e-2


@pytest.mark.parametrize("layout", ["interleaved", "concat"])
def test_a_shifted_sinusoid_is_a_linear_map(layout: Any) -> None:
    """PE(p + k) = M_k PE(p) with one M_k for all p: it is fitted on some positions, and holds at others."""
    dim, k = 16, 7
    positions = torch.randint(0, 60_000, (400,), generator=torch.Generator().manual_seed(0))
    here, there = (sinusoid(positions + s, dim, layout=layout).double() for s in (0, k))
    mapping = torch.linalg.lstsq(here[:100], there[:100]).solution
    assert (here[100:] @ mapping - there[100:]).abs().max() < 1e-3
    assert (here - there).abs().max() > 0.5


def test_sinusoidal_layouts_hold_the_same_kind_of_numbers() -> None:
    p = torch.tensor([0, 3, 500])
    inter, concat = sinusoid(p, 8, base=100.0), sinusoid(p, 8, base=100.0, layout="concat")
    for row, t in enumerate(p.tolist()):
        for i in range(4):
            assert float(inter[row, 2 * i]) == pytest.approx(math.sin(t / 100 ** (2 * i / 8)), abs=1e-5)
            assert float(inter[row, 2 * i + 1]) == pytest.approx(math.cos(t / 100 ** (2 * i / 8)), abs=1e-5)
            assert float(concat[row, i]) == pytest.approx(math.sin(t / 100 ** (i / 3)), abs=1e-5)
            assert float(concat[row, 4 + i]) == pytest.approx(math.cos(t / 100 ** (i / 3)), abs=1e-5)


def test_without_positions_and_without_a_causal_mask_order_is_invisible() -> None:
    """Permutation-equivariant; with a position encoding, or with the causal mask, it is not."""
    n = 40
    ids, order = tiny_ids(n), torch.randperm(n, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(1, 1, n, n, dtype=torch.bool)

    def effect(name: str, **inputs: Any) -> float:
        model = patch_model(Pair("llama", name).stock(), name)
        return difference(logits(model, ids[:, order], **inputs), logits(model, ids, **inputs)[:, order])

    assert effect("nope", attention_mask=everything) < 1e-5
    assert effect("nope") > 1e-2
    for name in ("rope", "alibi", "sinusoidal"):
        assert effect(name, attention_mask=everything, position_ids=torch.arange(n)[None]) > 1e-2


@pytest.mark.parametrize("host", HOSTS)
def test_alibi_has_no_parameters_and_no_end(host: str) -> None:
    stock = Pair(host, "alibi").stock()
    keys = set(stock.state_dict())
    model = patch_model(stock, "alibi")
    assert set(model.state_dict()) == keys
    far = logits(model, tiny_ids(20 * LENGTH))
    assert far.isfinite().all()
    assert generate(model, tiny_ids(4 * LENGTH), 3).shape == (1, 3)


@pytest.mark.parametrize("host", HOSTS)
def test_alibi_forgets_what_is_far(host: str) -> None:
    """The steepest slopes first: a changed first token matters less the further away the reader is."""
    model, ids = patch_model(Pair(host, "alibi").stock(), "alibi"), tiny_ids(300)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 97
    moved = (logits(model, ids) - logits(model, other)).abs().amax(-1)[0]
    assert moved[1:6].mean() > 5 * moved[-20:].mean()


@pytest.mark.parametrize("pair", [Pair("gpt2", "learned"), *(p for p in PAIRS if p.name == "learned")], ids=str)
def test_a_learned_table_ends(pair: Pair) -> None:
    """It answers up to its last row; the error past it names the limit and the ways out, also in `generate`."""
    model = pair.patched()
    rows = pair.options.get("max_position_embeddings", int(LENGTH * pair.options.get("factor", 1)))
    assert logits(model, tiny_ids(rows)).isfinite().all()
    for run in (
        lambda: logits(model, tiny_ids(rows + 1)),
        lambda: logits(model, tiny_ids(3), position_ids=torch.tensor([[0, 1, rows]])),
        lambda: generate(model, tiny_ids(rows - 2), 5),
    ):
        with pytest.raises(ReachError, match=f"table of {rows} .*resize=.*alibi") as caught:
            run()
        assert isinstance(caught.value, IndexError)
    assert logits(model, tiny_ids(rows)).isfinite().all(), "the model is still good after it"


def test_the_ways_out_of_a_learned_table_work() -> None:
    model, long = Pair("gpt2", "learned").stock(), tiny_ids(4 * LENGTH)
    for name, options in (("learned", {"resize": "interpolate", "factor": 4}), ("rope", {}), ("alibi", {})):
        assert logits(patch_model(model, name, **options), long).isfinite().all()
        unpatch_model(model)


@only(*DYNAMIC)
def test_dynamic_encodings_in_each_segment(pair: Pair) -> None:
    """Where n is the end of the last segment, the last token is read as the static encoding for n reads it."""
    encoding: Any = get_encoding(pair.patched())
    if pair.name == "longrope":
        assert encoding.segment(torch.tensor([-1, 0, 31, 32, 1000])).tolist() == [0, 0, 0, 1, 1]
        assert [encoding.segment_of(position) for position in (-1, 0, 31, 32, 1000)] == [0, 0, 0, 1, 1]
        return
    t = torch.tensor([0, 31, 32, 63, 64, 127, 128, 255, 256, 32 * 2**20 - 1, 32 * 2**20])
    assert encoding.segment(t).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 20, 21]
    assert [encoding.segment_of(position) for position in t.tolist()] == encoding.segment(t).tolist()
    for segment in (1, 2, 5):
        found, scale = encoding.segment_inv_freq(16, segment)
        if pair.name == "dynamic_yarn":
            static = resolved("yarn", 16, LENGTH, encoding.theta, factor=2.0**segment, beta_fast=4, beta_slow=0.5)
            want, wanted_scale = static.inv_freq(16)
        else:
            want = frequencies.rope(16, encoding.theta * (2 * 2**segment - 1) ** (16 / 14))
            wanted_scale = 1.0
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
        assert scale == pytest.approx(wanted_scale)


@pytest.mark.parametrize(
    ("dim", "theta", "length", "truncate", "want"),
    [
        pytest.param(128, 1e4, 4096, False, (20.94, 45.03), id="Llama-2-raw"),
        pytest.param(128, 1e4, 4096, True, (20, 46), id="Llama-2"),
        pytest.param(128, 1e4, 2048, True, (16, 41), id="Llama-1"),
        pytest.param(128, 1e4, 8192, True, (25, 50), id="Mistral"),
        pytest.param(128, 5e5, 8192, True, (18, 35), id="Llama-3"),
        pytest.param(128, 1e6, 32768, True, (23, 40), id="Qwen2.5"),
        pytest.param(64, 1e5, 8192, True, (10, 20), id="SmolLM2-135M"),
        pytest.param(64, 150000, 4096, False, (8.0927791155, 17.3980245016), id="GPT-OSS"),
    ],
)
def test_correction_range(dim: int, theta: float, length: int, truncate: bool, want: tuple[float, float]) -> None:
    found = frequencies.yarn_range(32, 1, dim, theta, length, truncate)
    assert found == pytest.approx(want, abs=5e-3 if want[0] == 20.94 else 1e-9)


def test_correction_range_is_not_cut_at_the_last_pair() -> None:
    assert frequencies.yarn_range(32, 1, 128, 1e4, 131072, False)[1] == pytest.approx(69.11, abs=5e-3)
    assert frequencies.yarn_range(32, 1, 128, 1e4, 2**40, True) == (127, 127)
    assert frequencies.by_parts(128, 1e4, 4, 2**40, 32, 1, True).isfinite().all()


def test_yarn_multipliers() -> None:
    """A blend that is turned round would give 0.0625 at the first pair."""
    found, scale = resolved("yarn", 128, 4096, factor=16).inv_freq(128)
    multipliers = found / frequencies.rope(128, 1e4)
    assert multipliers[[0, 30, 63]].tolist() == pytest.approx([1.0, 0.639, 0.0625], abs=1e-3)
    assert scale == pytest.approx(0.1 * math.log(16) + 1, rel=1e-12)


def test_temperatures() -> None:
    assert frequencies.yarn_temperature(4) == pytest.approx(1.138629436, abs=1e-9)
    assert frequencies.yarn_temperature(64) == pytest.approx(1 + 0.1 * math.log(64), abs=1e-12)
    assert frequencies.yarn_temperature(1) == 1
    assert frequencies.longrope_temperature(4, 32) == pytest.approx(1.18321596, abs=1e-8)
    assert resolved("yarn", 128, 4096, factor=4, attention_factor=1).inv_freq(128)[1] == 1
    assert resolved("ntk_by_parts", 128, 4096, factor=4).inv_freq(128)[1] == 1


def test_ntk_base() -> None:
    assert frequencies.ntk_theta(128, 1e4, 4) == pytest.approx(40889.9, abs=0.05)
    ratio = resolved("ntk", 128, 4096, factor=4).inv_freq(128)[0] / frequencies.rope(128, 1e4)
    assert float(ratio[0]) == 1 and float(ratio[-1]) == pytest.approx(1 / 4, rel=1e-5)


def test_dynamic_ntk_scale() -> None:
    assert frequencies.dynamic_scale(8, 8) == 57
    assert frequencies.dynamic_scale(1, 4) == 4


def test_llama3_of_the_released_model() -> None:
    """d 128, theta 5e5, L 8192, s 8: the fast pairs kept, the slow ones divided by eight, a ramp between."""
    found = resolved("llama3", 128, 8192, 5e5).inv_freq(128)[0] / frequencies.rope(128, 5e5)
    assert (found[:29] == 1).all() and found[35:].tolist() == pytest.approx([1 / 8] * 29)
    assert (found[29:35].diff() < 0).all() and 1 / 8 < found[34] < found[29] < 1


@pytest.mark.parametrize(
    ("heads", "want"),
    [
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [*(2.0**-h for h in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
        (8, [2.0**-h for h in range(1, 9)]),
    ],
)
def test_alibi_slopes(heads: int, want: list[float]) -> None:
    assert alibi_slopes(heads).tolist() == pytest.approx(want, rel=1e-6)
    assert e.Alibi(factor=4).slopes(heads).tolist() == pytest.approx([m / 4 for m in want], rel=1e-6)


@pytest.mark.parametrize("rule", ["repeat", "hierarchical"])
def test_resizing_keeps_the_first_rows(rule: Any) -> None:
    table = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(resize_table(table, rule, 64, factor=8)[:8], table, atol=1e-6)


@pytest.mark.parametrize("rule", ["interpolate", "cubic", "group", "repeat", "hierarchical"])
def test_resizing_by_one_changes_nothing(rule: Any) -> None:
    table = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(resize_table(table, rule, 8, factor=1), table, atol=1e-6)


def test_hierarchical_reach() -> None:
    """n rows reach n² positions, all of them different."""
    model = patch_model(Pair("gpt2", "learned").stock(), "learned", resize="hierarchical", factor=LENGTH)
    table = model.transformer.wpe.weight
    assert len(table) == LENGTH**2
    assert torch.pdist(table.detach()).min() > 1e-2


def test_angles_are_exact_far_out() -> None:
    """cos and sin at position 32767 against double precision, for the same frequencies."""
    inv_freq = frequencies.rope(128, 5e5)
    cos, sin = cos_sin(inv_freq, 1.0, torch.tensor([[2**15 - 1]]))
    angle = (2**15 - 1) * inv_freq.double()
    np.testing.assert_allclose(cos[0, 0, :64].double(), angle.cos(), atol=1e-2)
    np.testing.assert_allclose(sin[0, 0, :64].double(), angle.sin(), atol=1e-2)
