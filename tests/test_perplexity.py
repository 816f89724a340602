"""Perplexity against the model's own logits, in little memory, and how far a model's positions reach."""

from typing import Any

import pytest
import torch
from plain import plain_nll
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_posenc
from hf_posenc.errors import (
    OptionError,
    UnsupportedError,
)
from hf_posenc.evaluate.perplexity import ppl, ppl_tail, table_reach, token_nll


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 97 * 4, 1 << 26], ids=["one position", "ragged", "one block"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_nll_is_that_of_the_models_own_logits(model_type: str, chunk_bytes: int) -> None:
    model, ids = tiny_model(model_type), tiny_ids(31)
    assert torch.allclose(token_nll(model, ids, chunk_bytes=chunk_bytes), plain_nll(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_logits_that_are_scaled_or_capped_after_the_head(model_type: str, options: dict[str, Any]) -> None:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
    config = AutoConfig.for_model(model_type, **sizes, **special, num_key_value_heads=4, **options)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), tiny_ids(20)
    assert torch.allclose(token_nll(model, ids, chunk_bytes=999), plain_nll(model, ids), rtol=0, atol=1e-5)


def test_logits_altered_in_an_unknown_way_are_refused() -> None:
    model = tiny_model("llama")

    def doubled(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(doubled)
    with pytest.raises(UnsupportedError, match="after the head"):
        token_nll(model, tiny_ids(8))


def test_nll_of_a_patched_model_is_that_of_its_own_logits() -> None:
    model, ids = tiny_model("llama"), tiny_ids(60)
    with hf_posenc.patched(model, "yarn", factor=2):
        assert torch.allclose(token_nll(model, ids), plain_nll(model, ids), rtol=0, atol=1e-5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    model = tiny_model("llama")
    nn.init.zeros_(model.get_output_embeddings().weight)
    nll = token_nll(model, tiny_ids(23))
    assert nll.shape == (22,) and nll.dtype == torch.float32
    assert ppl(nll) == pytest.approx(97, rel=1e-6)
    assert ppl_tail(nll, 5) == pytest.approx(97, rel=1e-6)


def test_no_more_logits_than_a_block_exist_at_a_time() -> None:
    model, seen = tiny_model("llama"), []
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, out: seen.append(out.shape[1]))
    token_nll(model, tiny_ids(32), chunk_bytes=4 * 97 * 6)
    assert max(seen) == 6 and sum(seen) == 31 + 2  # every scored position once, and the last one twice for the check


def test_training_modes_come_back_module_by_module() -> None:
    model = tiny_model("llama").train()
    model.model.norm.eval()
    token_nll(model, tiny_ids(8))
    assert model.training and model.model.layers[0].training and not model.model.norm.training
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("ids", [torch.tensor([1]), torch.ones(2, 5, dtype=torch.long)])
def test_nll_wants_one_text_of_two_tokens(ids: Tensor) -> None:
    with pytest.raises(OptionError, match="one text"):
        token_nll(tiny_model("llama"), ids)


def test_ppl_tail_refuses_a_tail_longer_than_the_text() -> None:
    with pytest.raises(OptionError, match="from 1 to"):
        ppl_tail(torch.ones(4), 5)


def test_reach_of_a_learned_table() -> None:
    assert table_reach(tiny_model("gpt2")) == 32
    assert table_reach(tiny_model("llama")) is None and table_reach(tiny_model("bloom")) is None
