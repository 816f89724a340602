"""Encodings as a user writes them on one line: `none,linear,yarn:factor=4,beta_fast=16`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.errors import OptionError, UnsupportedError, unknown

NONE = "none"
"""The name that stands for the model as it is loaded, without a patch of ours."""


def _short(value: Any) -> str:
    """A value as text, a float with as few digits as tell it from all others."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


@dataclass(frozen=True)
class EncodingSpec:
    """An encoding's name and the options to patch it with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with its options, for the row of a table: `yarn (factor=4)`."""
        given = ", ".join(f"{k}={_short(v)}" for k, v in self.options.items())
        return f"{self.name} ({given})" if given else self.name


def parse_value(text: str) -> Any:
    """A JSON scalar or list where `text` is one, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_option(text: str) -> tuple[str, Any]:
    """`key=value` as a pair."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise OptionError(f"option {text!r} is not of the form key=value (for example factor=4)")
    return key.strip(), parse_value(value.strip())


def _split(text: str) -> list[str]:
    """`text` at its commas, but not at those inside brackets."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces if piece.strip()]


def _parse_text(text: str) -> list[EncodingSpec]:
    specs: list[tuple[str, dict[str, Any]]] = []
    for piece in _split(text):
        name, _, first = piece.partition(":")
        if "=" in name:
            if not specs:
                raise OptionError(f"{piece!r} is an option with no encoding before it; write name:key=value,key=value")
            options, option = specs[-1][1], piece
        else:
            specs.append((name.strip(), options := {}))
            option = first.strip()
            if not option:
                continue
        key, value = parse_option(option)
        if key in options:
            raise OptionError(f"option {key!r} is given twice for {specs[-1][0]!r}")
        options[key] = value
    return [EncodingSpec(name, options) for name, options in specs]


def parse_specs(encodings: str | Iterable[Any]) -> list[EncodingSpec]:
    """`encodings` as specs: one line of text, or a sequence of lines, specs and `Encoding` objects.

    A piece with `=` and no colon before it belongs to the encoding on its left: `yarn:factor=4,beta_fast=16,linear` is
    two encodings.
    """
    specs: list[EncodingSpec] = []
    for item in [encodings] if isinstance(encodings, str) else encodings:
        if isinstance(item, str):
            specs += _parse_text(item)
        elif isinstance(item, EncodingSpec):
            specs.append(item)
        elif hasattr(item, "name") and hasattr(item, "options"):
            specs.append(EncodingSpec(item.name, item.options()))
        else:
            raise OptionError(f"encodings must be names, specs or Encoding objects; got {item!r}")
    if not specs:
        raise OptionError("no encodings given; for example none,linear,ntk,yarn")
    for at, spec in enumerate(specs):
        if spec in specs[:at]:
            raise OptionError(f"encoding {spec.label!r} is given twice")
    return specs


def resolve_specs(specs: Iterable[EncodingSpec], factor: float | None) -> list[EncodingSpec]:
    """`specs` with `factor` added where the encoding takes one and names none; names and values are checked.

    Raises:
        UnknownNameError: an encoding or an option that the registry does not know.
        OptionError: a value that is not allowed, `none` with options, or a factor that no encoding takes.
        OptionTypeError: a value of the wrong type.
    """
    from hf_posenc.registry import ENCODINGS, create

    resolved, taken = [], factor is None
    for spec in specs:
        if spec.name == NONE:
            if spec.options:
                raise OptionError(f"{NONE!r} is the unpatched model and takes no options; got {dict(spec.options)}")
            resolved.append(spec)
            continue
        if spec.name not in ENCODINGS:
            raise unknown("encoding", spec.name, [*ENCODINGS, NONE])
        if factor is not None and "factor" in ENCODINGS[spec.name].options:
            spec, taken = EncodingSpec(spec.name, {"factor": factor, **spec.options}), True
        create(spec.name, **spec.options)
        resolved.append(spec)
    if not taken:
        raise OptionError(
            f"factor {factor} is given, but no encoding here takes one: {', '.join(s.name for s in resolved)}"
        )
    return resolved


def check_support(specs: Iterable[EncodingSpec], model_type: str) -> None:
    """Raise `UnsupportedError`, with the reason, for a pair of architecture and encoding that is refused."""
    from hf_posenc import support

    for spec in specs:
        if spec.name != NONE and not (answer := support(model_type, spec.name)).ok:
            raise UnsupportedError(f"{spec.name} on {model_type}: {answer.reason}")


def gather_options(factor: float | None, given: Iterable[str] | None) -> dict[str, Any]:
    """The options of one encoding from a command line: `--factor` and any number of `--option key=value`."""
    options: dict[str, Any] = {} if factor is None else {"factor": factor}
    for key, value in map(parse_option, given or []):
        if key in options:
            raise OptionError(f"option {key!r} is given twice")
        options[key] = value
    return options
