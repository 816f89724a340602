"""4-bit bases (QLoRA) and 8-bit ones, where bitsandbytes runs; on a CPU it does since 0.46."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_ids
from tuning import TEXTS, save_base, tune

import hf_posenc
from hf_posenc import get_encoding, patch_model, unpatch_model, verify

pytest.importorskip("bitsandbytes")

BITS: dict[str, dict[str, Any]] = {
    "4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(
        tmp_path_factory.mktemp("base"), hidden_size=128, head_dim=32, intermediate_size=128, initializer_range=0.1
    )


def loaded(base: str, bits: str) -> Any:
    """The base with its linear maps in so many bits."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    return AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**BITS[bits]))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "name, options",
    [("yarn", {"factor": 4}), ("alibi", {}), ("dynamic_yarn", {}), ("learned", {"max_position_embeddings": 64})],
)
def test_a_quantized_model_is_patched_as_any_other(base: str, bits: str, name: str, options: dict[str, Any]) -> None:
    model = loaded(base, bits)
    ids = tiny_ids(60)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        patch_model(model, name, **options)
        assert verify(model, save=False, progress=False).passed
        after = model(input_ids=ids).logits
        assert (before - after).abs().max() > 0.1
        unpatch_model(model)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_an_adapter_on_four_bits_is_saved_loaded_and_merged(base: str, tmp_path: Path) -> None:
    lora = {"quantize": True}
    result = tune(base, tmp_path, TEXTS, encoding="alibi", lora=lora, merge=True, training={"use_cpu": True})
    kinds = {type(module).__name__ for module in result.model.modules()}
    assert any("4bit" in kind for kind in kinds), "the base is not in 4 bits"
    whole = hf_posenc.from_pretrained(tmp_path)  # on the base as it is on the disk
    merged = hf_posenc.from_pretrained(tmp_path / "merged")
    assert get_encoding(whole).name == get_encoding(merged).name == "alibi"  # type: ignore[union-attr]
    ids = tiny_ids(40)
    with torch.no_grad():
        wanted, found = whole(input_ids=ids).logits, merged(input_ids=ids).logits
        untrained = patch_model(hf_posenc.from_pretrained(base), "alibi")(input_ids=ids).logits
    assert (wanted - untrained).abs().max() > 1e-3, "nothing was learned"
    assert (wanted - found).abs().max() <= 1e-4 * wanted.abs().max()
