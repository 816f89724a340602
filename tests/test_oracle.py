"""The oracle itself, against numbers from the papers and against stock Transformers; the package is not involved."""

import math
from typing import Any

import numpy as np
import oracle
import oracle_models
import pytest
import torch
from oracle import Array
from oracle_models import reference_logits
from tiny import LENGTH, tiny_ids, tiny_model

LONG = 3 * LENGTH


def stock_logits(model: Any, **inputs: Any) -> Array:
    with torch.no_grad():
        logits: Array = model(use_cache=False, **inputs).logits[0].double().numpy()
    return logits


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
    turned = oracle_models.turn(x, np.arange(7), inv_freq, 1.5)
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
    assert oracle.resize(TABLE, rule, 6, 1) == pytest.approx(TABLE, abs=1e-12)


def test_resize_rules() -> None:
    interpolated = oracle.resize(TABLE, "interpolate", 24, 4)
    assert interpolated[::4] == pytest.approx(TABLE)
    assert interpolated[5] == pytest.approx(0.75 * TABLE[1] + 0.25 * TABLE[2])
    assert interpolated[20:] == pytest.approx(np.repeat(TABLE[5:], 4, axis=0))
    assert np.array_equal(oracle.resize(TABLE, "group", 24, 4), np.repeat(TABLE, 4, axis=0))
    assert np.array_equal(oracle.resize(TABLE, "repeat", 24, 4), np.tile(TABLE, (4, 1)))


def test_resize_cubic() -> None:
    resized = oracle.resize(TABLE, "cubic", 12, 2)
    assert resized[::2] == pytest.approx(TABLE)
    assert resized[5] == pytest.approx((-TABLE[1] + 9 * TABLE[2] + 9 * TABLE[3] - TABLE[4]) / 16)
    assert resized[1] == pytest.approx((8 * TABLE[0] + 9 * TABLE[1] - TABLE[2]) / 16)
    squares = np.arange(8.0)[:, None] ** 2
    inside = oracle.resize(squares, "cubic", 16, 2)[2:12, 0]
    assert inside == pytest.approx(np.arange(2, 12) ** 2 / 4)


def test_resize_hierarchical() -> None:
    resized = oracle.resize(TABLE, "hierarchical", 36, 6, alpha=0.4)
    assert resized[:6] == pytest.approx(TABLE)
    u = (TABLE - 0.4 * TABLE[0]) / 0.6
    assert resized[2 * 6 + 5] == pytest.approx(0.4 * u[2] + 0.6 * u[5])
    assert len(np.unique(resized.round(12), axis=0)) == 36


SHORT_FACTOR = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LONG_FACTOR = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
ROPES: list[Any] = [
    pytest.param("linear", "linear", {"factor": 3.0}, id="linear"),
    pytest.param("yarn", "yarn", {"factor": 4.0}, id="yarn"),
    pytest.param(
        "yarn", "yarn", {"factor": 3.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}, id="yarn betas"
    ),
    pytest.param("yarn", "yarn", {"factor": 4.0, "attention_factor": 0.8}, id="yarn attention_factor"),
    pytest.param("ntk_by_parts", "yarn", {"factor": 4.0, "beta_fast": 4.0}, id="ntk_by_parts"),
    pytest.param("llama3", "llama3", {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, id="llama3"),
]


def rope_host(rope_type: str, options: dict[str, Any], **config: Any) -> Any:
    given = {"rope_type": rope_type, "rope_theta": 500.0, **options}
    if rope_type in ("yarn", "llama3", "longrope"):
        given["original_max_position_embeddings"] = LENGTH
    if rope_type not in ("default", "dynamic"):
        config["max_position_embeddings"] = round(LENGTH * options["factor"])
    return tiny_model("llama", rope_parameters=given, **config)


@pytest.mark.parametrize(
    ("model_type", "config", "tolerance"),
    [
        pytest.param("llama", {}, 1e-4, id="llama"),
        pytest.param(
            "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 1e-4, id="llama b"
        ),
        pytest.param(
            "llama", {"num_key_value_heads": 4, "head_dim": 24, "rms_norm_eps": 0.1}, 1e-4, id="llama wide heads"
        ),
        pytest.param("gpt2", {"n_positions": LONG}, 1e-9, id="gpt2"),
        pytest.param("gpt2", {"n_positions": LONG, "scale_attn_by_inverse_layer_idx": True}, 1e-9, id="gpt2 by layer"),
        pytest.param(
            "gpt2", {"n_positions": LONG, "scale_attn_weights": False, "n_inner": 40}, 1e-9, id="gpt2 unscaled"
        ),
        pytest.param("bloom", {}, 1e-5, id="bloom 4 heads"),
        pytest.param("bloom", {"n_head": 6}, 1e-5, id="bloom 6 heads"),
        pytest.param("bloom", {"n_head": 6, "apply_residual_connection_post_layernorm": True}, 1e-5, id="bloom post"),
    ],
)
def test_native_encoding_of_the_hosts(model_type: str, config: dict[str, Any], tolerance: float) -> None:
    model, ids = tiny_model(model_type, **config), tiny_ids(LONG)
    want = reference_logits(model, None, None, ids)
    assert_close(stock_logits(model, input_ids=ids), want, 1e-4)
    assert_close(stock_logits(model.double(), input_ids=ids), want, tolerance)
    assert np.array_equal(reference_logits(model, oracle_models.NATIVE[model_type], {}, ids), want)


@pytest.mark.parametrize(("name", "rope_type", "options"), ROPES)
def test_scaled_rotations(name: str, rope_type: str, options: dict[str, Any]) -> None:
    extra = {"attention_factor": 1.0} if name == "ntk_by_parts" else {}
    model, ids = rope_host(rope_type, {**options, **extra}), tiny_ids(LONG)
    length = {"original_max_position_embeddings": LENGTH}
    assert_close(stock_logits(model, input_ids=ids), reference_logits(model, name, {**options, **length}, ids), 1e-4)


def test_ntk_is_another_base() -> None:
    model, ids = rope_host("default", {"rope_theta": 500.0 * 4 ** (16 / 14)}), tiny_ids(LONG)
    assert_close(
        stock_logits(model, input_ids=ids), reference_logits(model, "ntk", {"rope_theta": 500, "factor": 4}, ids), 1e-4
    )


@pytest.mark.parametrize("end", [LENGTH, 2 * LENGTH, 4 * LENGTH])
@pytest.mark.parametrize(
    ("name", "rope_type", "options"),
    [
        ("dynamic_ntk", "dynamic", {"factor": 2.0}),
        ("dynamic_yarn", "yarn", {}),
        ("longrope", "longrope", {"factor": 4.0, "short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR}),
    ],
)
def test_one_layer_agrees_on_the_last_segment(name: str, rope_type: str, options: dict[str, Any], end: int) -> None:
    """Transformers takes one set of frequencies for a call: with one layer, those of the last segment's queries."""
    stock_options = {"factor": end / LENGTH} if name == "dynamic_yarn" else options
    model, ids = rope_host(rope_type, stock_options, num_hidden_layers=1), tiny_ids(end)
    got = stock_logits(model, input_ids=ids)
    want = reference_logits(model, name, {**options, "original_max_position_embeddings": LENGTH}, ids)
    last = slice(0 if end == LENGTH else LENGTH if name == "longrope" else end // 2, end)
    assert_close(got[last], want[last], 1e-4)
    if last.start:
        assert np.abs(got[: last.start] - want[: last.start]).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dynamic_ntk", {"factor": 2}),
        ("dynamic_yarn", {"beta_fast": 4}),
        ("longrope", {"factor": 4, "short_factor": [1] * 8, "long_factor": LONG_FACTOR}),
    ],
)
def test_dynamic_rotations_never_look_ahead(name: str, options: dict[str, Any]) -> None:
    model, ids = tiny_model("llama"), tiny_ids(LONG)
    whole = reference_logits(model, name, options, ids)
    for n in (20, LENGTH, LENGTH + 1, 2 * LENGTH + 1):
        assert_close(reference_logits(model, name, options, ids[:, :n]), whole[:n], 1e-12)
    plain = reference_logits(model, "rope", {}, ids)
    if name != "longrope":
        assert np.array_equal(whole[:LENGTH], plain[:LENGTH])
    assert np.abs(whole[LENGTH:] - plain[LENGTH:]).max() > 1e-2


@pytest.mark.parametrize(
    "options", [{}, {"base": 100, "layout": "concat", "scale": 0.7}, {"scale": 1}], ids=["auto", "concat", "number"]
)
def test_sinusoidal_is_what_a_table_of_it_gives(options: dict[str, Any]) -> None:
    n, width = LONG, 48
    order, pair = np.arange(float(n))[:, None], np.arange(width // 2)
    if options.get("layout") == "concat":
        angles = order * np.exp(-math.log(100) * pair / (width // 2 - 1))
        rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    else:
        angles = order / 10000.0 ** (2 * pair / width)
        rows = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, width)

    gpt2, llama, bloom = (tiny_model(kind) for kind in ("gpt2", "llama", "bloom"))
    ids = tiny_ids(n)
    table = tiny_model("gpt2", n_positions=n)
    norm = bloom.transformer.word_embeddings_layernorm
    rms = {
        "gpt2": gpt2.transformer.wte.weight.square().mean().sqrt().item(),
        "bloom": (norm.weight**2 + norm.bias**2).mean().sqrt().item(),
    }
    want = reference_logits(gpt2, "sinusoidal", options, ids)
    state = {
        **gpt2.state_dict(),
        "transformer.wpe.weight": torch.tensor(rows * options.get("scale", rms["gpt2"] * 2**0.5)),
    }
    table.load_state_dict(state)
    assert_close(stock_logits(table, input_ids=ids), want, 1e-4)
    if not options:
        assert np.array_equal(reference_logits(gpt2, "learned", {"max_position_embeddings": n}, ids), want)
        assert np.array_equal(
            reference_logits(llama, "learned", {"max_position_embeddings": n}, ids),
            reference_logits(llama, "sinusoidal", {}, ids),
        )

    def add(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.tensor(rows * options.get("scale", rms["bloom"] * 2**0.5), dtype=output.dtype)

    norm.register_forward_hook(add)
    for block in bloom.transformer.h:
        block.self_attention.beta = 0.0
    assert_close(stock_logits(bloom, input_ids=ids), reference_logits(bloom, "sinusoidal", options, ids), 1e-4)


def test_sinusoidal_on_llama() -> None:
    model, ids = tiny_model("llama"), tiny_ids(LONG)
    weight = model.model.embed_tokens.weight.detach()
    scale = weight.square().mean().sqrt().item() * 2**0.5
    rows = torch.tensor(scale * np.stack([oracle.sinusoid(p, 64) for p in range(LONG)]), dtype=torch.float32)
    still = torch.zeros(1, LONG, dtype=torch.long)
    mask = causal_mask(LONG)
    got = stock_logits(model, inputs_embeds=weight[ids] + rows, position_ids=still, attention_mask=mask)
    assert_close(got, reference_logits(model, "sinusoidal", {}, ids), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"resize": "interpolate", "factor": 3},
        {"resize": "cubic", "factor": 3},
        {"resize": "group", "factor": 3},
        {"resize": "repeat", "factor": 3},
        {"resize": "hierarchical", "alpha": 0.3},
    ],
    ids=lambda options: options["resize"],
)
def test_resized_table(options: dict[str, Any]) -> None:
    model, ids = tiny_model("gpt2"), tiny_ids(LONG)
    table = model.transformer.wpe.weight.detach().double().numpy()
    rows = oracle.resize(table, options["resize"], LONG, 3, options.get("alpha", 0.4))
    longer = tiny_model("gpt2", n_positions=LONG)
    longer.load_state_dict({**model.state_dict(), "transformer.wpe.weight": torch.tensor(rows)})
    assert_close(stock_logits(longer, input_ids=ids), reference_logits(model, "learned", options, ids), 1e-4)


def causal_mask(n: int, documents: list[int] | None = None, window: int | None = None) -> torch.Tensor:
    """Additive, (1, 1, n, n)."""
    mask = torch.full((n, n), float("-inf"))
    for i in range(n):
        for j in range(i + 1):
            if (documents is None or documents[i] == documents[j]) and (window is None or i - j < window):
                mask[i, j] = 0
    return mask[None, None]


def test_nope() -> None:
    ids = tiny_ids(LONG)
    llama, gpt2, bloom = tiny_model("llama"), tiny_model("gpt2", n_positions=LONG), tiny_model("bloom")
    still = torch.zeros(1, LONG, dtype=torch.long)
    got = stock_logits(llama, input_ids=ids, position_ids=still, attention_mask=causal_mask(LONG))
    assert_close(got, reference_logits(llama, "nope", {}, ids), 1e-4)
    torch.nn.init.zeros_(gpt2.transformer.wpe.weight)
    assert_close(stock_logits(gpt2, input_ids=ids), reference_logits(gpt2, "nope", {}, ids), 1e-4)
    for block in bloom.transformer.h:
        block.self_attention.beta = 0.0
    assert_close(stock_logits(bloom, input_ids=ids), reference_logits(bloom, "nope", {}, ids), 1e-4)


@pytest.mark.parametrize("factor", [1, 3])
def test_alibi_on_llama_is_a_mask_per_query_head(factor: float) -> None:
    model, ids = tiny_model("llama", attn_implementation="eager"), tiny_ids(LONG)
    distance = torch.arange(LONG)[:, None] - torch.arange(LONG)[None, :]
    bias = -torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[None, :, None, None] / factor * distance
    still = torch.zeros(1, LONG, dtype=torch.long)
    got = stock_logits(model, input_ids=ids, position_ids=still, attention_mask=causal_mask(LONG) + bias)
    assert_close(got, reference_logits(model, "alibi", {"factor": factor}, ids), 1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom"])
def test_rope_on_other_hosts_sees_distances_alone(model_type: str) -> None:
    model, ids = tiny_model(model_type), tiny_ids(40)
    got = reference_logits(model, "rope", {}, ids)
    assert_close(reference_logits(model, "rope", {}, ids, positions=np.arange(40) + 1000), got, 1e-9)
    assert_close(
        reference_logits(model, "rope", {}, ids, positions=[7] * 40), reference_logits(model, "nope", {}, ids), 1e-9
    )
    assert np.abs(got - reference_logits(model, "nope", {}, ids)).max() > 1e-2
    assert np.abs(got - reference_logits(model, "rope", {"rope_theta": 100}, ids)).max() > 1e-2


def test_rope_on_gpt2_turns_queries_and_keys_before_the_scores() -> None:
    model, ids = tiny_model("gpt2", n_positions=LONG), tiny_ids(LONG)
    angles = torch.arange(LONG)[:, None] * 1e4 ** (-torch.arange(0, 12, 2) / 12)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        parts = output.view(1, LONG, 3, 4, 12).unbind(2)
        swapped = [torch.cat([-part[..., 6:], part[..., :6]], dim=-1) for part in parts]
        q, k = (parts[i] * cos[None, :, None] + swapped[i] * sin[None, :, None] for i in range(2))
        return torch.stack([q, k, parts[2]], dim=2).view(1, LONG, -1)

    torch.nn.init.zeros_(model.transformer.wpe.weight)
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(turned)
    assert_close(stock_logits(model, input_ids=ids), reference_logits(model, "rope", {}, ids), 1e-4)


def test_documents_positions_and_window() -> None:
    model, ids = tiny_model("llama"), tiny_ids(50)
    documents = [0] * 17 + [1] * 33
    positions = [*range(17), *range(33)]
    packed = reference_logits(model, None, None, ids, positions, documents)
    alone = [reference_logits(model, None, None, part) for part in (ids[0, :17], ids[0, 17:])]
    assert_close(packed, np.concatenate(alone), 1e-12)
    assert_close(stock_logits(model, input_ids=ids, position_ids=torch.tensor([positions])), packed, 1e-4)

    skipped = [*range(20), *range(60, 90)]
    got = stock_logits(
        model, input_ids=ids, position_ids=torch.tensor([skipped]), attention_mask=causal_mask(50, documents, 6)
    )
    assert_close(got, reference_logits(model, None, None, ids, skipped, documents, window=6), 1e-4)
