"""What is trained by default on every causal host: LoRA on each layer's attention, the norms, and nothing beside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import PRESENT, host_model
from other_hosts import CONFIGS, ENCODERS, tiny_host
from tiny import tiny_ids, tiny_model
from tuning import QUIET, TEXTS

import hf_posenc
from hf_posenc import finetune, patch_model
from hf_posenc.demo.train import VOCAB_SIZE, byte_tokenizer
from hf_posenc.finetuning.lora import attention_projections, norms
from hf_posenc.patching import find_backbone

CAUSAL = ("llama", "gpt2", "bloom", *PRESENT, *(name for name in CONFIGS if name not in ENCODERS))

# how many linear maps the attention of one layer has; Q, K, V and the output projection where it is not said here
MAPS = {
    "gpt2": 2,
    "bloom": 2,
    "gpt_neox": 2,
    "mpt": 2,
    "mpt-other": 2,
    "openai-gpt": 2,
    "phi3": 2,
    "falcon": 2,
    "falcon-alibi": 2,
    "falcon-new": 2,
    "falcon-heads": 2,
    "deepseek_v3": 5,  # q and kv go through a low rank, each by two maps
}


def model_of(host: str, **config: Any) -> Any:
    """A tiny model of any causal host."""
    if host in PRESENT:
        return host_model(host, **config)
    return tiny_host(host, **config) if host in CONFIGS else tiny_model(host, **config)


def layers_of(backbone: Any) -> int:
    """How many layers the host has."""
    return int(backbone.config.num_hidden_layers)


@pytest.mark.parametrize("host", CAUSAL)
def test_every_layers_attention_is_adapted_and_nothing_else(host: str) -> None:
    model = patch_model(model_of(host), "nope")
    _, backbone = find_backbone(model)
    found = attention_projections(model)
    assert len(found) == layers_of(backbone) * MAPS.get(host, 4), found
    assert len(set(found)) == len(found)
    assert not [name for name in found if any(part in name for part in ("mlp", "expert", "embed", "lm_head", "gate"))]
    assert len(norms(model)) > layers_of(backbone), "a norm a layer and one at the end"


@pytest.mark.extended
@pytest.mark.parametrize("host", CAUSAL)
def test_a_run_and_its_adapter_in_whole_and_merged(host: str, tmp_path: Path) -> None:
    name = "alibi" if host not in ("mpt", "mpt-other", "bloom", "falcon-alibi") else "sinusoidal"
    model_of(host, vocab_size=VOCAB_SIZE, eos_token_id=256).save_pretrained(tmp_path / "base")
    model = hf_posenc.from_pretrained(tmp_path / "base")
    training = {**QUIET, "save_strategy": "no"}
    result = finetune(
        model,
        byte_tokenizer(),
        TEXTS,
        out=tmp_path / "run",
        max_length=48,
        steps=2,
        encoding=name,
        merge=True,
        training=training,
    )
    ids = tiny_ids(40)
    result.model.eval()
    with torch.no_grad():
        wanted = result.model(input_ids=ids).logits
        untrained = patch_model(hf_posenc.from_pretrained(tmp_path / "base"), name)(input_ids=ids).logits
        assert (wanted - untrained).abs().max() > 1e-3, "two steps changed nothing"
        for folder in (tmp_path / "run", tmp_path / "run" / "merged"):
            found = hf_posenc.from_pretrained(folder)(input_ids=ids).logits
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max(), folder.name
