"""The ways of a linear bias: none makes a tensor of n × n × heads but the reference, and all mean the same."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hosts import host_model
from other_hosts import CONFIGS
from pairs import assert_same, cache_name, difference, logits
from tiny import VOCAB, tiny_ids, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import attention, linear_bias, patch_model
from hf_posenc.errors import UnknownNameError
from hf_posenc.linear_bias import bias_way, flash_adds_slopes, kernel_adds_rows, through_kernel
from hf_posenc.positions import Call

WAYS = ("kernel", "columns", "dense")
N = 192


class Largest(TorchDispatchMode):
    """The most elements that any result of an operation holds in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.untyped_storage().nbytes() // one.element_size())
        return out


def host(name: str) -> Any:
    if name == "deepseek_v3":  # whose values are narrower than its queries
        return host_model(name)
    if name not in ("mpt", "falcon-alibi", "opt"):
        return tiny_model(name)
    model_type, values = CONFIGS[name]
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, initializer_range=0.3, **values)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


HOSTS = ("llama", "gpt2", "bloom", "mpt", "falcon-alibi", "opt")


@pytest.fixture(autouse=True)
def tried() -> Iterator[None]:
    """The kernel's trial is made before anything is watched."""
    kernel_adds_rows(torch.float32)
    yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*HOSTS, "deepseek_v3"])
def test_nothing_of_n_by_n_by_heads(name: str, way: Any) -> None:
    """Forward, backward, padded and a step; the reference shows that such a tensor would be seen."""
    model, ids = patch_model(host(name), "alibi"), tiny_ids(N)
    limit = N * N * 4 - 1  # four heads or six; a mask alike for all heads is no more than N · N
    with bias_way(way), Largest() as seen:
        out = model(input_ids=ids, use_cache=True)
        out.logits.square().mean().backward()
        with torch.no_grad():
            model(input_ids=ids[:, -1:], **{cache_name(model): out[cache_name(model)]})
            mask = torch.ones_like(ids)
            mask[:, :9] = 0
            model(input_ids=ids, attention_mask=mask)
    assert (seen.numel > limit) == (way == "dense")


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("name", HOSTS)
def test_gradients_equal_the_reference(name: str, way: Any) -> None:
    model, ids = patch_model(host(name), "alibi").double(), tiny_ids(70)
    found: dict[str, Any] = {}
    for one in (way, "dense"):
        model.zero_grad()
        with bias_way(one):
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        found[one] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert found[way].keys() == found["dense"].keys()
    for key, grad in found["dense"].items():  # columns are split for 16 bits alone; slopes are float32
        assert (found[way][key] - grad).abs().max() <= 1e-6 * grad.abs().max() + 1e-12, key


def test_the_way_is_checked_and_put_back() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'columns'"), bias_way("colums"):  # type: ignore[arg-type]
        pass
    with bias_way("dense"), bias_way(None):
        assert linear_bias.forced() is None
    assert linear_bias.forced() is None


def test_a_kernel_that_means_another_thing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a release whose kernel drops the mask, or knows no such argument."""
    flash = linear_bias._flash()
    wrong = (lambda *args, attn_mask, scale: flash(*args, scale=scale), lambda *args, scale: flash(*args, scale=scale))
    for kernel in wrong:
        kernel_adds_rows.cache_clear()
        monkeypatch.setattr(linear_bias, "_flash", lambda kernel=kernel: kernel)
        assert not kernel_adds_rows(torch.float32)
        model, ids = patch_model(tiny_model("llama"), "alibi"), tiny_ids(50)
        with bias_way("columns"):
            want = logits(model, ids)
        assert torch.equal(logits(model, ids), want)
    kernel_adds_rows.cache_clear()


def flash_attn(slopes_sign: float, calls: list[int]) -> Callable[..., Tensor]:
    """What flash-attn documents: (batch, n, heads, d), the last query sees the last key, -slope·distance is added."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, alibi_slopes: Tensor
    ) -> Tensor:
        assert q.dtype in (torch.float16, torch.bfloat16) and alibi_slopes.dtype == torch.float32 and causal
        calls.append(q.shape[1])
        query, key, value = (x.transpose(1, 2).double() for x in (q, k, v))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        gap = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None] - torch.arange(key.shape[2])
        scores = query @ key.transpose(2, 3) * softmax_scale + slopes_sign * alibi_slopes[:, None, None] * gap
        return (scores.masked_fill(gap < 0, -torch.inf).softmax(-1) @ value).to(q.dtype).transpose(1, 2)

    return flash_attn_func


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], list[int]]]:
    """Puts a flash-attn in place, for the CPU; gives how many queries each of its calls has had."""

    def put(slopes_sign: float) -> list[int]:
        calls: list[int] = []
        module: Any = ModuleType("flash_attn")
        module.flash_attn_func = flash_attn(slopes_sign, calls)
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        monkeypatch.setattr(linear_bias, "FLASH_DEVICES", ("cpu",))
        flash_adds_slopes.cache_clear()
        return calls

    yield put
    flash_adds_slopes.cache_clear()


@pytest.mark.parametrize("name", HOSTS)
def test_flash_attn_gets_the_slopes(name: str, install: Any) -> None:
    """Prefill, backward and steps where positions go up by one a slot; padded and skipping calls go another way."""
    calls, ids = install(-1.0), tiny_ids(60)
    model = patch_model(host(name), "alibi").bfloat16()

    def gradient() -> Tensor:
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
        return model.get_input_embeddings().weight.grad.float().clone()

    with bias_way("dense"):
        want, slope = logits(model, ids).float(), gradient()
    assert calls == []
    layers = model.config.num_hidden_layers
    with bias_way("flash"):
        found = logits(model, ids).float()
        assert calls[-layers:] == [60] * layers
        assert difference(found, want) < 0.05
        assert (gradient() - slope).norm() < 0.1 * slope.norm()  # 16 bits, through layers of large weights
        out = model(input_ids=ids[:, :-1], use_cache=True)
        before = len(calls)
        last = model(input_ids=ids[:, -1:], **{cache_name(model): out[cache_name(model)]}).logits.detach().float()
        assert calls[before:] == [1] * layers and difference(last, want[:, -1:]) < 0.05
        before = len(calls)
        mask = torch.ones_like(ids)
        mask[:, :9] = 0
        model(input_ids=ids, attention_mask=mask)
        if name != "mpt":  # which takes none
            skips = torch.cat((torch.arange(30), torch.arange(50, 80)))[None]
            model(input_ids=ids, position_ids=skips)
        assert len(calls) == before


def test_flash_attn_that_means_another_thing_is_left_alone(install: Any) -> None:
    calls, ids = install(1.0), tiny_ids(50)
    model = patch_model(tiny_model("llama"), "alibi").bfloat16()
    with bias_way("columns"):
        want = logits(model, ids)
    assert difference(logits(model, ids).float(), want.float()) < 0.05
    assert set(calls) == {5}, "its trial alone"


@pytest.mark.parametrize("way", ["kernel", "columns"])
def test_bfloat16_at_32k_is_no_worse_than_a_float32_bias(way: str) -> None:
    """The last 48 queries of 32,768, against float64; the measure is a float32 bias added to 16-bit scores."""
    n, heads, width, rows = 32768, 4, 32, 48
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, width, generator=generator).bfloat16() for _ in range(3))
    slopes = 2.0 ** -torch.arange(2, 2 * heads + 1, 2)
    distance, scaling = torch.arange(n) - (n - 1), width**-0.5
    bias = slopes[None, :, None, None] * distance.float()
    hidden = torch.arange(n) > torch.arange(n - rows, n)[:, None]
    last = query[:, :, -rows:]
    exact = last.double() @ key.double().transpose(2, 3) * scaling + bias.double()
    want = torch.softmax(exact.masked_fill(hidden, -torch.inf), dim=-1) @ value.double()
    scores = (last @ key.transpose(2, 3) * scaling).float() + bias
    plain = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).bfloat16() @ value
    with torch.inference_mode():
        if way == "kernel":
            short = slice(n - 4096, n)  # flatter slopes than 1/256 would reach further
            found = through_kernel(query[:, :, short], key[:, :, short], value[:, :, short], bias[..., short], scaling)
            found = found[:, -rows:].transpose(1, 2)
        else:
            call = Call(distance[None] + n - 1, distance[None] + n - 1, slopes=slopes)

            def base(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float) -> Any:
                sdpa = torch.nn.functional.scaled_dot_product_attention
                return sdpa(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2), None

            found, _ = attention.biased(base, call, last, key, value, ~hidden[None, None], scaling)
            found = found.transpose(1, 2)
    rms, measure = ((x.double() - want).pow(2).mean().sqrt() for x in (found, plain))
    assert rms <= measure * 1.02


def test_both_ways_of_a_padded_batch_are_one() -> None:
    """Where a mask is needed the kernel gives way to columns."""
    model, ids = patch_model(tiny_model("llama"), "alibi"), tiny_ids(60)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    assert_same(logits(model, ids, attention_mask=mask)[:, 7:], logits(model, ids[:, 7:]))
