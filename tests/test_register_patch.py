"""A patch from outside: registered by hand, or named by the entry point of an installed package."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from hosts import host_model
from pairs import logits
from tiny import LENGTH, VOCAB, tiny_ids
from transformers import AutoConfig, AutoModelForCausalLM

import hf_posenc
from hf_posenc import list_architectures, patch_model, register_patch, support, unpatch_model, verify
from hf_posenc.errors import OptionError, OptionTypeError, UnsupportedError
from hf_posenc.patches import Patch, RotaryHostPatch, _registered, find_patch


class GranitePatch(RotaryHostPatch):
    """Of another package: a decoder like Llama, with scales of its own, of which its layers know."""

    def __init__(self) -> None:
        super().__init__("granite.GraniteModel")


A_PATCH = RotaryHostPatch("granite.GraniteModel")
NO_PATCH = "granite"


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a test install an entry point of the group."""

    def install(name: str, value: str) -> None:
        point = metadata.EntryPoint(name, value, "hf_posenc.patches")
        stock = metadata.entry_points
        found = metadata.EntryPoints([point])
        monkeypatch.setattr(
            metadata, "entry_points", lambda **chosen: found.select(**chosen) if "group" in chosen else stock(**chosen)
        )

    return install


def granite() -> Any:
    config = AutoConfig.for_model(
        "granite",
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def works() -> None:
    """The architecture is in every list, and can be patched, verified and unpatched."""
    assert "granite" in list_architectures() and support("granite", "yarn")
    model = granite()
    before = logits(model, tiny_ids(50))
    for name, options in (("yarn", {"factor": 4}), ("dynamic_yarn", {}), ("alibi", {}), ("sinusoidal", {"scale": 1.0})):
        report = verify(patch_model(model, name, **options), progress=False)
        assert report.passed, report.table()
        assert torch.equal(logits(unpatch_model(model), tiny_ids(50)), before)


@pytest.mark.parametrize("patch", [GranitePatch, GranitePatch(), A_PATCH], ids=["class", "object", "row"])
def test_registered_by_hand(patch: Any) -> None:
    assert "granite" not in list_architectures()
    with pytest.raises(UnsupportedError, match="granite"):
        patch_model(granite(), "yarn", factor=4)
    hf_posenc.register_patch("granite", patch)
    works()


@pytest.mark.parametrize("value", ["test_register_patch:GranitePatch", "test_register_patch:A_PATCH"])
def test_found_by_its_entry_point(value: str, installed: Any) -> None:
    installed("granite", value)
    works()


@pytest.mark.parametrize(
    "value", ["no_such_package:Patch", "test_register_patch:Missing", "test_register_patch:NO_PATCH"]
)
def test_a_broken_entry_point_says_so(value: str, installed: Any) -> None:
    """And harms no other architecture."""
    installed("granite", value)
    with pytest.raises(UnsupportedError, match=value):
        find_patch("granite")
    model = host_model("qwen3")
    assert patch_model(model, "yarn", factor=4) is model


def test_what_is_there_already_is_kept(installed: Any) -> None:
    installed("mistral", "test_register_patch:GranitePatch")
    assert not isinstance(find_patch("mistral"), GranitePatch)
    for taken in ("mistral", "gpt2"):
        with pytest.raises(OptionError, match=taken):
            register_patch(taken, GranitePatch)
    register_patch("granite", GranitePatch)
    with pytest.raises(OptionError, match="granite"):
        register_patch("granite", GranitePatch)


@pytest.mark.parametrize("patch", [None, "granite", GranitePatch.refusal, RotaryHostPatch, dict])
def test_what_is_no_patch(patch: Any) -> None:
    with pytest.raises(OptionTypeError, match="Patch"):
        register_patch("granite", patch)
    with pytest.raises(OptionTypeError, match="model_type"):
        register_patch(None, Patch)  # type: ignore[arg-type]
