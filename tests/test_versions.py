"""What is claimed of other releases: another one is warned of, once; the table of docs/ is that of the last run."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import transformers
from tiny import tiny_model

from hf_posenc import patch_model, versions
from hf_posenc.versions import NEWEST, OLDEST, minor, warn_of_unknown

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"


def test_a_newer_release_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
    warn_of_unknown.cache_clear()
    monkeypatch.setattr(versions, "warn_of_unknown", lambda: warn_of_unknown(unknown))
    monkeypatch.setattr("hf_posenc.patching.warn_of_unknown", versions.warn_of_unknown)
    with pytest.warns(UserWarning, match=rf"Transformers 5.4 to 5.24, and this is {unknown}; .*verify"):
        patch_model(tiny_model("llama"), "yarn", factor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(tiny_model("llama"), "yarn", factor=2)
    warn_of_unknown.cache_clear()


@pytest.mark.parametrize("version", ["5.24.3", "5.4.0", "5.4", transformers.__version__])
def test_a_known_release_is_not(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown.__wrapped__(version)


@pytest.mark.parametrize("version", ["5.3.0", "5.0.0", "4.57.0", "4", "5.25.0.dev0", "6", "6rc1", "6.0.0", "main"])
def test_any_other_is_warned_of(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"Transformers 5.4 to 5.24, and this is {version}; .*verify"):
        warn_of_unknown.__wrapped__(version)


def test_versions_are_read_as_they_are_written() -> None:
    assert [minor(v) for v in ("5.24.0", "5.25.0.dev0", "6.0rc1", "5.4")] == [(5, 24), (5, 25), (6, 0), (5, 4)]
    assert [minor(v) for v in ("6", "6rc1", "5.24rc1", "v5", "")] == [(6, 0), (6, 0), (5, 24), (0, 0), (0, 0)]


def test_the_package_asks_for_what_is_claimed() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST[0]}.{OLDEST[1]}" in asked["dependencies"]
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None and minor(pinned[1]) == NEWEST


def test_the_table_is_that_of_the_last_run() -> None:
    from versions_table import RESULTS, table

    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()
