"""RoPE decoders patched beside other tools: under FlexAttention, and with PEFT's adapters."""

from pathlib import Path

import pytest
import torch
from hosts import ATTENTION, HostPair, host_pairs
from pairs import TRAINED, assert_same, difference, in_pieces, logits
from tiny import tiny_ids
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import get_encoding, unpatch_model
from hf_posenc.checkpoint import save_pretrained

LONG = 80
NO_FLEX = {
    "olmoe": "Transformers knows of none for it",
    "stablelm": "Transformers knows of none for it",
    "gpt_oss": "sinks do not run there on a CPU",
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@host_pairs(0, "alibi", "yarn", "nope", "sinusoidal")
def test_flex_attention(pair: HostPair) -> None:
    if pair.host in NO_FLEX or (pair.host, pair.name) == ("gemma2", "alibi"):
        pytest.skip(NO_FLEX.get(pair.host, "its bias would be soft-capped: refused"))
    ids, mask = tiny_ids(LONG), (torch.arange(LONG) >= 21).long()[None]
    want, model = pair.patched(), pair.stock()
    model.set_attn_implementation("flex_attention")
    pair.put_into(model)
    with torch.compiler.set_stance("force_eager"):
        assert_same(logits(model, ids), logits(want, ids))
        padded = logits(model, ids, attention_mask=mask)[:, 21:]
        assert_same(padded, logits(want, ids, attention_mask=mask)[:, 21:])
        assert_same(in_pieces(model, ids, (30, 40, 1, 9)), logits(want, ids))


@host_pairs(1)
def test_through_an_adapter_and_merged(pair: HostPair, tmp_path: Path) -> None:
    """LoRA on every linear layer of the attention, whatever it is called; experts are PEFT's own matter."""
    from peft import LoraConfig, get_peft_model

    ids, attention = tiny_ids(LONG), ATTENTION.get(pair.host, {})
    pair.stock().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **attention)
    pair.put_into(model)
    plain = logits(model, ids)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "att" in name]
    own = ["posenc"] if pair.name in TRAINED else None
    model = get_peft_model(model, LoraConfig(r=2, target_modules=layers, modules_to_save=own)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    want = logits(model, ids)
    assert difference(want, plain) > 1e-2
    save_pretrained(model, tmp_path / "adapter")
    loaded = hf_posenc.from_pretrained(tmp_path / "adapter", **attention)
    assert_same(logits(loaded, ids), want, 1e-6)
    assert get_encoding(loaded) == get_encoding(model)
    merged = loaded.merge_and_unload()
    assert_same(logits(merged, ids), want)
    assert_same(in_pieces(merged, ids, (30, 40, 1, 9)), want)
    unpatch_model(merged)
