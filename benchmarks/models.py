"""The models that are measured, and what is done with them: random weights, which matter to neither time nor memory.

Every step returns the logits of the last position, so that pairs which compute the same function can be seen to do so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)

import hf_posenc

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """The shape of the models and of the work; Llama's MLP has Llama 2's proportions."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    tokens: int = 4096
    repeats: int = 4
    decode_repeats: int = 200
    device: str = "cpu"
    dtype: str = "float32"


FULL = Sizes()
QUICK = Sizes(layers=1, width=128, heads=2, vocab=97, tokens=128, repeats=2, decode_repeats=2)


def made(cls: Any, config: Any, sizes: Sizes) -> Any:
    """A seeded random model."""
    torch.manual_seed(0)
    with torch.device(sizes.device):
        return cls(config).to(getattr(torch, sizes.dtype)).eval()


def llama(sizes: Sizes, rope: dict[str, Any] | None = None, trained: int = 1024) -> Any:
    """A random Llama of `trained` positions with these `rope_parameters`."""
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 43 // 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=trained,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
    )
    return made(LlamaForCausalLM, config, sizes)


def yarn_parameters(trained: int, factor: float) -> dict[str, Any]:
    """What the host library calls YaRN."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": trained,
    }


def bloom(sizes: Sizes) -> Any:
    """A random BLOOM."""
    config = BloomConfig(vocab_size=sizes.vocab, hidden_size=sizes.width, n_layer=sizes.layers, n_head=sizes.heads)
    return made(BloomForCausalLM, config, sizes)


def mpt(sizes: Sizes) -> Any:
    """A random MPT whose own bias reaches as far as the work."""
    shape = {"d_model": sizes.width, "n_layers": sizes.layers, "n_heads": sizes.heads}
    config = MptConfig(vocab_size=sizes.vocab, max_seq_len=sizes.tokens, **shape)
    return made(MptForCausalLM, config, sizes)


def gpt2(sizes: Sizes) -> Any:
    """A random GPT-2 whose own table reaches as far as the work."""
    shape = {"n_embd": sizes.width, "n_layer": sizes.layers, "n_head": sizes.heads}
    plain = {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=sizes.vocab, n_positions=sizes.tokens, **shape, **plain)
    return made(GPT2LMHeadModel, config, sizes)


def patched(model: Any, encoding: str, **options: Any) -> Any:
    """The model with an encoding of ours."""
    return hf_posenc.patch_model(model, encoding, **options)


def long_yarn(sizes: Sizes) -> Any:
    """Static YaRN at eight times the trained length."""
    trained = sizes.tokens // 8
    return llama(sizes, yarn_parameters(trained, 8.0), trained)


def long_dynamic_yarn(sizes: Sizes) -> Any:
    """The same length in segments that end at 1, 2, 4 and 8 times the trained one."""
    return patched(llama(sizes, trained=sizes.tokens // 8), "dynamic_yarn")


def ids(sizes: Sizes, count: int) -> Tensor:
    """Random tokens (1, count)."""
    made = torch.randint(0, sizes.vocab, (1, count), generator=torch.Generator().manual_seed(0))
    return made.to(sizes.device)


def asked_for(model: Any) -> dict[str, Any]:
    """The logits of the last position alone, where the host knows how to leave out the others."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def prefill(model: Any, sizes: Sizes) -> Step:
    """One forward over all tokens, without a cache, which would weigh the same on both sides."""
    tokens, options = ids(sizes, sizes.tokens), asked_for(model)

    def step() -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False, **options).logits
        return logits[:, -1:]

    return step


def decode(model: Any, sizes: Sizes) -> Step:
    """One token that sees `sizes.tokens` keys, its own the last of them; the cache is cut back after each step."""
    tokens = ids(sizes, sizes.tokens)
    cache = DynamicCache(config=model.config)
    # renamed between releases of Transformers
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    arguments: dict[str, Any] = {name: cache, "use_cache": True, **asked_for(model)}
    model(input_ids=tokens[:, :-1], **arguments)

    def step() -> Tensor:
        logits: Tensor = model(input_ids=tokens[:, -1:], **arguments).logits
        cache.crop(-1)
        return logits[:, -1:]

    return step


def train(model: Any, sizes: Sizes) -> Step:
    """Forward and backward over all tokens, in training mode; gradients are let go of, no weight is changed."""
    tokens = ids(sizes, sizes.tokens)
    model.train()

    def step() -> Tensor:
        out = model(input_ids=tokens, use_cache=False)
        out.logits.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return out.logits.detach()[:, -1:]

    return step
