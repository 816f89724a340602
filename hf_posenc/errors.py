"""Every error a user can meet, each a `PosencError` and the builtin it stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosencError(Exception):
    """Base of all errors of this package; the text says what was given, what is allowed, and what to do."""


class OptionError(PosencError, ValueError):
    """A value that an option, a file or a model does not allow."""


class OptionTypeError(PosencError, TypeError):
    """An option of the wrong type."""


class UnknownNameError(PosencError, ValueError):
    """A name that is not in a registry."""


class UnsupportedError(PosencError, NotImplementedError):
    """A pair of architecture and encoding, or a mode of the host, that cannot work; with the reason."""


class StateError(PosencError, RuntimeError):
    """The model is not in the state that the call needs (already patched, not patched, altered behind our back)."""


class ReachError(PosencError, IndexError):
    """A position past the end of what the encoding can express."""


class CheckpointError(PosencError, OSError):
    """A folder or a record on disk that cannot be read or written."""


class EffectError(PosencError, AssertionError):
    """A patch was applied and did not do what its formula says; it has been rolled back."""


class DivergedError(PosencError, FloatingPointError):
    """A loss that is no number; says at which step."""


def unknown(kind: str, name: object, allowed: Iterable[str], near: str | None = None) -> UnknownNameError:
    """The error for a misspelt `name`, with the one that is meant (or is spelt most alike) and the whole list."""
    names = sorted(allowed)
    near = near or next(iter(difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)), None)
    hint = f"; did you mean {near!r}?" if near else ""
    return UnknownNameError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
