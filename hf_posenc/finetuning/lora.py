"""What is trained: LoRA on the attention's projections of any architecture, norms, embeddings, trained encodings."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posenc import adapters
from hf_posenc.checkpoint import is_recorded, recorded_with
from hf_posenc.encodings import Learned
from hf_posenc.errors import CheckpointError, OptionError, StateError, unknown
from hf_posenc.modules import quiet_peft
from hf_posenc.patching import find_backbone, get_encoding

from .settings import LoraSettings

PROJECTIONS = (nn.Linear, Conv1D)
HEAD = "lm_head"
OWN = "posenc"
"""The name under which a patch keeps what it trains on a host."""


def attention_projections(model: nn.Module) -> list[str]:
    """Full names of the linear maps in attention modules: Q, K, V and the output projection."""
    attention = {name for name, module in model.named_modules() if "attention" in type(module).__name__.lower()}

    def inside(name: str) -> bool:
        parts = name.split(".")
        return OWN not in parts and any(".".join(parts[:n]) in attention for n in range(1, len(parts)))

    return [name for name, module in model.named_modules() if isinstance(module, PROJECTIONS) and inside(name)]


def norms(model: nn.Module) -> list[str]:
    """Full names of the normalisation layers."""
    return [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))
    ]


def encoding_modules(model: nn.Module) -> list[str]:
    """Full names of the modules that belong to the encoding and are trained: a fresh or a resized position table."""
    own = [name for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == OWN and has_weights(module)]
    encoding = get_encoding(model)
    if own or not isinstance(encoding, Learned):
        return own
    patch, backbone = find_backbone(model)
    table = patch.table(backbone)
    return [name for name, module in model.named_modules() if module is table]


def has_weights(module: nn.Module) -> bool:
    """Whether a module holds parameters, itself or inside."""
    return any(True for _ in module.parameters())


def embeddings(model: Any) -> list[str]:
    """Full names of the token embedding and, where it has weights of its own, of the head."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    chosen = [words] if head is None or head.weight is words.weight else [words, head]
    return [name for name, module in model.named_modules() if any(module is one for one in chosen)]


def find_targets(model: nn.Module, asked: Iterable[str] | None) -> list[str]:
    """Full names of the modules to adapt; `asked` are leaf names or ends of names, as in PEFT.

    Raises `UnknownNameError`, with the nearest names, for one that no linear map of this model has.
    """
    if asked is None:
        found = attention_projections(model)
        if not found:
            raise OptionError("no attention with linear projections was found in this model; name them: lora targets=…")
        return found
    linear = [name for name, module in model.named_modules() if isinstance(module, PROJECTIONS)]
    chosen: list[str] = []
    for target in asked:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matching:
            leaves = sorted({name.rsplit(".", 1)[-1] for name in linear})
            near = difflib.get_close_matches(target, leaves, n=3, cutoff=0.3)
            raise unknown("LoRA target", target, leaves, near=", ".join(near) or None)
        chosen += matching
    return list(dict.fromkeys(chosen))


def add_lora(model: Any, settings: LoraSettings) -> Any:
    """The model with an adapter by `settings`, or with every parameter trained (`full`); patched before, never after.

    Raises `StateError` for a model that could not be found again when its adapter is loaded.
    """
    if settings.full:
        model.requires_grad_(True)
        freeze_silent(model)
        return model
    from peft import LoraConfig, get_peft_model

    if settings.quantize:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    targets = find_targets(model, settings.targets)
    whole = [*(norms(model) if settings.norms else []), *encoding_modules(model)]
    whole += embeddings(model) if settings.embeddings else []
    tie = settings.embeddings and tied(model)
    # PEFT ties what it trains only where a name says so that it knows, and it takes the head's out of its list again
    whole += [HEAD] if tie else []
    base = base_name(model)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a float is a multiplier like any other
        lora_dropout=settings.dropout,
        target_modules=targets,
        modules_to_save=[name for name in dict.fromkeys(whole) if name not in targets] or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        ensure_weight_tying=tie,
        task_type="CAUSAL_LM",
    )
    with quiet_peft():
        adapted = get_peft_model(model, config)
    kept: Any = adapted.peft_config["default"]
    kept.base_model_name_or_path = base
    if tie:
        kept.modules_to_save = sorted({*kept.modules_to_save, HEAD})  # a loader must meet that name, too
    return adapted


def tied(model: Any) -> bool:
    """Whether the head is the token embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def freeze_silent(model: Any) -> None:
    """Keep a position table that is out of play out of the optimizer: DDP would wait for its gradient."""
    from hf_posenc.modules import SilentEmbedding, SinusoidalEmbedding

    for module in model.modules():
        if isinstance(module, SilentEmbedding | SinusoidalEmbedding):
            module.requires_grad_(False)


def base_name(model: Any) -> str:
    """Where the base can be loaded from: a hub id, or the absolute path of its folder."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name:
        raise StateError(
            "this model was loaded from nowhere, so an adapter of it could not be loaded again; save it and load it "
            "with hf_posenc.from_pretrained, or train every parameter (full)"
        )
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def load_adapter(model: Any, folder: str) -> Any:
    """The model with the adapter in `folder`, to be trained on; base and encoding must be those it was made for."""
    path = Path(folder).expanduser()
    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{folder} holds no adapter (adapter_config.json with adapter_model.safetensors)")
    check_encoding(path, get_encoding(model))
    base = adapters.read(path).base_model_name_or_path
    if base and base != base_name(model):
        raise OptionError(f"the adapter in {folder} was made for {base}, not for {base_name(model)}; give that model")
    try:
        return adapters.attach(model, path, is_trainable=True)
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise OptionError(f"the adapter in {folder} does not fit this model: {said:.300}") from error


def check_encoding(adapter: Path, encoding: Any) -> None:
    """Raise `StateError` where an adapter's folder says another encoding than the model's."""
    made_for = recorded_with(adapter) if is_recorded(adapter) else None
    if made_for != encoding:
        raise StateError(
            f"the adapter in {adapter} was trained with {said(made_for)}, and this model has {said(encoding)}; give "
            "the encoding it was trained with, or start a new adapter"
        )


def said(encoding: Any) -> str:
    """An encoding in words."""
    if encoding is None:
        return "the model's own positions"
    return f"{encoding.name} {json.dumps({k: v for k, v in encoding.options().items() if v is not None})}"


def need_quantization() -> None:
    """Raise `OptionError` where 4-bit weights cannot be had."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            "quantize (QLoRA) needs the package bitsandbytes (0.46 or later for a CPU), which is not installed: "
            "pip install 'hf-posenc[quantize]'"
        )
