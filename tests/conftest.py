"""Settings of all tests: one thread a process (tiny models are slower on more), and no progress bars."""

import importlib.util
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# tests of what need not be installed
_NEEDED = {"test_quantized.py": "bitsandbytes", "test_example_trl.py": "trl"}
collect_ignore = [file for file, package in _NEEDED.items() if importlib.util.find_spec(package) is None]
