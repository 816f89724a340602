"""What a long run will take, said before it starts: forwards, tokens, and the time by a few short forwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError
from hf_posenc.evaluate.limits import reach
from hf_posenc.evaluate.perplexity import token_nll
from hf_posenc.modules import evaluating
from hf_posenc.positions import cache_argument, find_cache

SHARE = 0.02
"""The most that the probes may cost, as a share of the run, in tokens: a token of a longer forward costs more."""
LONGEST_PROBE = 4096
SHORTEST_PROBE = 16
PROBED_STEPS = 4


@dataclass(frozen=True)
class Estimate:
    """A run's size: forwards of many tokens, the tokens in them, steps of one token each, and seconds in all."""

    forwards: int
    tokens: int
    seconds: float
    decode_steps: int = 0


def probe_lengths(forwards: Sequence[int], limit: int | None = None) -> list[int]:
    """Lengths to time before forwards of these lengths: a quarter, a half and the whole of a power of two, ascending.

    It is the largest one that is not above the longest forward, the limit of the model's positions, or 4096, and whose
    three forwards and the one that warms up cost less than 2 % of all tokens. Where that leaves less than 64 tokens,
    there is one probe, of 16 tokens at least if a forward has as many.
    """
    longest = min(max(forwards), limit or max(forwards), LONGEST_PROBE)
    top = int(min(longest, max(SHORTEST_PROBE, SHARE * sum(forwards) / 2)))
    if top < 4 * SHORTEST_PROBE:
        return [max(2, top)]
    top = 1 << (top.bit_length() - 1)
    return [top // 4, top // 2, top]


def fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) of seconds = a·n + b·n², both >= 0: least squares of seconds / n; b = 0 for a single length."""
    n = torch.tensor(lengths, dtype=torch.float64)
    rate = torch.tensor(seconds, dtype=torch.float64) / n
    spread = ((n - n.mean()) ** 2).sum()
    b = float(((n - n.mean()) * (rate - rate.mean())).sum() / spread) if len(lengths) > 1 else 0.0
    b = max(b, 0.0)
    a = float(rate.mean()) - b * float(n.mean())
    # A rate that rises from nothing: the shortest probe alone would be free.
    return (a, b) if a >= 0 else (0.0, float((rate * n).sum() / (n * n).sum()))


def estimate(
    model: Any,
    forwards: Sequence[int],
    *,
    decode_steps: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Estimate:
    """The time of forwards of these lengths, in tokens, and of `decode_steps` steps of one token with a cache.

    Timed are forwards of `probe_lengths`, with all their logits, after one that does not count; time is taken to be
    a·n + b·n² for a forward of n tokens. A step is taken to cost the same at every length of the cache.

    Args:
        model: a causal language model of Transformers, patched as it will be.
        forwards: the length of each forward.
        decode_steps: tokens that will be generated, in all.
        clock: seconds from any point on.

    Raises:
        OptionError: nothing to do, or a forward of fewer than 2 tokens.
    """
    if not forwards or min(forwards) < 2 or decode_steps < 0:
        raise OptionError("an estimate needs forwards of at least 2 tokens each, and decode_steps of 0 or more")
    lengths = probe_lengths(forwards, reach(model))
    ids = torch.randint(0, model.get_input_embeddings().num_embeddings, (1, lengths[-1]))
    now = _clock_of(model, clock)
    token_nll(model, ids[:, : lengths[0]])  # threads and kernels are set up here
    seconds = []
    for length in lengths:
        start = now()
        token_nll(model, ids[:, :length])
        seconds.append(now() - start)
    a, b = fit(lengths, seconds)
    total = sum(a * n + b * n * n for n in forwards)
    if decode_steps:
        total += decode_steps * _step_seconds(model, ids, min(PROBED_STEPS, decode_steps), now)
    return Estimate(len(forwards), sum(forwards), total, decode_steps)


def _clock_of(model: Any, clock: Callable[[], float]) -> Callable[[], float]:
    """The clock, read when the device has done its work."""

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return clock()

    return now


@torch.inference_mode()
def _step_seconds(model: Any, ids: Tensor, steps: int, now: Callable[[], float]) -> float:
    """Seconds of one step behind all but the last of `ids`, (1, n): the least of `steps`, after one more."""
    ids = ids.to(model.device)
    taken = []
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # an adapter's forward names nothing
    name = cache_argument(inner)
    with evaluating(model):
        output = model(input_ids=ids[:, :-1], use_cache=True)
        for _ in range(steps + 1):
            start = now()
            output = model(input_ids=ids[:, -1:], use_cache=True, **{name: find_cache(dict(output))})
            taken.append(now() - start)
    return min(taken[1:])


def duration(seconds: float) -> str:
    """A rough time in words: `12 minutes`, with two figures that mean something."""
    if seconds < 1:
        return "a second"
    sizes = ((1, 90, "second"), (60, 90, "minute"), (3600, 48, "hour"), (86400, math.inf, "day"))
    size, unit = next((size, unit) for size, most, unit in sizes if seconds / size < most)
    count = seconds / size
    shown = f"{count:.2g}" if unit in ("hour", "day") and count < 10 else f"{count:.0f}"
    return f"{shown} {unit}{'' if shown == '1' else 's'}"


def line(made: Estimate) -> str:
    """One line to print before the run: `30 forwards, 225,280 tokens, about 12 minutes on this machine`."""
    steps = f", {made.decode_steps:,} generated" if made.decode_steps else ""
    forwards = f"{made.forwards:,} forward{'' if made.forwards == 1 else 's'}"
    return f"{forwards}, {made.tokens:,} tokens{steps}, about {duration(made.seconds)} on this machine"
