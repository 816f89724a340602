"""Settings of all tests: one thread a process (tiny models are slower on more), and no progress bars."""

import importlib.util
import os

import pytest

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402  (after the settings, which it reads once)

# tests of what need not be installed, and of what the oldest torch cannot do: FSDP2 on a CPU needs events on streams
_NEEDED = {"test_quantized.py": "bitsandbytes", "test_example_trl.py": "trl"}
collect_ignore = [file for file, package in _NEEDED.items() if importlib.util.find_spec(package) is None]
collect_ignore += [] if hasattr(torch.cpu.Stream, "record_event") else ["test_sharded.py"]

# of these all pairs are tested in the long run, and one a host now: they share their code, and differ in their maps
_ONE_A_HOST = ("rerope", "self_extend", "dual_chunk", "leaky_rerope", "xpos")
# each score bias on one of the three main hosts now, on the others in the long run: they differ in nothing else
_NOW = {"t5_bias": "llama", "kerple": "gpt2", "fire": "bloom", "sandwich": "llama"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        pair = getattr(getattr(item, "callspec", None), "params", {}).get("pair")
        name = getattr(pair, "name", None)
        if name in _NOW and pair.host != _NOW[name]:
            item.add_marker("extended")
        if name not in _ONE_A_HOST or item.path.name.startswith("test_distance"):
            continue
        if name != _ONE_A_HOST[sum(pair.host.encode()) % len(_ONE_A_HOST)]:
            item.add_marker("extended")
