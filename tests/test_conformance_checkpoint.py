"""Every pair to disk and back: as itself, in a new process, for plain Transformers, through LoRA, merged, replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from pairs import (
    HOSTS,
    LENGTH,
    OTHERS,
    PAIRS,
    RESIZED,
    TRAINED,
    Pair,
    assert_same,
    difference,
    every_pair,
    generate,
    logits,
)
from safetensors.torch import load_file, save_file
from tiny import tiny_ids
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import get_encoding, patch_model, unpatch_model
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.errors import StateError
from hf_posenc.marking import unmark

LONG = 80
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "bloom": ["query_key_value"]}

IN_A_NEW_PROCESS = """
import json, sys
import hf_posenc, torch
from safetensors.torch import load_file, save_file

folders = json.loads(sys.argv[1])
ids = load_file(sys.argv[2])["ids"]
models = {folder: hf_posenc.from_pretrained(folder) for folder in folders}
with torch.no_grad():
    found = {folder: model.eval()(ids, use_cache=False).logits for folder, model in models.items()}
save_file(found, sys.argv[3])
"""


@pytest.mark.parametrize("pair", [*PAIRS, *OTHERS, *RESIZED, Pair("gpt2", "learned", note="own")], ids=str)
def test_saved_and_loaded(pair: Pair, tmp_path: Path) -> None:
    model, ids = pair.patched(), tiny_ids(LENGTH if pair.note == "own" else LONG)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model, ids), want), "saving must not change the model"
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), want)
    assert get_encoding(loaded) == get_encoding(model)
    assert json.loads((tmp_path / "config.json").read_text())["hf_posenc"]["encoding"] == pair.name
    assert sorted(file.name for file in tmp_path.glob("*") if file.suffix in (".bin", ".pt", ".pkl")) == []
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert torch.equal(logits(hf_posenc.from_pretrained(again), ids), want), "a second trip"


@every_pair
def test_loaded_and_taken_out(pair: Pair, tmp_path: Path) -> None:
    stock, ids = pair.stock(), tiny_ids(LENGTH)
    pair.patched().save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    if pair.host == "gpt2" and pair.name == "learned":
        with pytest.raises(StateError, match="original checkpoint"):
            unpatch_model(loaded)
        return
    unpatch_model(loaded)
    assert torch.equal(logits(loaded, ids), logits(stock, ids))
    assert set(loaded.state_dict()) == set(stock.state_dict())
    assert not hasattr(loaded.config, "hf_posenc")
    for key in ("rope_parameters", "max_position_embeddings", "n_positions"):
        assert getattr(loaded.config, key, None) == getattr(stock.config, key, None)


def test_in_a_new_process(tmp_path: Path) -> None:
    want = {}
    for pair in PAIRS[::3]:  # thirteen, of all hosts and encodings
        model, folder = pair.patched(), str(tmp_path / str(pair))
        model.save_pretrained(folder)
        want[folder] = logits(model, tiny_ids(LONG))
    save_file({"ids": tiny_ids(LONG)}, tmp_path / "ids")
    root = Path(hf_posenc.__file__).resolve().parents[1]
    arguments = [json.dumps(list(want)), str(tmp_path / "ids"), str(tmp_path / "logits")]
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, *arguments], check=True, cwd=root)
    found = load_file(tmp_path / "logits")
    assert found.keys() == want.keys()
    for folder in want:
        assert torch.equal(found[folder], want[folder]), folder


NATIVE_RESULTS = [pair for pair in [*PAIRS, *OTHERS, *RESIZED] if pair.native]


@pytest.mark.parametrize("pair", NATIVE_RESULTS, ids=str)
def test_native_results_load_without_the_package(pair: Pair, tmp_path: Path) -> None:
    model, ids = pair.patched(), tiny_ids(LONG)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    tolerance = 1e-5 if pair.host == "bloom" else 0  # BLOOM's own `baddbmm` against sdpa
    assert_same(logits(plain, ids), logits(model, ids), tolerance)
    assert get_encoding(plain) == get_encoding(model)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair.native], ids=str)
def test_the_rest_is_never_loaded_unpatched(pair: Pair, tmp_path: Path) -> None:
    """The auto classes load it patched, since this package is imported; a class of the host's own says what to do."""
    model, ids = pair.patched(), tiny_ids(LONG)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert type(loaded) is type(model) and get_encoding(loaded) == get_encoding(model)
    with pytest.raises(StrictDataclassError, match=r"hf_posenc\.from_pretrained"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not pair.native], ids=str)
def test_older_checkpoints_say_that_it_is_not_in_effect(pair: Pair, tmp_path: Path) -> None:
    """Those with the model type of the host: a plain load loses the encoding, and the package can tell."""
    pair.patched().save_pretrained(tmp_path)
    config = unmark(json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tiny_ids(LONG)), logits(pair.patched(), tiny_ids(LONG)))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert get_encoding(plain) is None
    report = hf_posenc.verify(plain, progress=False)
    assert not report.passed and "from_pretrained" in report.table()
    with pytest.raises(StateError, match=pair.name):
        patch_model(plain, pair.name, **pair.options)


@every_pair
def test_another_encoding_in_its_place(pair: Pair, tmp_path: Path) -> None:
    """`encoding=` is put into the base, not on top of what was saved."""
    pair.patched().save_pretrained(tmp_path)
    if pair.host == "gpt2" and pair.name == "learned":
        with pytest.raises(StateError, match="resized table"):
            hf_posenc.from_pretrained(tmp_path, encoding="alibi")
        return
    for other in (Pair(pair.host, "alibi", {"factor": 3}), Pair(pair.host, "linear", {"factor": 3})):
        loaded = hf_posenc.from_pretrained(tmp_path, encoding=other.name, options=other.options)
        assert torch.equal(logits(loaded, tiny_ids(LONG)), logits(other.patched(), tiny_ids(LONG)))


@pytest.mark.parametrize("host", HOSTS)
def test_an_unpatched_checkpoint(host: str, tmp_path: Path) -> None:
    stock, ids = Pair(host, "nope").stock(), tiny_ids(LENGTH)
    stock.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(stock, ids)) and get_encoding(loaded) is None
    loaded = hf_posenc.from_pretrained(tmp_path, encoding="nope")
    assert torch.equal(logits(loaded, ids), logits(Pair(host, "nope").patched(), ids))


@every_pair
def test_loaded_in_half_precision(pair: Pair, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    pair.patched().save_pretrained(tmp_path)
    loaded, cast = hf_posenc.from_pretrained(tmp_path, dtype=dtype), pair.patched().to(dtype)
    assert torch.equal(logits(loaded, tiny_ids(LONG)), logits(cast, tiny_ids(LONG)))


def adapted(model: Any, host: str, **options: Any) -> Any:
    """The model with a LoRA adapter that has been trained, as far as its weights can tell."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(
        model, LoraConfig(r=4, target_modules=TARGETS[host], fan_in_fan_out=host == "gpt2", **options)
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return peft.eval()


@every_pair
def test_through_an_adapter_and_merged(pair: Pair, tmp_path: Path) -> None:
    ids, base = tiny_ids(LONG), tmp_path / "base"
    pair.stock().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    pair.put_into(model)
    plain = logits(model, ids)
    model = adapted(model, pair.host, modules_to_save=["posenc"] if pair.name in TRAINED else None)
    want = logits(model, ids)
    assert difference(want, plain) > 1e-2
    assert torch.equal(generate(model, ids[:, :40], 4), generate(model, ids[:, :40], 4, use_cache=False))
    save_pretrained(model, tmp_path / "adapter")
    loaded = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_same(logits(loaded, ids), want, 1e-5 if pair.name == "fire" else 1e-6)
    assert get_encoding(loaded) == get_encoding(model)
    merged = loaded.merge_and_unload()
    assert_same(logits(merged, ids), want)
    merged.save_pretrained(tmp_path / "merged")
    again = hf_posenc.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, ids), logits(merged, ids))
    if pair.native:
        assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids), want)


@every_pair
def test_patched_inside_an_adapter(pair: Pair) -> None:
    """A model that PEFT has wrapped already can be patched, and unpatched."""
    ids, stock = tiny_ids(LENGTH), adapted(pair.stock(), pair.host)
    was = logits(stock, ids)
    want = logits(adapted(pair.patched(), pair.host), tiny_ids(LONG))
    pair.put_into(stock)
    assert_same(logits(stock, tiny_ids(LONG)), want, 1e-5 if pair.name == "fire" else 0)  # a BLAS product: by alignment
    unpatch_model(stock)
    assert torch.equal(logits(stock, ids), was)


@every_pair
def test_positions_and_padding_reach_an_adapted_model(pair: Pair) -> None:
    """PEFT calls `forward` of the model it wraps, and so passes by a hook that stands there."""
    first, second = tiny_ids(40), tiny_ids(30, seed=1)
    model = adapted(pair.patched(), pair.host)
    packed = torch.cat((torch.arange(40), torch.arange(30)))[None]
    together = logits(model, torch.cat((first, second), dim=1), position_ids=packed)
    assert_same(together, torch.cat((logits(model, first), logits(model, second)), dim=1))
    padded = torch.cat((torch.full((1, 50), 3), second), dim=1)
    mask = (torch.arange(80) >= 50).long()[None]
    assert_same(logits(model, padded, attention_mask=mask)[:, 50:], logits(model, second))


@pytest.mark.parametrize("host", HOSTS)
def test_a_trained_table_goes_with_the_adapter(host: str, tmp_path: Path) -> None:
    pair, ids = Pair(host, "learned", {"max_position_embeddings": LONG}), tiny_ids(LONG)
    pair.stock().save_pretrained(tmp_path / "base")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), pair.name, **pair.options)
    table = "wpe" if host == "gpt2" else "posenc"
    model = adapted(model, host, modules_to_save=[table])
    before = logits(model, ids)
    trained = [p for name, p in model.named_parameters() if table in name and p.requires_grad]
    assert len(trained) == 1, "the table is trained, once"
    trained[0].data += torch.randn(trained[0].shape, generator=torch.Generator().manual_seed(5))
    want = logits(model, ids)
    assert difference(want, before) > 1e-2
    save_pretrained(model, tmp_path / "adapter")
    loaded = hf_posenc.from_pretrained(tmp_path / "adapter")
    assert_same(logits(loaded, ids), want, 1e-6)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same(logits(hf_posenc.from_pretrained(tmp_path / "merged"), ids), want)


@pytest.mark.parametrize("host", ["llama", "bloom"])
def test_a_trained_table_is_saved(host: str, tmp_path: Path) -> None:
    """Also when the checkpoint is written in several files."""
    model, ids = Pair(host, "learned", {"max_position_embeddings": LONG}).patched(), tiny_ids(LONG)
    model.base_model.posenc.weight.data += torch.randn(LONG, model.config.hidden_size)
    want = logits(model, ids)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(hf_posenc.from_pretrained(tmp_path), ids), want)
