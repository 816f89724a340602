"""What encodings of another distance cost, and what they are good for."""

from typing import Any

import pytest
import torch
from pairs import Pair, cache_name
from test_distance import every_distance, resolved
from tiny import tiny_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hf_posenc.views
from hf_posenc import patched
from hf_posenc.demo import model_path
from hf_posenc.demo.train import tail_perplexity
from hf_posenc.encodings import Distance


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything returned."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@every_distance
def test_no_tensor_of_all_pairs(pair: Pair, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 times the block: every tensor grows with the tokens alone, backward and in a decode step, too."""
    monkeypatch.setattr(hf_posenc.views, "VIEW_BLOCK", 16)
    n, model = 640, pair.patched(num_hidden_layers=1)
    ids = tiny_ids(n)
    with Largest() as seen_sizes, torch.set_grad_enabled(grad):
        out = model(input_ids=ids, use_cache=not grad, labels=ids if grad else None)
        if grad:
            out.loss.backward()
        else:
            model(input_ids=ids[:, :1], **{cache_name(model): out[cache_name(model)]})
    assert seen_sizes.size < n * n / 3


@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend", "dual_chunk"])
def test_a_decode_step_turns_few_keys(name: str) -> None:
    """Those beyond the border are used as they lie in the cache."""
    encoding: Distance = resolved(name, 4096)
    queries, keys = torch.tensor([[20_000]]), torch.arange(20_001)[None]
    views = hf_posenc.views.describe(encoding, 16, queries, keys, 20_000, stored=encoding.stored)
    border = encoding.border()
    assert border is not None
    assert views.alone and 20_000 - views.keys[0].first < 2 * border


def test_most_keys_of_a_block_need_no_mask() -> None:
    """A prefill of 4096 with a window of 256: all but the borders of a block are in one view."""
    encoding, at = resolved("rerope", 1024), torch.arange(4096)[None]
    views = hf_posenc.views.describe(encoding, 16, at, at, 0)
    keys = sum((block.end - block.start) * (part.end - part.start) for block in views.blocks for part in block.parts)
    masked = sum((block.end - block.start) * (part.end - part.sure) for block in views.blocks for part in block.parts)
    pairs = 4096 * 4097 / 2
    assert keys < 1.2 * pairs and masked < 0.4 * pairs


# --- what it is good for ---------------------------------------------------------------------------------------------

UNTRAINED = [
    ("rerope", {}, 1.6),
    ("leaky_rerope", {}, 1.4),
    ("self_extend", {}, 1.4),
    ("dual_chunk", {}, 1.4),
]


@pytest.mark.parametrize(("name", "options", "most"), UNTRAINED, ids=lambda value: str(value)[:12])
def test_perplexity_at_four_times_the_trained_length(name: str, options: dict[str, Any], most: float) -> None:
    """Without training, of a model that knows 256 positions, and at its own length no worse; unpatched it has 9.3."""
    model = AutoModelForCausalLM.from_pretrained(model_path("llama")).eval()
    with patched(model, name, **options):
        assert tail_perplexity(model, 1024) < most
        assert tail_perplexity(model, 256) < 1.35
