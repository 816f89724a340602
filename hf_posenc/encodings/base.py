"""What an encoding is: options, the numbers it needs of a host, and the seam it lives in. Knows no model."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from ..errors import OptionError, OptionTypeError, unknown

Seam = Literal["embedding", "rotation", "score", "none"]
ADD_ONS = ("resonance", "logn")  # options of many encodings, off by default and named only where they are on


@dataclass(frozen=True)
class Geometry:
    """The numbers an encoding may ask of a host; nothing here names a model.

    `rotary_dim` is the width (channels of a head) that a rotation turns, `rope_theta` the host's own base or None,
    `max_position_embeddings` the length in tokens it was pretrained on or None where its config states none, and
    `embedding_rms()` the root mean square of what enters its first layer (computed on demand: it reads weights).
    `alibi_bias_max` and `alibi_scale` are those of a host's own ALiBi where they are not 8 and 1.
    """

    hidden_size: int
    num_heads: int
    rotary_dim: int
    rope_theta: float | None
    max_position_embeddings: int | None
    embedding_rms: Callable[[], float]
    alibi_bias_max: float | None = None
    alibi_scale: float | None = None


@dataclass(frozen=True)
class Encoding:
    """Base of all encodings: a frozen set of options. `None` means "take it from the host", see `resolve`.

    `causal_only`: whether it has no meaning where queries see later keys.
    """

    name: ClassVar[str]
    seam: ClassVar[Seam]
    causal_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is not ClassVar:
                check_type(self.name, field, getattr(self, field), kind)
        self.check()

    @property
    def is_ours(self) -> bool:
        """Whether this package has its class, and not somebody else's."""
        return type(self).__module__.startswith(__name__.partition(".")[0] + ".")

    @property
    def inside_attention(self) -> bool:
        """Whether it acts inside the attention function: on scores, or on queries and keys that come unturned."""
        return self.seam == "score"

    def check(self) -> None:
        """Raise `OptionError` for values that no host allows."""

    def resolve(self, geometry: Geometry) -> Self:
        """The same encoding with every None filled in from the host; raises `OptionError` where it states none."""
        return self

    def options(self) -> dict[str, Any]:
        """The options that are set, by name, as JSON values: `create(name, **options)` makes an equal encoding."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {key: v for key, v in given.items() if v or key not in ADD_ONS}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in given.items() if v is not None}

    def but(self, **options: Any) -> Self:
        """A copy with some options replaced."""
        return replace(self, **options)

    def require(self, ok: bool, option: str, allowed: str) -> None:
        """Raise `OptionError` naming the option, what was given and what is allowed, unless `ok`."""
        if not ok:
            raise OptionError(f"{self.name}: {option}={getattr(self, option)!r} is not allowed; give {allowed}")


def check_type(encoding: str, option: str, value: object, kind: Any) -> None:
    """Raise unless `value` is of the annotated `kind`: a number is never a bool, a float may be given as an int."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if any(_is_a(value, choice) for choice in choices):
        return
    literals = [literal for c in choices if get_origin(c) is Literal for literal in get_args(c)]
    if literals and isinstance(value, str):
        raise unknown(f"{option} of {encoding}", value, literals)
    allowed = " or ".join(_describe(choice) for choice in choices)
    raise OptionTypeError(f"{encoding}: {option} takes {allowed}, got {value!r} ({type(value).__name__})")


def _is_a(value: object, kind: Any) -> bool:
    if kind is type(None):
        return value is None
    if get_origin(kind) is Literal:
        return value in get_args(kind) and isinstance(value, str)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(v, float) for v in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    names = {type(None): "None", float: "a number", int: "a whole number", bool: "True or False", str: "a string"}
    return names.get(kind, "a list of numbers")


LARGEST = 1e12  # nothing in this field is longer, wider or steeper; beyond it formulas overflow


def at_least(value: float | None, least: float) -> bool:
    """None, or a finite number >= least."""
    return value is None or (value >= least and value <= LARGEST)


def above(value: float | None, bound: float) -> bool:
    """None, or a finite number > bound."""
    return value is None or (value > bound and value <= LARGEST)
