"""Settings of all tests: one thread a process (tiny models are slower on more), and no progress bars."""

import os
from typing import Any

import pytest

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# each score bias on one of the three main hosts now, on the others in the long run: they differ in nothing else
_NOW = {"t5_bias": "llama", "kerple": "gpt2", "fire": "bloom", "sandwich": "llama"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        pair = getattr(item, "callspec", None) and item.callspec.params.get("pair")
        if pair is not None and _NOW.get(getattr(pair, "name", ""), pair.host) != pair.host:
            item.add_marker("extended")
