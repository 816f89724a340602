"""A patch is applied whole or not at all, and ALiBi never makes a tensor of heads × n × n."""

from typing import Any

import pytest
import snapshots
import torch
from hosts import ROPE_HOSTS
from other_hosts import CONFIGS
from pairs import HOSTS, LENGTH, PAIRS, Pair, cache_name, logits
from refusals import assert_refused
from tiny import tiny_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_posenc import PosencError, get_encoding, patch_model
from hf_posenc.encodings import Encoding, Yarn
from hf_posenc.patches import PATCHES, find_patch

ERRORS = [AssertionError("no effect"), KeyboardInterrupt(), PosencError("no"), RuntimeError("out of memory")]


@pytest.mark.parametrize(("pair", "error"), [(p, ERRORS[i % 4]) for i, p in enumerate(PAIRS)], ids=str)
def test_a_failed_proof_rolls_back(pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair.stock()
    was, want = snapshots.of_model(model), logits(model, tiny_ids(LENGTH))

    def fail(*_: Any) -> None:
        assert snapshots.of_model(model) != was, "the proof is made on the changed model"
        raise error

    monkeypatch.setattr(type(find_patch(pair.host)), "prove", fail)
    with pytest.raises(type(error)):
        patch_model(model, pair.name, **pair.options)
    monkeypatch.undo()
    assert snapshots.of_model(model) == was and get_encoding(model) is None
    assert torch.equal(logits(model, tiny_ids(LENGTH)), want)
    pair.put_into(model)
    assert torch.equal(logits(model, tiny_ids(70)), logits(pair.patched(), tiny_ids(70)))


def test_an_encoding_that_lies_is_found_out() -> None:
    """The proof compares the host's frequencies with the encoding's own formula."""

    class Broken(Yarn):
        name = "yarn"

        def inv_freq(self, dim: int) -> Any:
            inv_freq, scale = super().inv_freq(dim)
            return inv_freq * 1.01, scale

    model = tiny_model("llama")
    assert_refused(AssertionError, "differ|put back", lambda: patch_model(model, Broken(factor=4)), model)


def test_every_patch_is_in_the_table() -> None:
    tested = {*HOSTS, *ROPE_HOSTS, *(model_type for model_type, _ in CONFIGS.values())}
    assert set(PATCHES) == tested
    assert isinstance(get_encoding(patch_model(tiny_model("llama"), "nope")), Encoding)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation gave out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.elements:
                # a view that repeats its elements takes no memory
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, min(held, tensor.numel()))
        return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("host", HOSTS)
def test_alibi_never_makes_a_bias_of_heads_by_n_by_n(host: str, padded: bool) -> None:
    n, heads = 512, 4
    model, ids = patch_model(tiny_model(host), "alibi"), tiny_ids(n)
    mask = (torch.arange(n + 1) >= 100 * padded).long()[None]
    with torch.no_grad(), LargestTensor() as forward:
        out = model(input_ids=ids, attention_mask=mask[:, :n], use_cache=True)
    with torch.no_grad(), LargestTensor() as step:
        model(input_ids=ids[:, :1], attention_mask=mask, use_cache=True, **{cache_name(model): out[cache_name(model)]})
    assert forward.elements < heads * n * n, "no mask for every head"
    assert step.elements < 4 * n * 64
    if not padded:
        assert forward.elements < n * n, "no mask at all"
