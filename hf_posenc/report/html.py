"""The whole page of a comparison: its title, what it says, the sections with figures, conditions and failures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.report import sections, task_sections
from hf_posenc.report.files import json_safe
from hf_posenc.report.measures import all_rows, short_names
from hf_posenc.report.page import Page, Section, Table, render, text_row
from hf_posenc.report.tables import error_lines
from hf_posenc.report.words import summary

if TYPE_CHECKING:
    from hf_posenc.evaluate.results import Comparison

INCOMPLETE = "Incomplete: the run was stopped before every cell was measured. What stands here may change."
ELSEWHERE = ("anatomy", "encodings", "protocol", "command", "not_run")


def page_html(comparison: Comparison) -> str:
    """report.html: one file that needs no network, no script and no other file."""
    header = comparison.header
    facts = {
        "trained on": f"{header['trained_length']} tokens" if header.get("trained_length") else "a length not stated",
        "text": (header.get("text") or {}).get("name", "none"),
        "dtype": header.get("dtype", "not stated"),
        "date": header.get("date", "not stated"),
    }
    return render(
        Page(
            title=f"Position encodings of {header['model']}",
            summary=summary(comparison),
            warning="" if comparison.complete else INCOMPLETE,
            facts=facts,
            sections=[
                sections.perplexity(comparison),
                sections.by_position(comparison),
                task_sections.tasks(comparison),
                task_sections.effective(comparison),
                sections.anatomy(comparison),
                settings(comparison),
                failures(comparison),
            ],
        )
    )


def failures(comparison: Comparison) -> Section:
    """Every cell that could not be measured, with its reason, and every task that was not run."""
    lines = error_lines(all_rows(comparison))
    not_run = comparison.header.get("not_run") or {}
    lines += [f"{task} was not run: {reason}" for task, reason in not_run.items()]
    words = [] if lines else ["None: every cell that was tried has a figure."]
    return Section("failures", "What could not be measured", words, items=lines)


def settings(comparison: Comparison) -> Section:
    """The conditions of the measurement, the options of every encoding, and how to do it again."""
    header = comparison.header
    rows = [text_row(*pair) for pair in flat({k: v for k, v in header.items() if k not in ELSEWHERE and v is not None})]
    tables = [Table("Conditions", ["entry", "value"], rows, prose=True)]
    if header.get("encodings"):
        options = {
            label: ", ".join(f"{k}={value(v)}" for k, v in o.items()) for label, o in header["encodings"].items()
        }
        names = short_names(list(options))
        rows = [text_row(names[label], text or "the model as it is") for label, text in options.items()]
        tables.append(Table("Encodings with all their options", ["encoding", "options"], rows, prose=True))
    words = [header["protocol"]] if header.get("protocol") else []
    return Section("settings", "Conditions, and how to repeat it", words, tables=tables, code=[repeat(comparison)])


def flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """(dotted name, value) of nested entries."""
    found: list[tuple[str, str]] = []
    for key, item in values.items():
        if isinstance(item, Mapping):
            found += flat(item, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", value(item)))
    return found


def value(item: Any) -> str:
    """An entry of a header as text."""
    return item if isinstance(item, str) else json.dumps(json_safe(item), ensure_ascii=False)


def repeat(comparison: Comparison) -> str:
    """The command line that makes this comparison again, as far as its header says it."""
    header = comparison.header
    if header.get("command"):
        return str(header["command"])
    rows = all_rows(comparison)
    specs = {row.label: (row.encoding, row.options) for row in rows}
    encodings = ",".join(
        name + ("" if not options else ":" + ",".join(f"{key}={value(v)}" for key, v in options.items()))
        for name, options in specs.values()
    )
    lengths = ",".join(str(n) for n in sorted({row.length for row in rows}))
    parts = [f"hf-posenc compare {quoted(header['model'])}", f"--encodings {quoted(encodings)}", f"--lengths {lengths}"]
    if comparison.rows:
        parts.append(f"--text {quoted((header.get('text') or {}).get('name', 'TEXT'))} --tail {header.get('tail')}")
    if header.get("stride"):
        parts.append(f"--stride {header['stride']}")
    if comparison.task_rows:
        asked = header.get("tasks") or {}
        tasks = dict.fromkeys(row.task for row in comparison.task_rows)
        parts.append(f"--tasks {','.join(tasks)} --form {comparison.task_rows[0].form}")
        parts += [f"--{key.replace('_', '-')} {asked[key]}" for key in ("num_samples", "seed") if key in asked]
        parts += [f"--{key} {quoted(asked[key].split(' (')[0])}" for key in ("haystack", "qa") if key in asked]
    if header.get("dtype"):
        parts.append(f"--dtype {header['dtype']}")
    return " \\\n    ".join([*parts, "--out results"])


def quoted(text: str) -> str:
    """`text` as one word of a shell."""
    import shlex

    return shlex.quote(text)
