"""The oracle itself, against numbers from the papers; the package is not involved."""

import math
from typing import Any

import numpy as np
import oracle
import oracle_biases
import oracle_distance
import oracle_layers
import oracle_tables
import pytest
from oracle import Array
from pairs import BIASES, DISTANCES, ENCODINGS, ROTATIONS

import hf_posenc


def assert_close(got: Array, want: Array, tolerance: float) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def multipliers(name: str, t: int = 0, *, dim: int = 128, theta: float = 1e4, length: int, **options: Any) -> Array:
    inv_freq, _ = oracle.rotation(name, t, dim=dim, theta=theta, length=length, **options)
    return inv_freq / oracle.frequencies(dim, theta)


@pytest.mark.parametrize(
    ("dim", "theta", "length", "truncate", "want"),
    [
        pytest.param(128, 1e4, 4096, True, (20, 46), id="llama-2"),
        pytest.param(128, 1e4, 4096, False, (20.94, 45.03), id="llama-2 raw"),
        pytest.param(128, 1e4, 2048, True, (16, 41), id="llama-1"),
        pytest.param(128, 1e4, 8192, True, (25, 50), id="mistral"),
        pytest.param(128, 5e5, 8192, True, (18, 35), id="llama-3"),
        pytest.param(128, 1e6, 32768, True, (23, 40), id="qwen2.5"),
        pytest.param(64, 1e5, 8192, True, (10, 20), id="smollm2-135m"),
        pytest.param(64, 150000, 4096, False, (8.0927791155, 17.3980245016), id="gpt-oss"),
    ],
)
def test_correction_range(dim: int, theta: float, length: int, truncate: bool, want: tuple[float, float]) -> None:
    got = oracle.correction_range(dim, theta, length, truncate=truncate)
    assert got == pytest.approx(want, abs=1e-10 if want[0] == 8.0927791155 else 0.005)


def test_correction_range_is_cut_at_the_width_and_not_at_the_last_pair() -> None:
    assert oracle.correction_range(128, 1e4, 131072, truncate=False)[1] == pytest.approx(69.11, abs=0.005)
    assert oracle.correction_range(16, 1e4, 10**30)[1] == 15


def test_yarn_blend_keeps_the_fast_pairs_and_divides_the_slow_ones() -> None:
    got = multipliers("yarn", length=4096, factor=16)[[0, 30, 63]]
    assert got == pytest.approx([1, 0.639, 0.0625], abs=0.0005)
    assert np.array_equal(
        multipliers("ntk_by_parts", length=4096, factor=16), multipliers("yarn", length=4096, factor=16)
    )


@pytest.mark.parametrize(("factor", "want"), [(1, 1), (4, 1.138629436), (64, 1.415888308)])
def test_yarn_temperature(factor: float, want: float) -> None:
    sizes: dict[str, Any] = {"dim": 128, "theta": 1e4, "length": 4096}
    assert oracle.rotation("yarn", 0, factor=factor, **sizes)[1] == pytest.approx(want, abs=1e-9)
    assert oracle.rotation("yarn", 0, factor=factor, attention_factor=1.5, **sizes)[1] == 1.5
    assert oracle.rotation("ntk_by_parts", 0, factor=factor, **sizes)[1] == 1


def test_yarn_temperature_squared_on_deepseeks_softmax_scale() -> None:
    assert 16**-0.5 * oracle.temperature(40) ** 2 == pytest.approx(0.4684635518, abs=1e-10)


def test_ntk_base_and_ends() -> None:
    inv_freq, scale = oracle.rotation("ntk", 0, dim=128, theta=1e4, length=None, factor=4)
    assert inv_freq[1] ** -64 == pytest.approx(40889.9, abs=0.05)
    ratio = multipliers("ntk", length=4096, factor=4)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(1 / 4, rel=1e-12)
    assert scale == 1


def test_dynamic_ntk_multiplier_by_segments() -> None:
    def base_multiplier(t: int, factor: float) -> float:
        pair = multipliers("dynamic_ntk", t, length=32, factor=factor)[1]
        return pair ** -(128 / 2 * 126 / 128)

    assert base_multiplier(31, 8) == 1
    assert base_multiplier(32, 8) == pytest.approx(9)
    assert base_multiplier(63, 8) == pytest.approx(9)
    assert base_multiplier(64, 8) == pytest.approx(25)
    assert base_multiplier(128, 8) == pytest.approx(57)
    assert base_multiplier(255, 8) == pytest.approx(57)
    assert base_multiplier(255, 1) == pytest.approx(8)


def test_dynamic_yarn_by_segments() -> None:
    sizes: dict[str, Any] = {"dim": 128, "theta": 1e4, "length": 32}
    for t, factor in [(0, None), (31, None), (32, 2), (63, 2), (64, 4), (127, 4), (128, 8)]:
        inv_freq, scale = oracle.rotation("dynamic_yarn", t, **sizes)
        want = (
            oracle.rotation("rope", t, **sizes)
            if factor is None
            else oracle.rotation("yarn", t, factor=factor, **sizes)
        )
        assert np.array_equal(inv_freq, want[0])
        assert scale == want[1]


def test_linear_divides_every_pair() -> None:
    assert multipliers("linear", length=32, factor=4) == pytest.approx(0.25, rel=1e-12)


def test_llama3_keeps_blends_and_divides() -> None:
    ratio = multipliers("llama3", theta=5e5, length=8192)
    wavelength = 2 * math.pi / oracle.frequencies(128, 5e5)
    assert np.all(ratio[wavelength < 2048] == 1)
    assert ratio[wavelength > 8192] == pytest.approx(1 / 8, rel=1e-12)
    between = ratio[(wavelength >= 2048) & (wavelength <= 8192)]
    assert len(between) == 6
    assert np.all(np.diff(ratio) <= 0)
    assert np.all((between > 1 / 8) & (between < 1))


def test_ntk_mixed_divides_each_pair_by_more_than_the_last() -> None:
    """d = 128, s = 8: a = ln 8 / 64^0.75 = 0.0918992; pair 1 ÷ e^a, pair 16 ÷ 8^(1/4^0.75), pair 64 ÷ 8."""
    ratio = multipliers("ntk_mixed", length=4096, factor=8)
    assert ratio[0] == pytest.approx(math.exp(-0.0918992), rel=1e-6)
    assert ratio[15] == pytest.approx(8 ** -(4**-0.75), rel=1e-12)
    assert ratio[15] == pytest.approx(0.479413, abs=1e-6)
    assert ratio[63] == pytest.approx(1 / 8, rel=1e-12)
    assert np.all(np.diff(ratio) < 0)
    linear = multipliers("ntk_mixed", length=4096, factor=8, exponent=0)
    assert linear == pytest.approx(multipliers("linear", length=4096, factor=8), rel=1e-12)


@pytest.mark.parametrize(("p", "dim", "turning"), [(0.75, 128, 48), (0.25, 128, 16), (1, 12, 6), (0.29, 200, 29)])
def test_p_rope_turns_the_fastest_pairs(p: float, dim: int, turning: int) -> None:
    inv_freq, scale = oracle.rotation("p_rope", 7, dim=dim, theta=1e4, length=None, p=p)
    assert np.array_equal(inv_freq[:turning], oracle.frequencies(dim, 1e4)[:turning])
    assert np.all(inv_freq[turning:] == 0) and np.count_nonzero(inv_freq) == turning
    assert scale == 1


def test_resonance_rounds_wavelengths_to_whole_tokens() -> None:
    """d = 16, theta = 1e4: 2π·10^(i/2) is 6.28, 19.87, 62.83, 198.69, 628.3, 1986.9, 6283.2, 19869.2 tokens."""
    inv_freq, _ = oracle.rotation("rope", 0, dim=16, theta=1e4, length=None, resonance=True)
    assert 2 * math.pi / inv_freq == pytest.approx([6, 20, 63, 199, 628, 1987, 6283, 19869], rel=1e-12)
    still, _ = oracle.rotation("p_rope", 0, dim=16, theta=1e4, length=None, p=0.5, resonance=True)
    assert np.array_equal(still, [*inv_freq[:4], 0, 0, 0, 0])
    yarn, scale = oracle.rotation("yarn", 0, dim=16, theta=1e4, length=256, factor=4, resonance=True)
    assert 2 * math.pi / yarn == pytest.approx([6, 24, 101, 454, 2513, 7948, 25133, 79477], rel=1e-12)
    assert scale == oracle.temperature(4)


def test_log_n_scaling() -> None:
    assert [oracle.query_scale(t, 1024) for t in (0, 1, 1022, 1023)] == [1, 1, 1, 1]
    assert oracle.query_scale(2047, 1024) == pytest.approx(1.1)
    assert oracle.query_scale(32767, 1024) == pytest.approx(1.5)


def test_longrope_lists_and_scale() -> None:
    options: dict[str, Any] = {"short_factor": [1, 2, 3, 4], "long_factor": [5, 6, 7, 8]}
    sizes: dict[str, Any] = {"dim": 8, "length": 32}
    assert multipliers("longrope", 31, factor=4, **options, **sizes) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert multipliers("longrope", 32, factor=4, **options, **sizes) == pytest.approx([1 / 5, 1 / 6, 1 / 7, 1 / 8])
    for t in (0, 32):
        assert oracle.rotation("longrope", t, theta=1e4, factor=4, **options, **sizes)[1] == pytest.approx(1.18321596)
        assert oracle.rotation("longrope", t, theta=1e4, attention_factor=2, **options, **sizes)[1] == 2


@pytest.mark.parametrize(
    ("heads", "want"),
    [
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
        (12, [2.0**-h for h in range(1, 9)] + [0.70710678, 0.35355339, 0.17677670, 0.08838835]),
        (16, [2 ** (-h / 2) for h in range(1, 17)]),
        (1, [2.0**-8]),
    ],
)
def test_alibi_slopes(heads: int, want: list[float]) -> None:
    assert oracle.slopes(heads) == pytest.approx(want, abs=5e-9)
    assert oracle.slopes(heads, 4) == pytest.approx(oracle.slopes(heads) / 4, rel=1e-12)


def test_alibi_falls_with_distance() -> None:
    assert oracle.alibi(7, 3, oracle.slopes(2)) == pytest.approx([-4 / 16, -4 / 256])


def test_rope_score_depends_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 16))
    inv_freq, _ = oracle.rotation("rope", 0, dim=16, theta=1e4, length=None)

    def score(i: int, j: int) -> float:
        return float(oracle.rotate(q, i, inv_freq, 1) @ oracle.rotate(k, j, inv_freq, 1))

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-12)
    assert abs(score(9, 4) - score(4, 9)) > 1e-3
    assert score(3, 3) == pytest.approx(q @ k, rel=1e-12)


def test_rotate_turns_pairs_half_the_width_apart() -> None:
    x, angle = np.array([1.0, 0, 0, 0]), 0.5
    assert oracle.rotate(x, 5, np.array([0.1, 0.01]), 2) == pytest.approx(
        [2 * math.cos(angle), 0, 2 * math.sin(angle), 0]
    )
    x, inv_freq = np.random.default_rng(0).normal(size=(2, 7, 12)), oracle.frequencies(12, 1e4)
    turned = oracle_layers.turn(x, np.arange(7), inv_freq, 1.5)
    for head in range(2):
        for p in range(7):
            assert turned[head, p] == pytest.approx(oracle.rotate(x[head, p], p, inv_freq, 1.5), rel=1e-12)


def test_sinusoid_layouts() -> None:
    assert oracle.sinusoid(0, 6) == pytest.approx([0, 1, 0, 1, 0, 1])
    assert oracle.sinusoid(3, 4) == pytest.approx([math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)])
    assert oracle.sinusoid(3, 4, 100, "concat") == pytest.approx(
        [math.sin(3), math.sin(0.03), math.cos(3), math.cos(0.03)]
    )
    assert math.sqrt(np.mean(oracle.sinusoid(77, 64) ** 2)) == pytest.approx(math.sqrt(0.5), rel=1e-12)


def test_sinusoid_of_a_shifted_position_is_a_linear_map_of_the_row() -> None:
    dim, k = 16, 5
    shift = np.zeros((dim, dim))
    for i in range(dim // 2):
        angle = k / 10000 ** (2 * i / dim)
        shift[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
            [math.cos(angle), math.sin(angle)],
            [-math.sin(angle), math.cos(angle)],
        ]
    for p in (0, 3, 200):
        assert oracle.sinusoid(p + k, dim) == pytest.approx(shift @ oracle.sinusoid(p, dim), abs=1e-12)


TABLE = np.random.default_rng(0).normal(size=(6, 3))


@pytest.mark.parametrize("rule", ["interpolate", "cubic", "group", "repeat", "hierarchical"])
def test_resize_by_one_changes_nothing(rule: str) -> None:
    assert oracle_tables.resize(TABLE, rule, 6, 1) == pytest.approx(TABLE, abs=1e-12)


def test_resize_rules() -> None:
    interpolated = oracle_tables.resize(TABLE, "interpolate", 24, 4)
    assert interpolated[::4] == pytest.approx(TABLE)
    assert interpolated[5] == pytest.approx(0.75 * TABLE[1] + 0.25 * TABLE[2])
    assert interpolated[20:] == pytest.approx(np.repeat(TABLE[5:], 4, axis=0))
    assert np.array_equal(oracle_tables.resize(TABLE, "group", 24, 4), np.repeat(TABLE, 4, axis=0))
    assert np.array_equal(oracle_tables.resize(TABLE, "repeat", 24, 4), np.tile(TABLE, (4, 1)))


def test_resize_cubic() -> None:
    resized = oracle_tables.resize(TABLE, "cubic", 12, 2)
    assert resized[::2] == pytest.approx(TABLE)
    assert resized[5] == pytest.approx((-TABLE[1] + 9 * TABLE[2] + 9 * TABLE[3] - TABLE[4]) / 16)
    assert resized[1] == pytest.approx((8 * TABLE[0] + 9 * TABLE[1] - TABLE[2]) / 16)
    squares = np.arange(8.0)[:, None] ** 2
    inside = oracle_tables.resize(squares, "cubic", 16, 2)[2:12, 0]
    assert inside == pytest.approx(np.arange(2, 12) ** 2 / 4)


def test_resize_hierarchical() -> None:
    resized = oracle_tables.resize(TABLE, "hierarchical", 36, 6, alpha=0.4)
    assert resized[:6] == pytest.approx(TABLE)
    u = (TABLE - 0.4 * TABLE[0]) / 0.6
    assert resized[2 * 6 + 5] == pytest.approx(0.4 * u[2] + 0.6 * u[5])
    assert len(np.unique(resized.round(12), axis=0)) == 36


def test_every_encoding_has_an_oracle_and_its_pairs() -> None:
    """A new row of the registry is to be missed here, and not by nobody."""
    rows = hf_posenc.list_encodings()
    assert {row.name for row in rows} == set(ENCODINGS)
    for row in rows:
        assert row.name not in ROTATIONS or callable(getattr(oracle, row.name, None)), row.name
    assert {row.name for row in rows if row.seam == "rotation"} == {*ROTATIONS, *oracle_distance.DISTANCES}
    assert set(DISTANCES) == set(oracle_distance.DISTANCES)
    assert set(oracle_biases.BIASES) == set(BIASES)
    assert {row.name for row in rows} == {
        *(*ROTATIONS, *DISTANCES, *BIASES),
        *("alibi", "sinusoidal", "learned", "nope"),  # oracle.alibi, oracle.sinusoid, oracle_tables; nope has none
    }
