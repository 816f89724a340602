"""What a run is made of: the Trainer's arguments, the model with its encoding, its identity, what is trained in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hf_posenc.errors import OptionError, StateError, unknown
from hf_posenc.evaluate import loading
from hf_posenc.evaluate.conditions import weights_digest
from hf_posenc.patching import find_backbone, get_encoding, patch_model
from hf_posenc.registry import create

from . import lora
from .settings import Settings

OURS = {
    "output_dir": "it is `out`",
    "remove_unused_columns": "the rows hold positions that some hosts do not name",
    "num_train_epochs": "the data are an endless stream: give steps",
    "resume_from_checkpoint": "a run goes on by itself from its last whole checkpoint",
}
"""Fields of `TrainingArguments` that cannot be given, and why."""


def defaults(settings: Settings) -> dict[str, Any]:
    """What `TrainingArguments` are given where the user said nothing; YaRN's recipe (2309.00071, 4.1): constant rate
    after a warm-up of 20 steps, no weight decay."""
    steps = settings.training.get("max_steps", 200)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps (max_steps)={steps!r}: give a whole number of at least 1")
    rate = settings.training.get("learning_rate", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise OptionError(f"learning_rate={rate!r}: give a number")
    ours = {
        "max_steps": steps,
        "learning_rate": 2e-5 if settings.lora.full else 2e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": min(20, steps // 10),
        "weight_decay": 0.0,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": max(1, min(10, steps // 10)),
        "save_steps": max(1, min(100, steps // 4)),
        "save_total_limit": 2,
        "seed": 42,
        "report_to": "none",
        "include_num_input_tokens_seen": "all",
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # every process reads the same stream and takes its own rows of it
        "accelerator_config": {"dispatch_batches": False},
    }
    return {**ours, **settings.training}


def make_arguments(training: Mapping[str, Any], folder: Path) -> TrainingArguments:
    """`TrainingArguments` of these fields; raises a `PosencError` for one that it does not have or does not take."""
    known = [f.name for f in fields(TrainingArguments) if f.init]
    for key in training:
        if key in OURS:
            raise OptionError(f"training: {key} cannot be given: {OURS[key]}")
        if key not in known:
            raise unknown("training argument", key, known)
    try:
        arguments = TrainingArguments(output_dir=str(folder), remove_unused_columns=False, **training)
        for tracker in get_reporting_integration_callbacks(arguments.report_to):
            tracker()  # one that is not known or not installed says so here, before anything is written
        return arguments
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        raise OptionError(f"training: {' '.join(str(error).split())}") from error


def load(settings: Settings, model: Any, tokenizer: Any) -> tuple[Any, Any, bool]:
    """The model with the encoding asked for, its tokenizer, and whether it was given and has been patched just now."""
    group = dict(settings.encoding)
    name = group.pop("name", None)
    if settings.lora.quantize:
        lora.need_quantization()
    if model is None or isinstance(model, str | Path):
        return load_named(settings, name, group), tokenizer or named_tokenizer(settings), False
    if tokenizer is None:
        raise OptionError("a loaded model needs its tokenizer: finetune(model, tokenizer, ...)")
    if settings.dtype != "auto" or settings.gguf_file:
        raise OptionError("dtype and gguf_file are for a model that is given by name")
    find_backbone(model)
    wanted = None if name is None else create(name, **group)
    patch = wanted is not None and not in_effect(model, wanted)
    if patch:
        patch_model(model, name, **group)
    return model, tokenizer, patch


def named_tokenizer(settings: Settings) -> Any:
    """The tokenizer beside the model."""
    return loading.load_tokenizer(settings.model, gguf_file=settings.gguf_file)


def load_named(settings: Settings, name: str | None, group: dict[str, Any]) -> Any:
    """The model that the settings name, patched."""
    if Path(settings.model, "adapter_config.json").is_file():
        raise OptionError(
            f"{settings.model} is an adapter's folder; give its base as the model and adapter={settings.model}"
        )
    if settings.lora.quantize:
        return load_quantized(settings, name, group)
    place: dict[str, Any] = {"dtype": settings.dtype, "device": "cpu", "gguf_file": settings.gguf_file}
    return loading.load_model(settings.model, encoding=name, options=group or None, **place)


def load_quantized(settings: Settings, name: str | None, group: dict[str, Any]) -> Any:
    """The base in 4 bits (NF4), patched."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import hf_posenc

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    patch: dict[str, Any] = {} if name is None else {"encoding": name, "options": group or None}
    patch |= {"auto_class": AutoModelForCausalLM, "quantization_config": how}
    return hf_posenc.from_pretrained(loading.resolve_model(settings.model), **patch)


def in_effect(model: Any, wanted: Any) -> bool:
    """Whether a model has this encoding already, with every option that was named."""
    now = get_encoding(model)
    if now is None or now.name != wanted.name:
        return False
    return all(now.options()[key] == value for key, value in wanted.options().items() if value is not None)


def identify(model: Any, source: Any) -> dict[str, Any]:
    """What tells this run from another that has the same settings; taken before any weight is trained."""
    encoding = get_encoding(model)
    return {
        "encoding": None if encoding is None else {"name": encoding.name, **record_options(encoding)},
        "base_weights": weights_digest(model),
        "data_bytes": None if source is None else source.size,
    }


def record_options(encoding: Any) -> dict[str, Any]:
    """An encoding's options as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in encoding.options().items()}


def adapt(model: Any, settings: Settings) -> Any:
    """The model with what is to be trained; a `PeftModel` is trained as it is."""
    from peft import PeftModel

    if settings.adapter is not None:
        if settings.lora.full:
            raise OptionError("adapter and full: an adapter is trained on, or every parameter; choose one")
        return lora.load_adapter(model, settings.adapter)
    if isinstance(model, PeftModel):
        return model
    if getattr(model, "peft_config", None):
        raise StateError(
            "this model has an adapter in it already; give the PeftModel around it (the `model` of an earlier result) "
            "to go on with that adapter, or load the base anew"
        )
    return lora.add_lora(model, settings.lora)
