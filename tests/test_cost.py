"""The estimate before a run, on a clock that the model's forwards move by a known rule."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tiny import tiny_model

from hf_posenc.errors import OptionError
from hf_posenc.evaluate.cost import Estimate, duration, estimate, fit, line, probe_lengths


class Clock:
    """Stands still but for the forwards of the model that it is hung on: a·n + b·n² each, and `step` for one token."""

    def __init__(self, model: Any, a: float, b: float, step: float = 0.0) -> None:
        self.now = 0.0
        self.lengths: list[int] = []

        def moved(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            n = kwargs["input_ids"].shape[1]
            self.lengths.append(n)
            self.now += a * n + b * n * n if n > 1 else step

        model.register_forward_pre_hook(moved, with_kwargs=True)

    def __call__(self) -> float:
        return self.now


def test_the_time_is_that_of_the_rule_and_the_probes_are_cheap() -> None:
    model = tiny_model("llama")
    clock = Clock(model, a=1e-3, b=2e-7)
    forwards = [2048] * 20 + [12288] * 10
    made = estimate(model, forwards, clock=clock)
    assert (made.forwards, made.tokens) == (30, 163_840)
    assert made.seconds == pytest.approx(sum(1e-3 * n + 2e-7 * n * n for n in forwards), rel=1e-6)
    assert clock.lengths == [256, 256, 512, 1024]
    assert clock.now < 0.02 * made.seconds


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_steps_of_decoding_are_counted_apart(model_type: str) -> None:
    model = tiny_model(model_type)
    clock = Clock(model, a=1e-3, b=0.0, step=0.05)
    made = estimate(model, [30] * 40, decode_steps=1000, clock=clock)
    assert made.seconds == pytest.approx(1.2 + 50)
    assert made.decode_steps == 1000 and clock.lengths.count(1) == 5


def test_on_a_real_clock() -> None:
    made = estimate(tiny_model("llama"), [24, 30])
    assert 0 < made.seconds < 60 and time.perf_counter() > 0


@pytest.mark.parametrize(
    ("forwards", "limit", "want"),
    [
        ([2], None, [2]),
        ([9], None, [9]),
        ([32] * 4, None, [16]),
        ([2048] * 2, None, [40]),
        ([50] * 10_000, None, [50]),
        ([64] * 10_000, None, [16, 32, 64]),
        ([2048] * 4, None, [16, 32, 64]),
        ([8192] * 10, None, [128, 256, 512]),
        ([32768] * 100, None, [1024, 2048, 4096]),
        ([32768] * 100, 1024, [256, 512, 1024]),
        ([32768] * 100, 32, [32]),
    ],
)
def test_probes_for_short_and_long_runs(forwards: list[int], limit: int | None, want: list[int]) -> None:
    assert probe_lengths(forwards, limit) == want
    if len(want) == 3:
        assert sum(want) + want[0] <= 0.02 * sum(forwards)


def test_probes_stay_on_a_models_own_table() -> None:
    made = estimate(tiny_model("gpt2"), [4096] * 100, clock=lambda: 0.0)
    assert made == Estimate(100, 409_600, 0.0)


def test_a_fit_is_never_negative() -> None:
    assert fit([128], [0.5]) == (0.5 / 128, 0.0)
    a, b = fit([128, 256, 512], [0.5, 0.6, 0.7])  # a forward's fixed cost: falling by the token
    assert a > 0 and b == 0
    a, b = fit([100, 200, 400], [0.001, 0.1, 1.0])
    assert a == 0 and b > 0


@pytest.mark.parametrize(("forwards", "steps"), [([], 0), ([1], 0), ([8], -1)])
def test_nothing_to_estimate(forwards: list[int], steps: int) -> None:
    with pytest.raises(OptionError, match="at least 2 tokens"):
        estimate(tiny_model("llama"), forwards, decode_steps=steps)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0.2, "a second"),
        (1.2, "1 second"),
        (85, "85 seconds"),
        (90, "2 minutes"),
        (720, "12 minutes"),
        (5400, "1.5 hours"),
        (3600 * 30, "30 hours"),
        (86400 * 3, "3 days"),
    ],
)
def test_times_in_words(seconds: float, says: str) -> None:
    assert duration(seconds) == says


def test_the_line() -> None:
    assert line(Estimate(30, 225_280, 720)) == "30 forwards, 225,280 tokens, about 12 minutes on this machine"
    assert line(Estimate(1, 64, 0.1, 1000)) == "1 forward, 64 tokens, 1,000 generated, about a second on this machine"
