"""The oracle against stock Transformers models; the package is not involved."""

import math
from typing import Any

import numpy as np
import oracle
import oracle_models
import oracle_tables
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
    rows = oracle_tables.resize(table, options["resize"], LONG, 3, options.get("alpha", 0.4))
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
