"""One graph, and no new one a step: static encodings compile wherever the stock model does, with a static cache."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from hosts import NOT_HELD, PRESENT, host_model
from pairs import assert_same, cache_name
from test_linear_bias import host
from tiny import tiny_ids, tiny_model
from transformers import StaticCache

from hf_posenc import patch_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
OTHERS = ("gpt2", "bloom", "mpt", "falcon-alibi", "opt")
SLIDING = ("mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "starcoder2", "gpt_oss")


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: str) -> None:
        self.count = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.count += 1
        return self.backend(graph, inputs, **options)


@torch.no_grad()
def graphs_of(model: Any, backend: str) -> list[int]:
    """How many graphs there are after a prefill and after each step of one static cache; all give what the model gives.

    Each call is one whole graph, or the compiler raises.
    """
    torch._dynamo.reset()
    ids, graphs, made = tiny_ids(14), Graphs(backend), []
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
    caches = [StaticCache(config=model.config, max_cache_len=24) for _ in range(2)]
    for start, end in ((0, 10), *((k, k + 1) for k in range(10, 14))):
        inputs: dict[str, Any] = {"input_ids": ids[:, start:end], "use_cache": True}
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            inputs["position_ids"] = torch.arange(start, end)[None]
        want, got = (
            forward(**inputs, **{cache_name(model): cache}).logits for forward, cache in zip((model, compiled), caches)
        )
        assert_same(got, want, 1e-4 if backend == "inductor" else 1e-5)
        made.append(graphs.count)
    torch._dynamo.reset()
    return made


def no_new_one_a_step(made: list[int]) -> bool:
    return 0 < made[2] == made[-1]


def pairs(hosts: tuple[str, ...]) -> list[Any]:
    quick = {("llama-like", "alibi"), ("llama-like", "yarn"), ("gpt2", "rope"), ("bloom", "alibi")}
    found = []
    for name, encoding in itertools.product(hosts, ("yarn", "alibi", "rope", "nope")):
        marks = () if (name, encoding) in quick else (pytest.mark.extended,)
        found.append(pytest.param(name, encoding, marks=marks))
    return found


def stock(name: str) -> Any:
    if name in OTHERS:
        return host(name)
    return tiny_model("llama") if name == "llama-like" else host_model(name)


def patched(name: str, encoding: str) -> Any:
    scaled = {"factor": 4, "original_max_position_embeddings": 32} if encoding == "yarn" else {}
    return patch_model(stock(name), encoding, **scaled)


@pytest.mark.parametrize(("name", "encoding"), pairs(("llama-like", *OTHERS)))
def test_one_graph_with_the_eager_backend(name: str, encoding: str) -> None:
    assert no_new_one_a_step(graphs_of(patched(name, encoding), "eager"))


ON_DECODERS = [(name, e) for name in PRESENT for e in ("yarn", "alibi") if (name, e) not in NOT_HELD]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "encoding"), ON_DECODERS)
def test_decoders_make_no_more_graphs_than_their_stock_model(name: str, encoding: str) -> None:
    """A static cache with a sliding window counts its tokens in Python, so that a stock model has a graph a step."""
    own, made = (graphs_of(model, "eager") for model in (stock(name), patched(name, encoding)))
    assert all(a <= b for a, b in zip(made, own)), (made, own)
    assert no_new_one_a_step(own) is (name not in SLIDING)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "encoding"), [("llama-like", "alibi"), ("gpt2", "rope"), ("bloom", "alibi")])
def test_one_graph_with_inductor(name: str, encoding: str) -> None:
    assert no_new_one_a_step(graphs_of(patched(name, encoding), "inductor"))
