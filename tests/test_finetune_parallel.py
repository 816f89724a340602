"""More than one process: data parallel as one with twice the batch, sharded weights, and the files that are shipped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tuning import save_base

import hf_posenc
from hf_posenc.finetuning.settings import Settings, read_settings

ROOT = Path(hf_posenc.__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "finetune"
PATHS = [str(Path(__file__).parent), str(ROOT)]
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]

TWO = """
import sys
sys.path[:0] = sys.argv[4:]
import torch; torch.set_num_threads(1)
from pathlib import Path
from accelerate import PartialState
from transformers import TrainerCallback
from tuning import TEXTS, YARN, tune

class Count(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        assert PartialState().num_processes == args.world_size == int(sys.argv[3])

training = {"per_device_train_batch_size": 2 // int(sys.argv[3]), "save_steps": 4}
data = {"mode": "packed"}
tune(sys.argv[1], Path(sys.argv[2]), TEXTS, **YARN, callbacks=[Count()], merge=True, data=data, training=training)
"""

SHARDED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch; torch.set_num_threads(1)
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tiny import VOCAB, tiny_ids, tiny_model
from hf_posenc import patch_model
from hf_posenc.finetuning.chunked_loss import ChunkedLoss

dist.init_process_group("gloo")
plain, model = (patch_model(tiny_model("llama", tie_word_embeddings=True), "alibi").train() for _ in range(2))
both = [tiny_ids(40, seed=i) for i in range(2)]
sum(plain(input_ids=ids, labels=ids).loss for ids in both).div(2).backward()
mesh = init_device_mesh("cpu", (2,))
for part in (*model.model.layers, model):
    fully_shard(part, mesh=mesh)
ids = both[dist.get_rank()]
chunked = ChunkedLoss(model, 4 * VOCAB * 7)
with chunked.of(ids) as kept:
    out = model(input_ids=ids)
    (kept.total / 39 + 0.0 * out.logits.sum()).backward()
for (name, want), found in zip(plain.named_parameters(), model.parameters()):
    size = float(want.grad.abs().max()) if name != "model.posenc.bias" else 1.0  # softmax ignores FIRE's last constant
    torch.testing.assert_close(found.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-5 * size)
dist.destroy_process_group()
print("equal")
"""


def start(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    base, script = save_base(tmp_path / "base"), tmp_path / "two.py"
    script.write_text(TWO)
    start([*TORCHRUN, str(script), base, str(tmp_path / "two"), "2", *PATHS])
    start([sys.executable, str(script), base, str(tmp_path / "one"), "1", *PATHS])
    losses = [json.loads((tmp_path / name / "results.json").read_text())["losses"] for name in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and list(losses[0]) == ["1", "2", "3", "4"]
    assert (tmp_path / "two" / "checkpoint-4" / "rng_state_1.pth").is_file()
    assert hf_posenc.get_encoding(hf_posenc.from_pretrained(tmp_path / "two" / "merged")).name == "yarn"


@pytest.mark.extended
@pytest.mark.parametrize("encoding", ["alibi", "t5_bias", "kerple", "fire"])
def test_the_chunked_loss_under_fsdp2(encoding: str, tmp_path: Path) -> None:
    """Tied weights, sharded over two processes: gradients are those of the plain loss on one, of a bias too."""
    (tmp_path / "sharded.py").write_text(SHARDED.replace('"alibi"', f'"{encoding}"'))
    assert "equal" in start([*TORCHRUN, str(tmp_path / "sharded.py"), *PATHS])


def test_the_shipped_files_are_what_the_libraries_read() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    settings = Settings.of({**read_settings(EXAMPLES / "run.yaml"), "data": {"max_length": 64}})
    assert settings.encoding["name"] == "yarn" and settings.merge
    config = load_config_from_file(str(EXAMPLES / "fsdp2.yaml"))
    assert config.fsdp_config["fsdp_version"] == 2
    assert yaml.safe_load((EXAMPLES / "fsdp2.yaml").read_text())["distributed_type"] == "FSDP"
    assert json.loads((EXAMPLES / "deepspeed_zero2.json").read_text())["zero_optimization"]["stage"] == 2


@pytest.mark.extended
@pytest.mark.parametrize("script", ["finetune.py", "recovery.py"])
def test_benchmarks_run(script: str, tmp_path: Path) -> None:
    only = [] if script == "finetune.py" else ["--only", "bloom"]
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *only, "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["conditions"]["quick"]
    if script == "finetune.py":
        assert found["speed"]["loss_difference"] < 1e-4 and found["speed"]["ratio"] > 0
