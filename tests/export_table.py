"""The table target × encoding, made of what `export` answers; `python tests/export_table.py` writes those
of docs/serve.md and docs/llamacpp.md.

A cell that says equal is tested so: tests/test_export_transformers.py compares logits in a process without this
package. tests/test_export_servers.py looks at what vLLM and llama.cpp read, tests/test_export_llamacpp.py runs some.
"""

from __future__ import annotations

import re
from pathlib import Path

from pairs import ENCODINGS, PAIRS, Pair
from pairs import HOSTS as MAIN

from hf_posenc import list_architectures
from hf_posenc.exporting.llamacpp import HOSTS, REFUSED, completed
from hf_posenc.exporting.targets import Verdict, row, subject

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, HOST_PAGE = DOCS / "serve.md", DOCS / "llamacpp.md"
HOST_TABLE = re.compile(r"(<!-- llama.cpp by host.*?-->\n)(.*?)(<!-- end of llama.cpp by host -->)", re.S)
TABLE = re.compile(r"(<!-- export table.*?-->\n)(.*?)(<!-- end of export table -->)", re.S)
WORDS = {"config": "config alone", "code": "own file"}
NAMES = {"llama": "Llama", "gpt2": "GPT-2", "bloom": "BLOOM"}


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
    for host in MAIN:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in ENCODINGS:
            groups.setdefault(cells(host, name), []).append(f"`{name}`")
        for answers, names in groups.items():
            lines.append(f"| {NAMES[host]} | {', '.join(names)} | {' | '.join(answers)} |")
    return "\n".join(lines) + "\n"


def on_host(host: str) -> tuple[str, str]:
    """What llama.cpp has of a host's rotations, and what is refused there, in words."""
    if host in REFUSED:
        return "none", f"everything: {REFUSED[host]}"
    row = HOSTS.get(host)
    if row is None:
        return "none", "every encoding: no run has shown it equal"
    if not row.types:
        return "its own positions", "every rotation"
    kinds = {"default": "`rope`, `ntk`", "linear": "`linear`", "yarn": "`yarn`, `ntk_by_parts`"}
    held = ", ".join(kinds[kind] for kind in row.types)
    held += {"ours": ", and the rest of the [table](serve.md)", "written": ", and every fixed one as a list", "": ""}[
        row.lists
    ]
    held += ", by the second command" if row.dropped else ""
    beside = [] if row.windows else ["windows shorter than the stated length"]
    beside += [f"`{key}`" for key, _ in row.unless]
    beside += ["YaRN with other than its usual betas"] if "yarn" in row.types and not row.lists else []
    return held, ", ".join(beside) or "nothing more"


def hosts_table() -> str:
    """llama.cpp by host; hosts of which the same is said share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for host in list_architectures():
        groups.setdefault(on_host(host), []).append(f"`{host}`")
    lines = ["| host | llama.cpp has | refused |", "|---|---|---|"]
    lines += [f"| {', '.join(hosts)} | {held} | {beside} |" for (held, beside), hosts in groups.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda m: m[1] + export_table() + m[3], PAGE.read_text()))
    HOST_PAGE.write_text(HOST_TABLE.sub(lambda m: m[1] + hosts_table() + m[3], HOST_PAGE.read_text()))
