"""`finetune`: from a model, a text and settings to a folder that `hf_posenc.from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers import TrainerState, set_seed

from hf_posenc.errors import OptionError, StateError
from hf_posenc.patching import unpatch_model
from hf_posenc.registry import create

from . import checkpoints, limits, output
from .collator import Collator
from .measure import Measure
from .output import FinetuneResult
from .prepare import adapt, defaults, identify, load, make_arguments
from .settings import FILE, DataSettings, EvaluationSettings, LoraSettings, Settings, write_settings
from .shifted import check_groups, grouped
from .sources import open_source
from .trainer import PosencTrainer, StopOnSignal, peak_mib
from .windows import Windows


def finetune(
    model: Any,
    tokenizer: Any = None,
    dataset: Any = None,
    *,
    out: str | os.PathLike[str],
    max_length: int | None = None,
    steps: int | None = None,
    encoding: str | None = None,
    options: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | DataSettings | None = None,
    lora: Mapping[str, Any] | LoraSettings | None = None,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | EvaluationSettings | None = None,
    adapter: str | None = None,
    merge: bool = False,
    shifted_group: int | None = None,
    restart: bool = False,
    chunked_loss: bool = True,
    callbacks: Iterable[Any] = (),
    **place: Any,
) -> FinetuneResult:
    """Fine-tune a patched model briefly, and save adapter or weights with the record of its encoding.

    A run that was stopped goes on from its last whole checkpoint: call it again with the same arguments.

    Args:
        model: a loaded causal language model (patched, or to be patched by `encoding`), or what names one: a folder, a
            hub id, `demo:llama`.
        tokenizer: its tokenizer; may be left out when `model` is a name.
        dataset: texts, a `datasets` object, or names: a text file, JSON lines, a folder, a data set, `task:passkey`.
        out: the folder for adapter or weights, checkpoints, finetune.yaml and results.json.
        max_length: tokens of a window (`data["max_length"]`); steps: optimizer steps (200; `training["max_steps"]`).
        encoding, options: put in before training; by default what the model has.
        data, lora, training, evaluation: the groups of `settings`; `training` takes every field of `TrainingArguments`.
        adapter: a folder to go on from; base and encoding must be those it was made for.
        merge: write `out/merged` too, a model that loads alone.
        shifted_group: train with attention within groups of so many tokens, half of the heads' shifted (LongLoRA).
        restart: delete the folder's checkpoints and begin anew.
        chunked_loss: False computes the loss as the model does, with all logits.
        callbacks: more `TrainerCallback`s.
        place: dtype, gguf_file of a named model.

    Raises:
        PosencError: a setting, the data or the model is not as it must be (nothing has been trained by then); a loss
            that is no number; a disk that is full.
        KeyboardInterrupt: on SIGINT or SIGTERM, after a checkpoint was saved.
    """
    texts, named = split_dataset(dataset, data)
    values: dict[str, Any] = {"data": named, "adapter": adapter, "merge": merge, "evaluation": evaluation, "lora": lora}
    values["shifted_group"] = shifted_group
    if max_length is not None:
        values["data"] = {**values["data"], "max_length": max_length}
    values["training"] = {**(training or {}), **({} if steps is None else {"max_steps": steps})}
    values["encoding"] = encoding_group(encoding, options)
    values["model"] = str(model) if isinstance(model, str | Path) else ""
    settings = Settings.of(values | place)
    return run(settings, model, tokenizer, texts, out=out, restart=restart, chunked=chunked_loss, callbacks=callbacks)


def split_dataset(dataset: Any, data: Mapping[str, Any] | DataSettings | None) -> tuple[Any, dict[str, Any]]:
    """An object to read texts from, or None where there are names; and the data group with those names in it."""
    group = dict(data) if isinstance(data, Mapping) else {}
    if isinstance(data, DataSettings):
        group = {f.name: getattr(data, f.name) for f in fields(data)}
    if isinstance(dataset, str | Path):
        return None, {**group, "source": (str(dataset),)}
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(item, Path) for item in dataset):
        return None, {**group, "source": tuple(map(str, dataset))}
    return dataset, group


def encoding_group(encoding: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The encoding as a settings file has it: its name and its options on one level."""
    if encoding is None:
        if options:
            raise OptionError("options=… go with encoding='name'")
        return {}
    create(encoding, **(options or {}))
    return {"name": encoding, **(options or {})}


def run(
    settings: Settings,
    model: Any = None,
    tokenizer: Any = None,
    texts: Any = None,
    *,
    out: str | os.PathLike[str],
    restart: bool = False,
    chunked: bool = True,
    callbacks: Iterable[Any] = (),
) -> FinetuneResult:
    """As `finetune`, with the settings in one piece; `model` None loads `settings.model`."""
    with output.leaves_nothing(os.fspath(out)):
        return prepare_and_train(settings, model, tokenizer, texts, out, restart, chunked, callbacks)


def prepare_and_train(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    texts: Any,
    out: str | os.PathLike[str],
    restart: bool,
    chunked: bool,
    callbacks: Iterable[Any],
) -> FinetuneResult:
    """`run`; all that can be refused is refused before anything is written."""
    if settings.merge and settings.lora.full:
        raise OptionError("merge with full: every weight is trained and saved as it is, there is no adapter to merge")
    settings = replace(settings, training=defaults(settings))
    folder = output.prepare(os.fspath(out))
    arguments = make_arguments(settings.training, folder)
    source = None if settings.data.mode == "task" else open_source(texts, settings.data)
    model, tokenizer, patched = load(settings, model, tokenizer)
    try:
        target = limits.check_lengths(model, settings.data)
        limits.check_positions(model, settings.data)
        limits.refuse_context_parallel(model, arguments, settings.data)
        check_groups(model, settings)
        windows = Windows(source, tokenizer, settings.data, arguments.data_seed or arguments.seed, target)
        next(iter(windows))  # no text, one that is too short, a column that is missing: met before anything is written
        measure = Measure.of(model, tokenizer, settings.evaluation)
        limits.refuse_sharded(arguments, measured=measure is not None)
        identity = identify(model, source)
        refuse(folder, settings, identity, restart=restart)
        set_seed(arguments.seed)  # an adapter begins at random: a run begun again must begin alike
        adapted = adapt(model, settings)
    except BaseException:
        if patched:  # the caller's own model: as it was
            unpatch_model(model)
        raise
    if arguments.should_save:
        begin(folder, settings, identity, restart=restart)
    whole = None if restart else checkpoints.last_whole(folder)
    trainer = PosencTrainer(
        model=adapted,
        args=arguments,
        train_dataset=windows,
        data_collator=Collator(tokenizer.pad_token_id or tokenizer.eos_token_id or 0),
        processing_class=tokenizer,
        callbacks=[*([measure] if measure else []), stop := StopOnSignal(), *callbacks],
        chunked=chunked,
    )
    if measure is not None and whole is not None:
        measure.take_up(folder / output.RESULTS, whole[0])
    with grouped(adapted, settings.shifted_group):
        train(trainer, stop, whole, settings, folder, measure)
    return finish(trainer, settings, folder, tokenizer, measure)


def refuse(folder: Path, settings: Settings, identity: dict[str, Any], *, restart: bool) -> None:
    """Raise `StateError` where the folder holds another run, which this one would not go on with."""
    if restart:
        return
    if (folder / FILE).is_file():
        checkpoints.refuse_changes(folder, settings, identity)
    elif checkpoints.numbered(folder):
        raise StateError(
            f"{folder} holds checkpoints of another program (no {FILE}); give another folder, or --restart"
        )


def begin(folder: Path, settings: Settings, identity: dict[str, Any], *, restart: bool) -> None:
    """Write down what the run is, and clear away what it cannot go on from."""
    if restart:
        checkpoints.remove_all(folder)
        (folder / output.RESULTS).unlink(missing_ok=True)
    for name in checkpoints.remove_broken(folder):
        print(f"{name} was not written to its end, and is removed")
    shutil.rmtree(folder / output.MERGED, ignore_errors=True)  # an earlier part's, which more training would belie
    write_settings(settings, folder)
    checkpoints.write_identity(folder, identity)


def train(
    trainer: PosencTrainer,
    stop: StopOnSignal,
    whole: tuple[int, Path] | None,
    settings: Settings,
    folder: Path,
    measure: Measure | None,
) -> None:
    """The Trainer's loop; raises `KeyboardInterrupt`, with what to do, where a signal ended it early."""
    if whole is not None and whole[0] >= trainer.args.max_steps:
        print(f"{whole[1].name} is the end of this run: nothing is left to train")
        trainer._load_from_checkpoint(str(whole[1]))
        trainer.state = TrainerState.load_from_json(str(whole[1] / checkpoints.STATE))
        return
    if whole is not None and trainer.args.should_save:
        print(f"going on from {whole[1].name}")
    with stop.listening():
        trainer.train(resume_from_checkpoint=str(whole[1]) if whole else None)
    if stop.stopped:
        if trainer.args.should_save:
            output.write_results(result_of(trainer, folder, measure), settings)
        raise KeyboardInterrupt(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}, saved as "
            f"{folder}/checkpoint-{trainer.state.global_step}; the same command again goes on from there"
        )


def result_of(trainer: PosencTrainer, folder: Path, measure: Measure | None) -> FinetuneResult:
    """The figures of a run, from the Trainer's own log."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    history: list[Any] = trainer.state.log_history
    [seconds] = [row["train_runtime"] for row in history[-1:] if "train_runtime" in row] or [0.0]
    seconds -= 0.0 if measure is None else measure.seconds
    tokens = trainer.state.num_input_tokens_seen - getattr(trainer, "_initial_num_input_tokens_seen", 0)
    return FinetuneResult(
        model=model,
        folder=folder,
        steps=trainer.state.global_step,
        losses={row["step"]: row["loss"] for row in history if "loss" in row},
        tokens_per_second=tokens / seconds if tokens and seconds > 0 else None,
        peak_memory_mib=peak_mib(),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        evaluations=[] if measure is None else measure.done,
    )


def finish(
    trainer: PosencTrainer, settings: Settings, folder: Path, tokenizer: Any, measure: Measure | None
) -> FinetuneResult:
    """Save what was trained, merge where asked, write the figures."""
    if trainer.chunked is not None:
        trainer.chunked.remove()
    trainer.save_model(str(folder))
    result = result_of(trainer, folder, measure)
    if trainer.args.should_save:
        if settings.merge and not settings.lora.full:
            how = {"gguf_file": settings.gguf_file} if settings.gguf_file else {}
            result.merged = output.merge(folder, tokenizer, **how)
        output.write_results(result, settings)
    trainer.accelerator.wait_for_everyone()
    return result
