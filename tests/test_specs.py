"""Encodings as a user writes them on one line."""

import math
from typing import Any

import pytest
from tiny import tiny_model

import hf_posenc
from hf_posenc.errors import (
    OptionError,
    PosencError,
    UnknownNameError,
)
from hf_posenc.evaluate.specs import EncodingSpec, parse_specs, resolve_specs


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("none, linear", [("none", {}), ("linear", {})]),
        ("yarn:factor=4,beta_fast=16,linear", [("yarn", {"factor": 4, "beta_fast": 16}), ("linear", {})]),
        (
            "longrope:short_factor=[1,2],long_factor=[3, 4]",
            [("longrope", {"short_factor": [1, 2], "long_factor": [3, 4]})],
        ),
        ("learned:resize=cubic,factor=2,rope:", [("learned", {"resize": "cubic", "factor": 2}), ("rope", {})]),
        ("yarn:truncate=false,factor=2.5", [("yarn", {"truncate": False, "factor": 2.5})]),
    ],
)
def test_encodings_on_one_line(text: str, want: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse_specs(text) == [EncodingSpec(name, options) for name, options in want]


@pytest.mark.parametrize("text", ["", "factor=2,yarn", "yarn:factor", "yarn:factor=2,factor=3", "yarn,yarn"])
def test_encodings_that_cannot_be_read(text: str) -> None:
    with pytest.raises(OptionError):
        parse_specs(text)


def test_encoding_objects_and_labels() -> None:
    encoding = hf_posenc.get_encoding(hf_posenc.patch_model(tiny_model("llama"), "linear", factor=2))
    spec = parse_specs([encoding, "none"])[0]
    assert spec.name == "linear" and spec.options["factor"] == 2
    assert EncodingSpec("yarn", {"factor": 4.0}).label == "yarn (factor=4)"


def test_the_factor_goes_to_encodings_that_take_one_and_name_none() -> None:
    specs = resolve_specs(parse_specs("none,rope,linear,yarn:factor=8"), 4)
    assert [spec.options for spec in specs] == [{}, {}, {"factor": 4}, {"factor": 8}]


@pytest.mark.parametrize(
    ("text", "factor", "error", "says"),
    [
        ("none,yarm", 2, UnknownNameError, "did you mean 'yarn'"),
        ("non", None, UnknownNameError, "did you mean 'none'"),
        ("yarn:facto=2", None, UnknownNameError, "did you mean 'factor'"),
        ("none:factor=2", None, OptionError, "takes no options"),
        ("yarn:factor=0.5", None, OptionError, "factor"),
        ("yarn", math.nan, OptionError, "factor"),
        ("yarn:factor=big", None, PosencError, "factor"),
        ("none,rope", 2, OptionError, "no encoding here takes one: none, rope"),
    ],
)
def test_specs_that_are_refused(text: str, factor: float | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        resolve_specs(parse_specs(text), factor)
