"""Perplexity and tasks before, during and after training, through `hf_posenc.evaluate`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from hf_posenc.errors import OptionError, ReachError
from hf_posenc.eval_tasks.tasks import documents
from hf_posenc.evaluate.limits import reach
from hf_posenc.evaluate.perplexity import check_reach, ppl, token_nll
from hf_posenc.evaluate.stream import TextSource
from hf_posenc.modules import evaluating

from .settings import EvaluationSettings


@contextmanager
def in_own_precision(model: Any) -> Iterator[None]:
    """Without the autocast that accelerate puts around a model's forward for bf16 and fp16 training."""
    wrapped = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            model.forward = wrapped


@dataclass
class Measurement:
    """Figures at one step: {length: perplexity of its first `length` tokens}, {task: {length: score}}."""

    step: int
    perplexity: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Measure(TrainerCallback):
    """A callback that measures at the start, every `every` steps, and at the end; on the first process alone."""

    settings: EvaluationSettings
    tokenizer: Any
    ids: Tensor | None = None
    done: list[Measurement] = field(default_factory=list)
    seconds: float = 0.0
    """Spent on measuring, which is no part of the training's speed."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, settings: EvaluationSettings) -> Measure | None:
        """The callback, None where nothing is asked for; all that is wrong is met here, before any training."""
        if not settings.lengths:
            return None
        longest = settings.lengths[-1]
        check_reach(model, longest)
        end = reach(model)
        if end is not None and longest > end:
            raise ReachError(f"evaluation: length {longest}, but the model's positions end at {end}")
        if settings.tasks:
            from hf_posenc.evaluate.task_plan import need_lm_eval

            need_lm_eval()
            for name in settings.tasks:  # a name that is not known, a length that has no room for it
                documents(name, tokenizer, settings.lengths[0], num_samples=1, cache=False)
        ids = None
        if settings.text is not None:
            ids = TextSource(Path(settings.text).expanduser()).tokens(tokenizer, longest)
            if len(ids) < longest:
                raise OptionError(
                    f"evaluation: {settings.text} has {len(ids)} tokens; the longest length needs {longest}"
                )
        return cls(settings, tokenizer, ids)

    def now(self, model: Any, step: int) -> Measurement:
        """Measure, and keep the result."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # the adapter's layers are in it
        made, start = Measurement(step), time.perf_counter()
        with evaluating(inner), in_own_precision(inner):
            if self.ids is not None:
                made.perplexity = {str(n): ppl(token_nll(inner, self.ids[:n])) for n in self.settings.lengths}
            if self.settings.tasks:
                made.tasks = self.score(inner)
        self.done = [old for old in self.done if old.step != step] + [made]
        self.seconds += time.perf_counter() - start
        return made

    def score(self, model: Any) -> dict[str, dict[str, float]]:
        """The tasks' scores, 0 to 1."""
        from hf_posenc.evaluate.run_tasks import run_tasks

        found = run_tasks(
            model,
            list(self.settings.tasks),
            self.settings.lengths,
            tokenizer=self.tokenizer,
            num_samples=self.settings.num_samples,
            bars=False,
        )
        assert found is not None
        return {name: {str(n): score for n, score in scores.acc.items()} for name, scores in found.tasks.items()}

    def take_up(self, file: Path, step: int) -> None:
        """What an earlier part of the same run has measured up to `step`."""
        if file.is_file():
            rows = json.loads(file.read_text(encoding="utf-8")).get("evaluations", [])
            self.done = [Measurement(**row) for row in rows if row["step"] <= step]

    def at(self, args: Any, state: Any, model: Any) -> None:
        """Measure on the first process, while the others wait."""
        if state.is_world_process_zero and all(old.step != state.global_step for old in self.done):
            made = self.now(model, state.global_step)
            print(f"step {made.step}: perplexity {made.perplexity} {made.tasks or ''}".rstrip(), flush=True)
        if args.world_size > 1:
            import torch

            torch.distributed.barrier()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the first step."""
        if state.global_step == 0:
            self.at(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """On the way, and after the last."""
        every = self.settings.every
        if state.global_step >= state.max_steps or (every is not None and state.global_step % every == 0):
            self.at(args, state, model)
