"""The releases of the host library that this package has been tested with, and a warning, once, about any other."""

from __future__ import annotations

import re
import warnings
from functools import cache

import transformers

OLDEST, NEWEST = (5, 4), (5, 24)


def minor(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "5.24.0", "5.25.0.dev0" or "6"; a part that names no number is 0."""
    major, _, rest = version.partition(".")
    found = [re.match(r"\d+", part) for part in (major, rest)]
    low, high = (0 if match is None else int(match[0]) for match in found)
    return low, high


@cache
def warn_of_unknown(version: str = transformers.__version__) -> None:
    """Warn where the host library is older or newer than what is known: `verify` finds out whether its seams fit."""
    if not OLDEST <= minor(version) <= NEWEST:
        known = " to ".join(".".join(map(str, edge)) for edge in (OLDEST, NEWEST))
        warnings.warn(
            f"hf_posenc has been tested with Transformers {known}, and this is {version}; whether a patch is in effect "
            "and exact here, hf_posenc.verify(model) tells in seconds",
            stacklevel=3,
        )
