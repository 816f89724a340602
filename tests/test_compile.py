"""One graph, and no new one a step: static encodings compile wherever the stock model does, with a static cache."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from hosts import PRESENT, host_model
from pairs import assert_same, cache_name
from test_linear_bias import host
from tiny import tiny_ids, tiny_model
from transformers import StaticCache

from hf_posenc import patch_model
from hf_posenc.errors import PosencError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
OTHERS = ("gpt2", "bloom", "mpt", "falcon-alibi", "opt")


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: str) -> None:
        self.count = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.count += 1
        return self.backend(graph, inputs, **options)


@torch.no_grad()
def run(model: Any, backend: str) -> None:
    """A compiled prefill and steps of one static cache give what the model gives, and no step after two a new graph."""
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
    assert 0 < made[2] == made[-1], made


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
    run(patched(name, encoding), "eager")


@pytest.mark.extended
@pytest.mark.parametrize("encoding", ["yarn", "alibi"])
@pytest.mark.parametrize("name", PRESENT)
def test_decoders_compile_where_their_stock_model_does(name: str, encoding: str) -> None:
    try:
        run(stock(name), "eager")
    except Exception as error:  # whatever the compiler cannot take in the host library's own code
        pytest.skip(f"the stock model does not compile: {type(error).__name__}")
    try:
        model = patched(name, encoding)
    except PosencError as error:
        pytest.skip(str(error))
    run(model, "eager")


@pytest.mark.extended
@pytest.mark.parametrize(("name", "encoding"), [("llama-like", "alibi"), ("gpt2", "rope"), ("bloom", "alibi")])
def test_one_graph_with_inductor(name: str, encoding: str) -> None:
    run(patched(name, encoding), "inductor")
