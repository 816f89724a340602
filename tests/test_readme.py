"""The README is true: its Python runs, its table is the code's, its links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from hf_posenc import list_architectures, list_encodings, support

README = Path(__file__).parent.parent / "README.md"
TABLE = re.compile(r"(<!-- support table.*?-->\n)(.*?)(<!-- end of support table -->)", re.S)


def support_table() -> str:
    """Two tables as Markdown, from the code: the encodings, and the architectures by what they refuse."""
    encodings = list_encodings()
    rows = ["| encoding | seam | what it does |", "|---|---|---|"]
    rows += [f"| `{row.name}` | {row.seam} | {row.summary} ({row.paper}) |" for row in encodings]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host in list_architectures():
        answers = [(row.name, support(host, row.name)) for row in encodings]
        groups.setdefault(tuple((name, answer.reason) for name, answer in answers if not answer), []).append(host)
    rows += ["", "| architecture (`model_type`) | encodings | refused |", "|---|---|---|"]
    for refused, hosts in sorted(groups.items(), key=lambda item: len(item[0])):
        taken = f"all {len(encodings)}" if not refused else f"{len(encodings) - len(refused)} of {len(encodings)}"
        reasons: dict[str, list[str]] = {}
        for name, reason in refused:
            reasons.setdefault(reason, []).append(f"`{name}`")
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()) or "none"
        rows.append(f"| {', '.join(f'`{host}`' for host in hosts)} | {taken} | {why} |")
    return "\n".join(rows) + "\n"


def test_the_table_is_the_codes() -> None:
    found = TABLE.search(README.read_text())
    assert found is not None
    assert found[2] == support_table()


@pytest.mark.filterwarnings("ignore")
def test_the_python_runs_and_prints_what_it_says() -> None:
    failed, tried = doctest.testfile(str(README), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried >= 10
    assert failed == 0


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_nothing_is_left_to_be_filled_in() -> None:
    for file in (README, README.parent / "benchmarks" / "README.md"):
        text = file.read_text()
        assert not re.search(r"<!-- ([a-z ]+) -->\s*<!-- end of \1 -->", text), file.name
        assert "<!-- tables:" not in text, file.name


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda m: m[1] + support_table() + m[3], README.read_text()))
