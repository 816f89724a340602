"""A search for one rescale factor a pair of channels (LongRoPE), on the user's own model and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import SearchResult, search

__all__ = ["SearchResult", "search"]


def __getattr__(name: str) -> Any:
    # not at the top: the command line imports this package, and must answer at once
    if name in __all__:
        from . import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
