"""`verify(model)`: proves on the user's own model, in seconds, that its patch does what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from . import record
from .encodings import Encoding
from .errors import StateError
from .modules import evaluating
from .patching import find_backbone
from .probe import Check, Probe


@dataclass(frozen=True)
class Verification:
    """What was checked on a model, with figures."""

    encoding: Encoding | None
    rows: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether something was checked, and nothing failed."""
        return any(row.passed for row in self.rows) and all(row.passed is not False for row in self.rows)

    def table(self) -> str:
        """The rows as text."""
        marks = {True: "ok", False: "FAILED", None: "not made"}
        lines = [("check", "", "figure", "limit", "")]
        for row in self.rows:
            figure, limit = (short(number) for number in (row.figure, row.limit))
            lines.append((row.name, marks[row.passed], figure, limit, row.detail))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def short(number: float | None) -> str:
    """Two digits of a figure; a count of hundreds in full."""
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def verify(model: Any, tokenizer: Any = None, progress: bool = True, save: bool | None = None) -> Verification:
    """Check that the patch of `model` is in effect and exact: a table of what was checked, with figures.

    In effect, numbers equal the formula, cached = uncached, padded = alone, save → load. `tokenizer` only serves to
    avoid special tokens in the probe. `save`: whether to write the model to a temporary folder (default: up to 2 GiB).
    The model is left as it was. A model with no patch in effect fails the first check.
    """
    patch, backbone = find_backbone(model)
    state = backbone.__dict__.get("_posenc_state")
    if state is None:
        return Verification(None, (explain_absence(backbone),))
    probe = Probe(model, backbone, state, patch, tokenizer)
    checks: list[Callable[[], Check | None]] = [
        probe.in_effect,
        probe.acts,
        probe.numbers,
        probe.paired,
        probe.cached,
        probe.padded,
        lambda: probe.reloaded(save),
    ]
    rows: list[Check] = []
    with evaluating(model), torch.no_grad():
        for check in tqdm(checks, desc="verify", disable=not progress or not sys.stderr.isatty(), leave=False):
            try:
                row = check()
            except StateError as error:  # a hook or a layer of the patch is gone: that is an answer, too
                rows.append(Check("in effect", False, None, None, str(error)))
                break
            if row is not None:
                rows.append(row)
    return Verification(state.encoding, tuple(rows))


def explain_absence(backbone: Any) -> Check:
    """The one row of a model that carries no patch."""
    saved = record.read(backbone.config)
    if saved is None:
        return Check("in effect", False, None, None, "this model is not patched")
    if saved.native:
        detail = f"{saved.name} is in its config and served by Transformers itself; load it with hf_posenc to verify it"
        return Check("in effect", None, None, None, detail)
    detail = f"saved with {saved.name}, which is NOT in effect: load it with hf_posenc.from_pretrained"
    return Check("in effect", False, None, None, detail)
