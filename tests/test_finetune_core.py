"""A run from beginning to end: what it saves, that it loads again as it was, and that it goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import snapshots
import torch
import yaml
from pairs import assert_same, logits
from safetensors.torch import load_file, save_file
from tiny import tiny_ids
from transformers import TrainerCallback
from tuning import TEXTS, YARN, save_base, tune

import hf_posenc
from hf_posenc import finetune, get_encoding, patch_model
from hf_posenc.errors import StateError
from hf_posenc.finetuning.checkpoints import is_whole, last_whole

IDS = tiny_ids(70)
IN_A_NEW_PROCESS = """
import sys
import hf_posenc
from safetensors.torch import load_file, save_file
ids = load_file(sys.argv[1])["ids"]
models = {folder: hf_posenc.from_pretrained(folder) for folder in sys.argv[3:]}
save_file({k: m.eval()(ids, use_cache=False).logits.detach() for k, m in models.items()}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bases")
    return {host: save_base(root / host, host) for host in ("llama", "gpt2", "bloom")}


def test_trained_saved_merged_and_loaded_in_a_new_process(bases: dict[str, str], tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {
        "llama": YARN,
        "gpt2": {"encoding": "learned", "options": {"resize": "interpolate", "factor": 4}},
        "bloom": {"encoding": "learned", "options": {"max_position_embeddings": 80}, "lora": {"embeddings": True}},
    }
    want, folders = {}, []
    for host, how in runs.items():
        result = tune(bases[host], tmp_path / host, **how, merge=True)
        assert result.steps == 4 and list(result.losses) == [1, 2, 3, 4]
        before = hf_posenc.from_pretrained(bases[host], encoding=how["encoding"], options=how["options"])
        trained = logits(result.model.eval(), IDS)
        assert (trained - logits(before, IDS)).abs().max() > 1e-2, "nothing was learnt"
        for folder in (tmp_path / host, tmp_path / host / "merged", tmp_path / host / "checkpoint-4"):
            assert json.loads((folder / "posenc_config.json").read_text())["encoding"] == how["encoding"]
            assert not [file for file in folder.iterdir() if file.name in ("training_args.bin", "pytorch_model.bin")]
            folders.append(str(folder))
            want[str(folder)] = trained
    save_file({"ids": IDS}, tmp_path / "ids")
    arguments = [str(tmp_path / "ids"), str(tmp_path / "logits"), *folders]
    root = Path(hf_posenc.__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, *arguments], check=True, cwd=root)
    found = load_file(tmp_path / "logits")
    for folder in folders:
        assert_same(found[folder], want[folder], 1e-4)


def test_what_is_trained_by_default_and_by_flag(bases: dict[str, str], tmp_path: Path) -> None:
    def trained(host: str, **how: Any) -> set[str]:
        model = tune(bases[host], tmp_path / f"{host}{len(list(tmp_path.iterdir()))}", steps=1, **how).model
        return {
            name.split("layers.0.")[-1].split("h.0.")[-1] for name, p in model.named_parameters() if p.requires_grad
        }

    llama = trained("llama", encoding="learned", options={"max_position_embeddings": 64})
    for projection in "qkvo":
        assert f"self_attn.{projection}_proj.lora_A.default.weight" in llama
    assert any("input_layernorm.modules_to_save" in name for name in llama)
    assert any("posenc.modules_to_save" in name for name in llama)
    assert not any("mlp" in name or "embed_tokens" in name for name in llama)
    gpt2 = trained("gpt2", encoding="rope", lora={"norms": False})
    assert {name for name in gpt2 if "." in name and "lora_A" in name and name[:2] != "1."} >= {
        "attn.c_attn.lora_A.default.weight",
        "attn.c_proj.lora_A.default.weight",
    }
    assert not any("wpe" in name or "ln_" in name or "mlp" in name for name in gpt2)
    bloom = trained(
        "bloom", encoding="rope", options={"original_max_position_embeddings": 32}, lora={"embeddings": True}
    )
    assert any("word_embeddings.modules_to_save" in name for name in bloom)
    assert "self_attention.dense.lora_A.default.weight" in bloom and not any("dense_h" in name for name in bloom)
    chosen = trained("llama", **YARN, lora={"targets": ["up_proj"], "norms": False})
    assert all("up_proj" in name for name in chosen)
    everything = trained("llama", **YARN, lora={"full": True})
    assert "mlp.up_proj.weight" in everything and not any("lora" in name for name in everything)


def test_every_parameter_goes_through_a_checkpoint(bases: dict[str, str], tmp_path: Path) -> None:
    how: dict[str, Any] = {"encoding": "learned", "options": {"max_position_embeddings": 64}, "lora": {"full": True}}
    result = tune(bases["llama"], tmp_path, **how, training={"save_steps": 4})
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        loaded = hf_posenc.from_pretrained(folder)
        assert get_encoding(loaded) == get_encoding(result.model)
        assert torch.equal(logits(loaded, IDS[:, :60]), logits(result.model.eval(), IDS[:, :60]))
    again = tune(bases["llama"], tmp_path, **how, training={"save_steps": 4}, steps=6)
    assert list(again.losses) == [1, 2, 3, 4, 5, 6]


def test_a_loaded_model_is_patched_and_trained_in_place(bases: dict[str, str], tmp_path: Path) -> None:
    model, tokenizer = hf_posenc.from_pretrained(bases["llama"]), hf_posenc.demo.train.byte_tokenizer()
    patch_model(model, "alibi")
    result = finetune(model, tokenizer, TEXTS, out=tmp_path, max_length=40, steps=1)
    assert result.model.get_base_model() is model
    assert get_encoding(hf_posenc.from_pretrained(tmp_path)).name == "alibi"
    with pytest.raises(StateError, match="has an adapter in it already"):
        finetune(model, tokenizer, TEXTS, out=tmp_path / "again", max_length=40, steps=1)
    assert finetune(result.model, tokenizer, TEXTS, out=tmp_path / "again", max_length=40, steps=1).steps == 1


def test_a_refused_run_leaves_the_callers_model_as_it_was(bases: dict[str, str], tmp_path: Path) -> None:
    model = hf_posenc.from_pretrained(bases["llama"])
    was = snapshots.of_model(model)
    for how in ({"max_length": 500}, {"lora": {"targets": ["none"]}}, {"texts": []}):
        with pytest.raises(hf_posenc.PosencError):
            tune(model, tmp_path, tokenizer=hf_posenc.demo.train.byte_tokenizer(), **{**YARN, **how})
    assert snapshots.of_model(model) == was


class Raise(TrainerCallback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def test_a_signal_saves_and_a_resumed_run_has_the_same_losses(bases: dict[str, str], tmp_path: Path) -> None:
    how: dict[str, Any] = {**YARN, "lora": {"dropout": 0.1}, "data": {"shuffle": 4}, "training": {"save_steps": 100}}
    how["training"]["gradient_accumulation_steps"] = 2
    whole = tune(bases["llama"], tmp_path / "whole", **how, steps=6)
    with pytest.raises(KeyboardInterrupt, match=r"step 3 of 6.*goes on from there"):
        tune(bases["llama"], tmp_path / "parts", **how, steps=6, callbacks=[Raise(3)])
    assert last_whole(tmp_path / "parts") == (3, tmp_path / "parts" / "checkpoint-3")
    with pytest.raises(KeyboardInterrupt, match="step 5 of 6"):
        tune(bases["llama"], tmp_path / "parts", **how, steps=6, callbacks=[Raise(5, signal.SIGTERM)])
    parts = tune(bases["llama"], tmp_path / "parts", **how, steps=6)
    assert parts.losses == pytest.approx(whole.losses, abs=1e-6)
    assert torch.equal(logits(parts.model.eval(), IDS), logits(whole.model.eval(), IDS))
    finished = tune(bases["llama"], tmp_path / "parts", **how, steps=6)
    assert finished.losses == parts.losses
    assert torch.equal(logits(finished.model.eval(), IDS), logits(parts.model.eval(), IDS))


def test_another_encoding_or_other_data_are_refused_on_resume(bases: dict[str, str], tmp_path: Path) -> None:
    tune(bases["llama"], tmp_path, **YARN)
    changed: list[tuple[dict[str, Any], str]] = [
        ({"encoding": "linear", "options": {"factor": 4}}, "encoding name 'yarn', now it is 'linear'"),
        ({"encoding": "yarn", "options": {"factor": 8}}, "encoding factor 4, now it is 8"),
        ({**YARN, "max_length": 40}, "data max_length 48, now it is 40"),
        ({**YARN, "texts": TEXTS[:9]}, "data bytes"),
        ({**YARN, "training": {"per_device_train_batch_size": 2}}, "per_device_train_batch_size"),
        ({**YARN, "lora": {"r": 4}}, "lora r 8"),
    ]
    for how, says in changed:
        with pytest.raises(StateError, match=says):
            tune(bases["llama"], tmp_path, **how)
    restarted = tune(bases["llama"], tmp_path, encoding="linear", options={"factor": 4}, restart=True)
    assert restarted.steps == 4


UNTIL_KILLED = """
import sys
sys.path[:0] = sys.argv[3:]
import torch; torch.set_num_threads(1)
from pathlib import Path
from tuning import YARN, tune
tune(sys.argv[1], Path(sys.argv[2]), **YARN, steps=400, training={"save_steps": 1, "save_total_limit": 2})
"""


def test_kill_9_leaves_a_whole_checkpoint_to_go_on_from(bases: dict[str, str], tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    root = str(Path(hf_posenc.__file__).resolve().parents[1])
    command = [sys.executable, "-c", UNTIL_KILLED, bases["llama"], str(tmp_path / "run"), tests, root]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while (last_whole(tmp_path / "run") or (0,))[0] < 3 and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    step, folder = last_whole(tmp_path / "run") or (0, None)
    assert step >= 3 and folder is not None
    cut = tmp_path / "run" / f"checkpoint-{step + 1}"  # as if the next one had been half written
    cut.mkdir(exist_ok=True)
    (cut / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes()[:1000])
    (cut / "trainer_state.json").write_text((folder / "trainer_state.json").read_text()[:100])
    assert not is_whole(cut, step + 1) and last_whole(tmp_path / "run") == (step, folder)
    settings = yaml.safe_load((tmp_path / "run" / "finetune.yaml").read_text())["training"]
    training = {key: settings[key] for key in ("save_total_limit", "warmup_steps")} | {"save_steps": 100}
    resumed = tune(bases["llama"], tmp_path / "run", **YARN, steps=step + 3, training=training)
    straight = tune(bases["llama"], tmp_path / "straight", **YARN, steps=step + 3, training=training)
    assert list(resumed.losses) == list(range(1, step + 4))
    assert resumed.losses == pytest.approx(straight.losses, abs=1e-6)
