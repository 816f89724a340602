"""The hosts that are no rotary decoders through a patch's life: in, out, copied, saved, trained, proved."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from other_hosts import CONFIGS, ENCODERS, NO_CACHE, OWN, PAIRS, TABLES, VARIED, Pair, every, pair, text, tiny_host
from pairs import LENGTH, assert_same, difference, in_pieces, logits
from torch import Tensor

import hf_posenc
from hf_posenc import get_encoding, patch_model, unpatch_model
from hf_posenc.errors import StateError

LONG = 80
SILENT = {"opt": "embed_positions", "openai-gpt": "positions_embed", "bert": "position_emb", "roberta": "position_emb"}


@every([*PAIRS, *VARIED])
def test_unpatch_restores_bit_for_bit(pair: Pair) -> None:
    model, ids = pair.stock(), text(LENGTH)
    before, keys, config = logits(model, ids), list(model.state_dict()), model.config.to_dict()
    classes = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    pair.put_into(model)
    logits(model, text(LONG))
    assert unpatch_model(model) is model and get_encoding(model) is None
    assert torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == keys and model.config.to_dict() == config
    assert {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()} == classes
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@every(PAIRS)
def test_copies(pair: Pair) -> None:
    """A copy has the patch, and can be unpatched alone; a second model of the same config is never touched."""
    model, other, ids = pair.stock(), pair.stock(seed=1), text(LONG)
    sharing = type(model)(model.config).eval()
    was, was_sharing = logits(other, ids[:, :LENGTH]), logits(sharing, ids[:, :LENGTH])
    pair.put_into(model)
    want = logits(model, ids)
    twins: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert torch.equal(logits(twin, ids), want) and get_encoding(twin) == get_encoding(model)
        unpatch_model(twin)
        assert torch.equal(logits(twin, ids[:, :LENGTH]), logits(pair.stock(), ids[:, :LENGTH]))
    again = copy.deepcopy(model)
    unpatch_model(model)
    del model
    assert torch.equal(logits(again, ids), want)
    assert torch.equal(logits(other, ids[:, :LENGTH]), was)
    assert torch.equal(logits(sharing, ids[:, :LENGTH]), was_sharing)


@every([*PAIRS, *VARIED])
def test_saved_and_loaded(pair: Pair, tmp_path: Path) -> None:
    model, ids = pair.patched(), text(LONG)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model, ids), want), "saving must not change the model"
    loaded = hf_posenc.from_pretrained(tmp_path, auto_class=type(model))
    # a table that was made longer comes back as the host's own, on the stock path of the first GPT
    assert_same(logits(loaded, ids), want, 1e-5 if pair.host == "openai-gpt" else 0)
    assert get_encoding(loaded) == get_encoding(model)
    if pair.name == "learned" and pair.host in TABLES:
        with pytest.raises(StateError, match="original checkpoint"):
            unpatch_model(loaded)
        return
    unpatch_model(loaded)
    assert torch.equal(logits(loaded, ids[:, :LENGTH]), logits(pair.stock(), ids[:, :LENGTH]))
    assert not hasattr(loaded.config, "hf_posenc")


@every([p for p in PAIRS if p.name == "learned" and p.host in TABLES], [])
def test_a_longer_table_loads_without_the_package(pair: Pair, tmp_path: Path) -> None:
    model, ids = pair.patched(), text(LONG)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert_same(logits(plain, ids), logits(model, ids), 1e-5)
    assert get_encoding(plain) == get_encoding(model)


@pytest.mark.parametrize("host", ["mpt", "falcon", "gptj"])
def test_a_fresh_table_is_trained_and_saved(host: str, tmp_path: Path) -> None:
    model, ids = pair(host, "learned").patched(), text(LONG)
    table = model.base_model.posenc.weight
    table.data += torch.randn(table.shape, generator=torch.Generator().manual_seed(5))
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path), ids), want)


def gradients(model: Any, checkpointing: bool, cached: bool) -> dict[str, Tensor]:
    """Of two forwards, at different positions and lengths, before one backward."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    first, second = text(70), text(41, seed=1)
    mask, given = (torch.arange(41) >= 9).long()[None], {"use_cache": False} if cached else {}
    losses = [
        model(input_ids=first, labels=first, **given).loss,
        model(input_ids=second, labels=second, attention_mask=mask, **given).loss,
    ]
    (losses[0] + losses[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@every(PAIRS)
def test_gradients_with_and_without_checkpointing(pair: Pair) -> None:
    cached = pair.host not in NO_CACHE
    model = pair.patched()
    plain = gradients(model, False, cached)
    missing = {name for name, p in model.named_parameters() if p.requires_grad} - set(plain)
    silent = SILENT.get(pair.host) if pair.name != "learned" else None
    assert all(silent is not None and silent in name for name in missing), missing
    largest = max(float(g.abs().max()) for g in plain.values())
    assert all(bool(g.isfinite().all()) for g in plain.values())
    if not model.supports_gradient_checkpointing:  # the first GPT
        return
    again = gradients(pair.patched(), True, cached)
    assert again.keys() == plain.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-5 * largest)


@every(PAIRS)
def test_eager_equals_sdpa(pair: Pair) -> None:
    """Chosen before the patch, and after it; with padding, with a cache, and asked for its weights."""
    ids, mask = text(LONG), (torch.arange(LONG) >= 21).long()[None]
    model = pair.patched()
    want, padded = logits(model, ids), logits(model, ids, attention_mask=mask)[:, 21:]
    before, after = pair.patched(attn_implementation="eager"), pair.patched()
    after.set_attn_implementation("eager")
    for eager in (before, after):
        assert_same(logits(eager, ids), want)
        assert_same(logits(eager, ids, attention_mask=mask)[:, 21:], padded)
        if pair.host not in NO_CACHE:
            assert_same(in_pieces(eager, ids, (30, 40, 1, 1, 8)), want)
    weights = after(input_ids=ids[:, :50], output_attentions=True).attentions
    assert len(weights) == 3 and all(w.shape[2:] == (50, 50) for w in weights)
    assert all(torch.allclose(w.sum(-1), torch.ones(w.shape[:3]), atol=1e-5) for w in weights)


@every([*PAIRS, *(v for v in VARIED if v.name in ("alibi", "rope", "dynamic_yarn", "learned"))])
def test_verify_finds_nothing(pair: Pair) -> None:
    report = hf_posenc.verify(pair.patched(), progress=False)
    assert report.passed, report.table()
    made = {row.name: row.passed for row in report.rows}
    assert made["cached = uncached"] is (None if pair.host in NO_CACHE else True)


@pytest.mark.parametrize("host", ["mpt", "opt", "falcon-alibi", "gptj", "openai-gpt", "bert", "roberta"])
@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_verify_knows_the_hosts_own_encoding(host: str, name: str) -> None:
    report = hf_posenc.verify(patch_model(tiny_host(host), OWN[host] if name == "alibi" else name), progress=False)
    assert report.passed, report.table()
    assert ("own encoding" in report.rows[0].detail) == (OWN[host] == name or name == "alibi")


@every([p for p in PAIRS if p.host not in ENCODERS])
def test_inside_an_adapter_and_merged(pair: Pair) -> None:
    """LoRA around a patched model, with positions of the caller's own, and what is left when it has been merged."""
    peft: Any = pytest.importorskip("peft")
    targets = {"mpt": "Wqkv", "opt": "q_proj", "gptj": "q_proj", "openai-gpt": "c_attn"}
    target = targets.get(CONFIGS[pair.host][0], "query_key_value")
    ids, positions = text(60), torch.arange(60)[None] + 3
    model = pair.patched()
    want = logits(model, ids, position_ids=positions)
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(target_modules=[target], task_type="CAUSAL_LM", fan_in_fan_out=pair.host == "openai-gpt"),
    ).eval()
    assert_same(logits(wrapped, ids, position_ids=positions), want, 1e-6)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    moved = logits(wrapped, ids, position_ids=positions)
    assert difference(moved, want) > 1e-3
    assert_same(logits(wrapped.merge_and_unload(), ids, position_ids=positions), moved)
