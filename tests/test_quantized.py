"""Bases in 4 and 8 bits, by bitsandbytes where it runs: the patch is exact over the weights as they were rounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_models import reference_logits
from pairs import assert_same, difference, logits
from tiny import tiny_ids, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from tuning import YARN, save_base, tune

import hf_posenc
from hf_posenc import patch_model, unpatch_model, verify

SIXTEEN_BITS = 0.04  # of the logits' variance: what the 4-bit kernel loses on a CPU; a wrong encoding loses all of it
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast")

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}
NAMES = {"yarn": {"factor": 4}, "alibi": {"factor": 2}, "dynamic_yarn": {}, "learned": {"max_position_embeddings": 90}}


def how(bits: int) -> Any:
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", **WIDE).save_pretrained(folder)
    yield folder


def load(base: Path, bits: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=how(bits), dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "name", [*NAMES][:2] + [pytest.param(name, marks=pytest.mark.extended) for name in [*NAMES][2:]]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_over_rounded_weights(bits: int, name: str, base: Path) -> None:
    """The reference, over the weights as they are rounded; patched as it is loaded, too; and taken out again."""
    ids, options = tiny_ids(70), NAMES[name]
    model = load(base, bits)
    own = logits(model, ids[:, :24])
    patch_model(model, name, **options)
    found = logits(model, ids)
    if bits == 4:  # 8 bits round what comes in as well
        plain = load(base, bits).dequantize().float().eval()
        want = torch.from_numpy(reference_logits(plain, name, options, ids))[None].float()
        assert float((found - want).pow(2).mean() / want.pow(2).mean()) < SIXTEEN_BITS
        assert_same(logits(patch_model(plain, name, **options), ids), want)
    report = verify(model, progress=False)
    assert report.passed, report.table()
    given = {"quantization_config": how(bits), "dtype": torch.float32}
    loaded = hf_posenc.from_pretrained(base, encoding=name, options=options, **given)
    assert torch.equal(logits(loaded, ids), found)
    unpatch_model(model)
    assert torch.equal(logits(model, ids[:, :24]), own)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_over_rounded_weights(bits: int, base: Path, tmp_path: Path) -> None:
    """QLoRA's order: rounded base, prepared, patched before or after the adapter; saved with its encoding."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    ids, found = tiny_ids(70), []
    for first in ("patch", "adapter"):
        model = prepare_model_for_kbit_training(load(base, bits), use_gradient_checkpointing=False)
        torch.manual_seed(0)
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        if first == "patch":
            adapted = get_peft_model(patch_model(model, "yarn", factor=4), adapter)
        else:
            adapted = patch_model(get_peft_model(model, adapter), "yarn", factor=4)
        adapted(input_ids=ids, labels=ids).loss.backward()
        grads = [p.grad for p in adapted.parameters() if p.requires_grad]
        assert grads and all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in grads)
        found.append(logits(adapted.eval(), ids))
    assert torch.equal(*found)
    hf_posenc.save_pretrained(adapted, tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path, quantization_config=how(bits), dtype=torch.float32)
    assert difference(logits(loaded, ids), found[0]) < 1e-5


@pytest.mark.extended
def test_finetuning_in_four_bits(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "bytes", **WIDE, head_dim=16)
    tune(folder, tmp_path / "run", **YARN, lora={"quantize": True}, training={"use_cpu": True})
    loaded = hf_posenc.from_pretrained(tmp_path / "run", quantization_config=how(4))
    encoding = hf_posenc.get_encoding(loaded)
    assert encoding is not None and encoding.name == "yarn"
