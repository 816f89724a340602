"""Every architecture × every encoding on a tiny random model: equal to the oracle, verified, undone; or refused.

    python benchmarks/pairs.py                       # all, on two processes; writes results/pairs-cpu.json, pairs.md
    python benchmarks/pairs.py --hosts llama,bert    # some of them

The models, the options (none of them the defaults) and the double-precision oracle are those of the tests. A pair
passes where its logits equal the oracle's to 1e-4 of the largest over a text past the trained length, `verify` passes
(effect, numbers, cache, padding, a trip to disk), and `unpatch_model` gives the first logits back bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import hosts  # noqa: E402
import other_hosts  # noqa: E402
import pairs as main_hosts  # noqa: E402
import torch  # noqa: E402
from machine import conditions  # noqa: E402
from tiny import LENGTH  # noqa: E402

from hf_posenc import list_architectures, list_encodings, support, unpatch_model, verify  # noqa: E402

TOKENS = 3 * LENGTH
LIMIT = 1e-4


def pair_of(host: str, name: str) -> Any:
    """The pair as the tests have it."""
    if host in main_hosts.HOSTS:
        return main_hosts._pair(host, name, False)
    return hosts.host_pair(host, name) if host in hosts.ROPE_HOSTS else other_hosts.pair(host, name)


def judge(asked: tuple[str, str]) -> dict[str, Any]:
    """One pair: {"refused": reason}, or what was found and whether it passed."""
    host, name = asked
    answer = support(host, name)
    found: dict[str, Any] = {"host": host, "encoding": name}
    if not answer:
        return {**found, "refused": answer.reason}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pair = pair_of(host, name)
    stock, ids = pair.stock(), other_hosts.text(TOKENS)
    short = ids[:, : LENGTH // 2]
    with torch.no_grad():
        before = stock(input_ids=short).logits
        model = pair.put_into(stock) if hasattr(pair, "put_into") else pair.patched()
        got = model(input_ids=ids).logits
        wanted = main_hosts.reference(pair, ids) if host in main_hosts.HOSTS else pair.reference(ids)
        off = main_hosts.difference(got, wanted)
        verified = verify(model, progress=False)
        restored = torch.equal(unpatch_model(model)(input_ids=short).logits, before)
    failed = [row.name for row in verified.rows if row.passed is False]
    return {
        **found,
        "options": pair.options,
        "off_the_oracle": off,
        "verify_failed": failed,
        "restored": restored,
        "passed": off <= LIMIT and not failed and restored,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: an architecture a row, an encoding a column."""
    names = list(dict.fromkeys(row["encoding"] for row in rows))
    by_host: dict[str, dict[str, str]] = {}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        mark = "refused" if "refused" in row else "ok" if row["passed"] else "FAILED"
        by_host.setdefault(row["host"], {})[row["encoding"]] = mark
        if "refused" in row:
            reasons.setdefault(row["refused"], []).append(f"{row['host']} × {row['encoding']}")
    lines = [f"| architecture | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {host} | {' | '.join(marks[name] for name in names)} |" for host, marks in by_host.items()]
    lines += ["", *(f"- {', '.join(pairs)}: {reason}" for reason, pairs in reasons.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line; exit status 1 where a pair fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="", metavar="HOST,…", help="by default all")
    parser.add_argument("--encodings", default="", metavar="NAME,…", help="by default all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pairs-cpu.json")
    arguments = parser.parse_args()
    chosen = arguments.hosts.split(",") if arguments.hosts else list_architectures()
    names = arguments.encodings.split(",") if arguments.encodings else [row.name for row in list_encodings()]
    header, asked = conditions(), [(host, name) for host in chosen for name in names]
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = list(pool.map(judge, asked))
    refused, passed = sum("refused" in row for row in rows), sum(row.get("passed", False) for row in rows)
    counts = {"pairs": len(rows), "passed": passed, "refused": refused, "failed": len(rows) - passed - refused}
    arguments.out.write_text(json.dumps({"conditions": header, "counts": counts, "rows": rows}, indent=1) + "\n")
    text = f"# Every pair\n\nMade by `python benchmarks/pairs.py`: {counts}\n\n{table(rows)}"
    (HERE / "pairs.md" if not arguments.hosts else arguments.out.with_suffix(".md")).write_text(text)
    for row in rows:
        if row.get("passed") is False:
            print(f"FAILED {row['host']} × {row['encoding']}: {row['off_the_oracle']:.1e} {row['verify_failed']}")
    print(counts)
    if counts["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
