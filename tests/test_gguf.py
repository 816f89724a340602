"""A model read from GGUF can be patched and saved: its weights are plain tensors by then, whatever its record says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM

import hf_posenc

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection in the order of GGUF, whose pairs of channels are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model: Any, file: Path) -> None:
    """A Llama as GGUF in float32."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            weight = weight if heads is None else interleave(weight, heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tiny_model("llama", attention_bias=False, mlp_bias=False, tie_word_embeddings=False), tmp_path / "tiny.gguf")
    return tmp_path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tiny_ids(60)).logits


@pytest.mark.parametrize(("encoding", "options"), [("yarn", {"factor": 4}), ("alibi", {})])
def test_patch_and_save(folder: Path, tmp_path: Path, encoding: str, options: dict[str, Any]) -> None:
    model = hf_posenc.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    stock = tiny_model("llama", attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
    assert torch.allclose(logits(model), logits(stock), atol=1e-3)
    hf_posenc.patch_model(model, encoding, **options)
    patched = logits(model)
    model.save_pretrained(tmp_path / "saved")
    again = hf_posenc.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), patched)
    if encoding == "yarn":
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(logits(plain), patched)


def test_unpatched_model_can_be_saved_too(folder: Path, tmp_path: Path) -> None:
    model = hf_posenc.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))
