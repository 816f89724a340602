"""`transformers.Trainer`, changed only where it must be: the loss, what is saved, what stops it, what it logs."""

from __future__ import annotations

import math
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from hf_posenc.checkpoint import save_pretrained
from hf_posenc.errors import CheckpointError, DivergedError

from .checkpoints import last_whole
from .chunked_loss import ChunkedLoss

FULL_DISK = ("no space left", "disk quota", "file too large", "write failed", "failed writing", "unexpected pos")


class PosencTrainer(Trainer):
    """The Trainer with a loss in chunks, safetensors and a record in every checkpoint, and an end where a loss is NaN.

    `chunked=False` computes the loss as the model does.
    """

    def __init__(self, *args: Any, chunked: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = not chunked or self.args.n_gpu > 1 or self.label_smoother is not None or self.get_cp_size() > 1
        self.chunked = None if plain else ChunkedLoss(self.model)

    @property
    def folder(self) -> Path:
        """Where checkpoints go."""
        return Path(str(self.args.output_dir))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the step's labels, -Σ log p / N, as the Trainer's own, without logits of all positions."""
        if self.chunked is None or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels: Tensor = inputs.pop("labels")
        with self.chunked.of(labels) as kept:
            outputs = model(**inputs)
            assert kept.total is not None, "the head was not run"
            total = kept.total
        count = (labels[:, 1:] != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        # the last position's logits: FSDP2 starts its backward pass at what a forward returned
        loss = total / count + 0.0 * outputs.logits.float().sum()
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        self.loss_is_scaled_for_ga = num_items_in_batch is not None
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One forward and backward; raises `DivergedError` where the loss is no number."""
        loss = super().training_step(*args, **kwargs)
        if not math.isfinite(value := float(loss)):
            at = self.state.global_step + 1
            whole = last_whole(self.folder)
            kept = f"the last whole checkpoint is {whole[1].name}" if whole else "no checkpoint had been written"
            raise DivergedError(
                f"the loss is {value} at step {at}, so training was stopped before the weights took it in; {kept}. A "
                f"lower learning_rate (now {self._get_learning_rate():g}), more warmup_steps or bf16 "
                "instead of fp16 may help"
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer, with the highest memory so far."""
        super().log({**logs, "peak_memory_mib": round(peak_mib(), 1)}, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights as safetensors, the record of the encoding, the tokenizer; no pickled arguments."""
        if not self.args.should_save:
            return
        folder = output_dir or str(self.folder)
        given = {} if state_dict is None else {"state_dict": state_dict}
        save_pretrained(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), folder, **given)
        tokenizer: Any = self.processing_class
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """As the Trainer; the state file that says "whole" is written only after every process has done this."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the Trainer; what could not be written in whole is removed, and said."""
        folder = self.folder
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:
            said = " ".join(str(error).split())
            if not isinstance(error, OSError) and not any(mark in said.lower() for mark in FULL_DISK):
                raise
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(folder / name, ignore_errors=True)
            whole = last_whole(folder)
            kept = f"the last whole one is {whole[1].name}" if whole else "there is no earlier one"
            raise CheckpointError(
                f"{name} could not be written to {folder}: {said:.200}; {kept}. Make room, and give the same "
                "command again"
            ) from error


def peak_mib() -> float:
    """The highest memory of this process so far, in MiB: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class StopOnSignal(TrainerCallback):
    """Lets the step at hand end, saves a checkpoint, and stops; every process of a run stops at the same step."""

    def __init__(self) -> None:
        self.asked = False
        self.stopped = False

    def ask(self, number: int, _frame: Any) -> None:
        """The handler: a first signal waits for the step, a second does not."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(
            f"\n{signal.Signals(number).name}: a checkpoint is saved after this step; once more stops at once",
            flush=True,
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGINT and SIGTERM are this object's for the block; outside of the main thread nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end, where any process was told to."""
        asked = self.asked
        if args.world_size > 1:
            flag = torch.tensor(float(asked), device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            asked = bool(flag)
        if asked and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True
