"""Encodings from outside of this package: on any host, proved by what they promise, saved once they have a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pairs import assert_same, logits
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn

import hf_posenc
from hf_posenc import export, from_pretrained, get_encoding, list_encodings, patch_model, register_encoding, verify
from hf_posenc.encodings import Alibi, Bias, Rotation, ScoreBias, frequencies
from hf_posenc.errors import CheckpointError, OptionError, OptionTypeError, UnsupportedError
from hf_posenc.registry import ENCODINGS

HOSTS = ("llama", "gpt2", "bloom")


@dataclass(frozen=True, kw_only=True)
class Even(Alibi):
    """The same slope for all heads."""

    name: ClassVar[str] = "even"
    slope: float = 0.1

    def slopes(self, num_heads: int) -> Tensor:
        return torch.full((num_heads,), self.slope)


class Square(ScoreBias):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.001, 0.01, num_heads))

    def curve(self, distance: Tensor) -> Tensor:
        return -self.rate.float().reshape(-1, *[1] * distance.ndim) * distance.float() ** 2


@dataclass(frozen=True, kw_only=True)
class Sq(Bias):
    """A parabola of the distance."""

    name: ClassVar[str] = "sq"

    def module(self, num_heads: int, both_ways: bool = False) -> Square:
        return Square(num_heads)


@dataclass(frozen=True, kw_only=True)
class Broken(Rotation):
    """Frequencies of whatever kind the test wants."""

    name: ClassVar[str] = "broken"
    kind: str = "long"

    def formula(self, dim: int) -> Any:
        inv_freq = frequencies.rope(dim, self.theta)
        return {
            "long": (frequencies.rope(2 * dim, self.theta), 1.0),
            "nan": (inv_freq * float("nan"), 1.0),
            "list": (inv_freq.tolist(), 1.0),
            "factor": (inv_freq, float("inf")),
        }[self.kind]


@pytest.fixture(autouse=True)
def rows() -> Iterator[None]:
    before = dict(ENCODINGS)
    yield
    ENCODINGS.clear()
    ENCODINGS.update(before)


@pytest.mark.parametrize("host", HOSTS)
def test_slopes_of_ones_own(host: str) -> None:
    model, ids = patch_model(tiny_model(host), Even(slope=0.3)), tiny_ids(40)
    report = verify(model, progress=False)
    assert report.passed, report.table()
    assert any("no reference here" in row.detail for row in report.rows)
    steeper = patch_model(tiny_model(host), Even(slope=0.6))
    assert (logits(steeper, ids) - logits(model, ids)).abs().max() > 0.1


@pytest.mark.parametrize("host", HOSTS)
def test_what_only_this_process_knows_is_not_saved(host: str, tmp_path: Path) -> None:
    model = patch_model(tiny_model(host), Sq())
    for save in (model.save_pretrained, lambda folder: hf_posenc.save_pretrained(model, folder)):
        with pytest.raises(CheckpointError, match=r"sq is an encoding that only this process knows.*register_encoding"):
            save(tmp_path / "saved")
        assert not list((tmp_path / "saved").glob("*.safetensors"))


@pytest.mark.parametrize("host", HOSTS)
def test_with_a_row_it_is_saved_and_loaded(host: str, tmp_path: Path) -> None:
    register_encoding(Sq, "a parabola of the distance", "nobody 2026")
    register_encoding(Sq, "a parabola of the distance", "nobody 2026")
    assert list_encodings()[-1].summary == "a parabola of the distance"
    model, ids = patch_model(tiny_model(host), "sq"), tiny_ids(40)
    with torch.no_grad():
        hf_posenc.patching.find_backbone(model)[1].posenc.rate.mul_(3)
    model.save_pretrained(tmp_path / "saved")
    loaded = from_pretrained(tmp_path / "saved")
    assert get_encoding(loaded) == Sq()
    assert_same(logits(loaded, ids), logits(model, ids), 0)
    report = verify(model, progress=False)
    assert {row.name: row.passed for row in report.rows}["save → load"] is True
    with pytest.raises(UnsupportedError, match="sq comes from outside of hf_posenc"):
        export(model, tmp_path / "out")
    del ENCODINGS["sq"]
    with pytest.raises(CheckpointError, match="unknown encoding 'sq'"):
        from_pretrained(tmp_path / "saved")


def test_a_row_is_for_an_encoding_with_a_free_name() -> None:
    class Plain(Sq):
        """No name of its own."""

    for wrong in (Plain, Sq(), int, "sq"):
        with pytest.raises(OptionTypeError, match=r"an encoding is a dataclass|needs a name"):
            register_encoding(wrong)  # type: ignore[arg-type]

    @dataclass(frozen=True, kw_only=True)
    class Taken(Sq):
        name: ClassVar[str] = "alibi"

    with pytest.raises(OptionError, match=r"the name 'alibi' is taken by hf_posenc.encodings"):
        register_encoding(Taken)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("long", r"a frequency for each pair of channels, is \(\d+,\), and must be"),
        ("nan", "holds numbers that are not finite"),
        ("list", "is list, and must be"),
        ("factor", "the factor on cos and sin is inf"),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_a_broken_formula_is_met_before_the_host_is_touched(host: str, kind: str, match: str) -> None:
    model, ids = tiny_model(host), tiny_ids(20)
    want = logits(model, ids)
    given = {} if host == "llama" else {"original_max_position_embeddings": 32}
    with pytest.raises(OptionError, match=match):
        patch_model(model, Broken(kind=kind, **given))
    assert torch.equal(logits(model, ids), want) and get_encoding(model) is None


def test_a_broken_bias_is_met_before_the_host_is_touched() -> None:
    @dataclass(frozen=True, kw_only=True)
    class None_(Bias):
        name: ClassVar[str] = "none_"

    @dataclass(frozen=True, kw_only=True)
    class Other(Bias):
        name: ClassVar[str] = "other"

        def module(self, num_heads: int, both_ways: bool = False) -> Any:
            return nn.Linear(2, 2)

    @dataclass(frozen=True, kw_only=True)
    class Heads(Bias):
        name: ClassVar[str] = "heads"

        def module(self, num_heads: int, both_ways: bool = False) -> Square:
            return Square(num_heads + 1)

    @dataclass(frozen=True, kw_only=True)
    class Slopes(Alibi):
        name: ClassVar[str] = "slopes"

        def slopes(self, num_heads: int) -> Tensor:
            return torch.ones(num_heads + 1)

    for encoding, match in (
        (None_(), "has no module"),
        (Other(), "gives a Linear, and not a ScoreBias"),
        (Heads(), "what its module gives for 4 tokens is"),
        (Slopes(), r"slopes\(\d+\) is"),
    ):
        for host in HOSTS:
            with pytest.raises(OptionError, match=match):
                patch_model(tiny_model(host), encoding)
