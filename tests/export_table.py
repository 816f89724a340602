"""The table target × encoding, made of what `export` answers; `python tests/export_table.py` writes docs/serve.md's.

A cell that says equal is tested so: tests/test_export_transformers.py compares logits in a process without this
package. tests/test_export_servers.py looks at what vLLM and llama.cpp read, tests/test_export_llamacpp.py runs some.
"""

from __future__ import annotations

import re
from pathlib import Path

from pairs import ENCODINGS, HOSTS, PAIRS, Pair

from hf_posenc.exporting.llamacpp import completed
from hf_posenc.exporting.targets import Verdict, row, subject

PAGE = Path(__file__).resolve().parent.parent / "docs" / "serve.md"
TABLE = re.compile(r"(<!-- export table.*?-->\n)(.*?)(<!-- end of export table -->)", re.S)
WORDS = {"config": "config alone", "code": "own file"}
NAMES = {"llama": "a RoPE host", "gpt2": "GPT-2", "bloom": "BLOOM"}


def chosen(host: str, name: str) -> Pair:
    """The pair of the tests; BLOOM's ALiBi as it was trained."""
    if (host, name) == ("bloom", "alibi"):
        return Pair(host, name)
    return next(pair for pair in PAIRS if (pair.host, pair.name) == (host, name))


def cell(verdict: Verdict, lossy: bool) -> str:
    completed = ", completed by us" if verdict.target == "gguf" and lossy and not verdict.refused else ""
    equal = "equal, " if verdict.target == "transformers" and not verdict.refused else ""
    return equal + WORDS.get(verdict.how, verdict.how) + completed


def cells(host: str, name: str) -> tuple[str, ...]:
    """What the three targets answer."""
    about = subject(chosen(host, name).patched())
    lossy = completed(about.encoding, host)
    return tuple(cell(verdict, lossy) for verdict in row(about))


def export_table() -> str:
    """Encodings with the same answers on one host share a line."""
    lines = ["| on | encoding | Transformers, without hf_posenc | vLLM | llama.cpp |", "|---|---|---|---|---|"]
    for host in HOSTS:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in ENCODINGS:
            groups.setdefault(cells(host, name), []).append(f"`{name}`")
        for answers, names in groups.items():
            lines.append(f"| {NAMES[host]} | {', '.join(names)} | {' | '.join(answers)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda m: m[1] + export_table() + m[3], PAGE.read_text()))
