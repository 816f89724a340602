"""The conformance tests under other releases: `versions_table.py NAME PYTHON` runs them and notes how it went.

`make test-versions` makes an environment for each row and calls this; the rows together are docs/versions.md's table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PACKAGES = ("transformers", "torch", "peft", "accelerate")
FILES = ("conformance", "conformance_checkpoint", "peft_methods", "never_unpatched", "offload", "sharded")
FILES += ("export_safety",)
VERSIONS = "import json; from importlib.metadata import version as v; print(json.dumps({p: v(p) for p in %r}))"


def run(python: str) -> dict[str, Any]:
    """Versions, counts and seconds of one environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    asked = [python, "-c", VERSIONS % (PACKAGES,)]
    found = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True, env=environment).stdout)
    files = [f"tests/test_{name}.py" for name in FILES]
    start = time.monotonic()
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *files], cwd=ROOT, text=True, capture_output=True, env=environment
    )
    print(done.stdout[-3000:], done.stderr[-1000:], file=sys.stderr)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return {**found, **counts, "seconds": round(time.monotonic() - start)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, one line an environment."""
    lines = [f"| {' | '.join(PACKAGES)} | passed | failed |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        failed = row.get("failed", 0) + row.get("error", 0)
        lines.append(f"| {' | '.join(row[package] for package in PACKAGES)} | {row.get('passed', 0)} | {failed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    name, python = sys.argv[1:]
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows[name] = run(python)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    print(table(rows))
    sys.exit(bool(rows[name].get("failed", 0) + rows[name].get("error", 0)) or not rows[name].get("passed"))
