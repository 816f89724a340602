"""A host's pairs of channels, read off its own rotation: a layout that is wrong is found by `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hosts import PRESENT, HostPair
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import patch_model, patches, register_patch, unpatch_model, verify
from hf_posenc.errors import OptionError, OptionTypeError, UnsupportedError
from hf_posenc.patches import RotaryHostPatch, RotaryLayout
from hf_posenc.verification import Verification

TINY = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.3}
LATE = (("dynamic_yarn", {}), ("self_extend", {}), ("rerope", {"window": 20}), ("xpos", {}))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(patches._registered)
    yield
    patches._registered.clear()
    patches._registered.update(before)


def model(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY)).eval()


def row(report: Verification) -> Any:
    return next((one for one in report.rows if one.name == "pairs = the host's"), None)


@pytest.mark.parametrize(("name", "options"), LATE)
@pytest.mark.parametrize(
    ("kind", "backbone", "interleaved"), [("helium", "HeliumModel", True), ("olmo", "OlmoModel", False)]
)
def test_a_wrong_layout_is_found(kind: str, backbone: str, interleaved: bool, name: str, options: Any) -> None:
    for given in (interleaved, not interleaved):
        patches._registered.pop(kind, None)
        register_patch(kind, RotaryHostPatch(f"{kind}.{backbone}", RotaryLayout(interleaved=given)))
        report = verify(patch_model(model(kind), name, **options), progress=False, save=False)
        assert report.passed == (given == interleaved), report.table()
        assert (row(report).figure > 0.3) == (given != interleaved)


@pytest.mark.parametrize("host", PRESENT)
def test_every_layout_of_ours(host: str) -> None:
    """Also in 16 bits; and what turns nothing itself has nothing to be shown."""
    for dtype in (torch.float32, torch.bfloat16):
        patched = patch_model(HostPair(host, "nope").stock().to(dtype), "dynamic_yarn")
        found = row(verify(patched, progress=False, save=False))
        assert found.passed and (found.figure < 1e-5 or dtype == torch.bfloat16)
        unpatch_model(patched)
    assert row(verify(patch_model(HostPair(host, "nope").stock(), "alibi"), progress=False, save=False)) is None


def test_a_layout_that_cannot_be() -> None:
    for field, value in (("interleaved", "yes"), ("start", 5), ("layer_type", 1)):
        with pytest.raises(OptionTypeError, match=f"RotaryLayout: {field} takes"):
            RotaryLayout(**{field: value})
    for field in ("start", "which_layers"):
        patches._registered.pop("olmo", None)
        register_patch("olmo", RotaryHostPatch("olmo.OlmoModel", RotaryLayout(**{field: "nofield"})))
        with pytest.raises(UnsupportedError, match="names 'nofield', and this config has no such field"):
            patch_model(model("olmo"), "yarn", factor=4)
    patches._registered.pop("olmo", None)
    register_patch("olmo", RotaryHostPatch("olmo.OlmoModel", RotaryLayout(layer_type="foo")))
    with pytest.raises(UnsupportedError, match="names"):
        patch_model(model("olmo"), "yarn", factor=4)


@pytest.mark.parametrize("name", ["olmo", "olmo.", "a.b.c", "olmo OlmoModel"])
def test_a_backbone_is_named_by_file_and_class(name: str) -> None:
    with pytest.raises(OptionError, match="is named by file and class"):
        RotaryHostPatch(name)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nonsense.Nothing", "has no Nothing in transformers.models.nonsense"),
        ("olmo.NoSuch", "has no NoSuch in transformers.models.olmo"),
        ("llama.LlamaModel", "the patch of 'olmo' looks for a LlamaModel, and this OlmoForCausalLM holds none"),
    ],
)
def test_a_backbone_that_is_not_there(name: str, match: str) -> None:
    register_patch("olmo", RotaryHostPatch(name))
    with pytest.raises(UnsupportedError, match=match):
        patch_model(model("olmo"), "alibi")
