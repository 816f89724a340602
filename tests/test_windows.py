"""Windows over a text: each token scored once, with the context that is promised; nll by position."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_ids, tiny_model
from torch import Tensor, nn

from hf_posenc.errors import OptionError, UnknownNameError
from hf_posenc.evaluate.perplexity import ppl, token_nll, windowed_nll
from hf_posenc.evaluate.windows import bin_edges, by_position, positions_in_window, windows

SHAPES = [
    (n, window, stride)
    for n, window in itertools.product((2, 3, 7, 16, 17, 33), (2, 3, 8, 16, 40))
    for stride in (None, 1, 2, 5, window // 2, window - 1)
    if stride is None or 1 <= stride < window
]


class Uniform(nn.Module):
    """Every token is as likely as any other, whatever stands before it; keeps the sizes of its forwards."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, vocab, bias=False)
        nn.init.zeros_(self.head.weight)
        self.config, self.device = SimpleNamespace(), torch.device("cpu")
        self.shapes: list[tuple[int, ...]] = []

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.head(torch.ones(*input_ids.shape, 4)))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(batch_size: int) -> None:
    for n, window, stride in SHAPES:
        model = Uniform(vocab=53)
        nll = windowed_nll(model, tiny_ids(n) % 53, window=window, stride=stride, batch_size=batch_size)
        assert nll.shape == (n - 1,) and nll.dtype == torch.float32
        assert ppl(nll) == pytest.approx(53, rel=1e-5)
        assert {shape[1] for shape in model.shapes} == {min(n, window)}
        assert sum(shape[0] for shape in model.shapes) == len(windows(n, window, stride))


def test_every_token_is_scored_in_one_window_and_the_last_is_whole() -> None:
    for n, window, stride in SHAPES:
        plan = windows(n, window, stride)
        scored = [token for w in plan for token in range(w.end - w.new, w.end)]
        assert scored == [*range(1, n)]
        assert all(w.end - w.begin == min(n, window) and w.new < window for w in plan)
        assert all(w.new == (stride or window - 1) for w in plan[1:-1])
        assert positions_in_window(n, window, stride).tolist() == [
            token - w.begin + 1 for w in plan for token in range(w.end - w.new, w.end)
        ]


def reference_nll(model: Any, ids: Tensor, window: int, stride: int) -> list[float]:
    """Written out again: for each token the window that is the first to hold it, double precision."""
    found = []
    for token in range(1, len(ids)):
        end = window
        while end <= token:
            end += stride
        end = min(end, len(ids))
        with torch.no_grad():
            logits = model(ids[None, max(0, end - window) : end]).logits[0, token - 1 - max(0, end - window)]
        weights = [math.exp(value) for value in logits.tolist()]
        found.append(-math.log(weights[int(ids[token])] / math.fsum(weights)))
    return found


@pytest.mark.parametrize(("window", "stride"), [(16, 5), (16, 15), (12, 1), (64, 3)])
def test_windows_of_a_real_model_against_a_reference(window: int, stride: int) -> None:
    model, ids = tiny_model("llama"), tiny_ids(45)[0]
    found = windowed_nll(model, ids, window=window, stride=stride)
    again = windowed_nll(model, ids, window=window, stride=stride, batch_size=4, chunk_bytes=3000)
    want = torch.tensor(reference_nll(model.double(), ids, window, stride), dtype=torch.float64)
    assert torch.allclose(found.double(), want, rtol=0, atol=2e-5)
    assert torch.allclose(again, found, rtol=0, atol=2e-5)


def test_one_window_is_one_forward() -> None:
    model, ids = tiny_model("llama"), tiny_ids(20)
    assert torch.equal(windowed_nll(model, ids, window=20, stride=3), token_nll(model, ids))


@pytest.mark.parametrize(
    ("n", "window", "stride", "says"),
    [
        (1, 8, None, "at least 2"),
        (9, 1, None, "window must be a whole number of tokens, at least 2"),
        (9, 4.5, None, "window must be a whole number"),
        (9, 8, 0, "from 1 to 7"),
        (9, 8, 8, "from 1 to 7.*is not scored"),
        (9, 8, 2.0, "whole number"),
        (9, 8, True, "whole number"),
    ],
)
def test_windows_that_are_refused(n: int, window: int, stride: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        windows(n, window, stride)


def test_a_batch_of_no_windows_is_refused() -> None:
    with pytest.raises(OptionError, match="batch_size"):
        windowed_nll(Uniform(5), tiny_ids(9) % 5, window=4, batch_size=0)
    with pytest.raises(OptionError, match="whole number of windows"):
        windowed_nll(Uniform(5), tiny_ids(9) % 5, window=4, batch_size=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tensor of token ids, not list"):
        windowed_nll(Uniform(5), [1, 2, 3], window=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("spacing", ["log", "linear"])
@pytest.mark.parametrize("bins", [1, 3, 16, 1000, [2, 5, 9], [2, 500]])
def test_means_by_position_make_up_the_mean_of_all(bins: Any, spacing: Any) -> None:
    for sizes, window, stride in (([40], None, None), ([40, 23], 16, 5), ([17, 64], 64, 63), ([300], 100, None)):
        texts = [torch.rand(n - 1, generator=torch.Generator().manual_seed(n)) for n in sizes]
        found = by_position(texts, window=window, stride=stride, bins=bins, spacing=spacing)
        places = torch.cat([positions_in_window(n, window or n, stride) for n in sizes])
        edges = [1, *(edge for edge, _ in found)]
        counts = [int(((places > low) & (places <= high)).sum()) for low, high in itertools.pairwise(edges)]
        assert edges == sorted(set(edges)) and edges[-1] >= int(places.max()) and sum(counts) == len(places)
        mean = sum(count * value for count, (_, value) in zip(counts, found)) / len(places)
        assert mean == pytest.approx(float(torch.cat(texts).double().mean()), rel=1e-12)


def test_positions_are_counted_in_the_window() -> None:
    nll = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])  # tokens 2 to 8: the first four at 2 to 5, then two and two of a window
    assert by_position(nll, bins=[2, 3, 4]) == [(2, 1.0), (3, 2.0), (4, 3.0), (8, 5.5)]
    assert by_position(nll, window=4, stride=2, bins=10, spacing="linear") == [(2, 1.0), (3, 4.0), (4, 5.0)]


@pytest.mark.parametrize("last", [2, 3, 10, 243, 1000, 8192, 32768])
def test_edges_of_bins_reach_the_end_exactly(last: int) -> None:
    for bins, spacing in itertools.product((1, 2, 5, 7, 16), ("log", "linear")):
        edges = bin_edges(last, bins, spacing)  # type: ignore[arg-type]
        assert edges[-1] == last and edges[0] >= 2 and len(edges) <= bins and edges == sorted(set(edges))


@pytest.mark.parametrize("bins", [0, [], [1, 5], [5, 5], [9, 3]])
def test_bins_that_are_refused(bins: Any) -> None:
    with pytest.raises(OptionError, match="bins"):
        by_position(torch.ones(5), bins=bins)


def test_nothing_scored_and_an_unknown_spacing_are_refused() -> None:
    with pytest.raises(OptionError, match="no text"):
        by_position([])
    with pytest.raises(UnknownNameError, match="did you mean 'log'"):
        by_position(torch.ones(5), spacing="logs")  # type: ignore[arg-type]
