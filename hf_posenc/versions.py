"""The releases of the host library that this package has been tested with, and a warning, once, about a newer one."""

from __future__ import annotations

import warnings
from functools import cache

import transformers

OLDEST, NEWEST = (5, 4), (5, 24)


def minor(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "5.24.0" or "5.25.0.dev0"."""
    major, rest = version.split(".")[:2]
    return int(major), int("".join(digit for digit in rest if digit.isdigit()) or 0)


@cache
def warn_of_unknown(version: str = transformers.__version__) -> None:
    """Warn where the host library is newer than what is known: its seams may have moved, which `verify` finds out."""
    if minor(version) > NEWEST:
        known = " to ".join(".".join(map(str, edge)) for edge in (OLDEST, NEWEST))
        warnings.warn(
            f"hf_posenc has been tested with Transformers {known}, and this is {version}; whether a patch is in effect "
            "and exact here, hf_posenc.verify(model) tells in seconds",
            stacklevel=3,
        )
