"""The API: join one encoding to one patch, as a transaction that can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from . import adapters, record
from .auto import register_loaders
from .encodings import Encoding
from .encodings.sound import check_sound
from .errors import EffectError, PosencError, StateError, UnsupportedError, unknown
from .ledger import Ledger
from .marking import write_marked
from .offload import in_a_data_parallel_wrap
from .patches import Patch, find_patch, has_patch, list_architectures
from .registry import ENCODINGS, create
from .versions import warn_of_unknown

M = TypeVar("M", bound=nn.Module)

_STATE = "_posenc_state"


@dataclass
class PatchState:
    """What a patched backbone carries: its encoding, and how to take it out again."""

    encoding: Encoding
    ledger: Ledger
    config: dict[str, Any]  # what the model's own config said right after the patch
    resized_on_disk: bool = False


@dataclass(frozen=True)
class Support:
    """Whether an encoding can go into an architecture, and why not; true in a boolean sense when it can."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def find_backbone(model: nn.Module) -> tuple[Patch, Any]:
    """The patch for a model and the module in it that holds embeddings and layers; looks inside PEFT's wrappers.

    Raises `UnsupportedError`, with the list of what is supported, for any other model.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"expected a loaded Transformers model, got {model!r:.80} ({type(model).__name__}); load it first, e.g. "
            "with AutoModelForCausalLM.from_pretrained, or use hf_posenc.from_pretrained"
        )
    patches: dict[Any, Patch | None] = {}  # asked for once a type: the list of installed packages is read for it
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if model_type not in patches:
            patches[model_type] = find_patch(model_type) if has_patch(model_type) else None
        patch = patches[model_type]
        if patch is not None and isinstance(module, patch.backbone_type()):
            return patch, module
    found = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if patches.get(found) is not None:
        wanted = patches[found].backbone_type()  # type: ignore[union-attr]
        raise UnsupportedError(
            f"the patch of {found!r} looks for a {wanted.__name__}, and this {type(model).__name__} holds none"
        )
    raise UnsupportedError(f"no patch for the architecture {found!r}; supported: {', '.join(list_architectures())}")


def patch_model(model: M, encoding: str | Encoding, /, **options: Any) -> M:
    """Replace the position encoding of a loaded model, in place, and return it.

    `encoding` is a name (`hf_posenc.list_encodings()`) with its options, or an `Encoding`. Everything is checked
    before anything is touched; the change is applied through an undo ledger, proved, and rolled back if the proof
    fails. No weight is copied or changed, and no class or module of Transformers is written to. Give the model that you
    will save: a patch of its backbone alone acts, but the outer model's config would not know of it.

    Raises a `PosencError`: `UnknownNameError` or `OptionError` for what was asked, `UnsupportedError` for a pair that
    cannot be, `StateError` for a model that is patched already or not fully loaded.

        >>> patch_model(model, "yarn", factor=4)
    """
    warn_of_unknown()
    wanted = create(encoding, **options)
    patch, backbone = find_backbone(model)
    check_state(model, backbone)
    check_outer(model, backbone)
    reason = patch.refusal(wanted, backbone.config)
    if reason is not None:
        raise UnsupportedError(f"{wanted.name} on {backbone.config.model_type}: {reason}")
    complete = patch.complete(wanted, backbone)
    check_sound(complete, patch.geometry(backbone))
    install(model, patch, backbone, complete)
    return model


def check_outer(model: Any, backbone: Any) -> None:
    """Raise for a model of several models: what its own config holds inside, it would save without the patch."""
    outer = getattr(model, "config", None)
    if outer is None or outer is backbone.config or not any(v is backbone.config for v in vars(outer).values()):
        return
    name = next(name for name, module in model.named_modules() if module is backbone)
    raise UnsupportedError(
        f"{outer.model_type} keeps the config of its {backbone.config.model_type} inside its own, where a saved patch "
        f"would be lost; patch that part alone, patch_model(model.{name}, …), and again after loading"
    )


def install(model: nn.Module, patch: Patch, backbone: Any, encoding: Encoding) -> None:
    """Apply a complete encoding, prove it, and keep its ledger on the backbone; roll back on any error."""
    ledger = Ledger()
    try:
        before = backbone.config
        config = ledger.own_config(model, before)
        drop_spent_quantization(model, config, ledger)
        known = {id(parameter) for parameter in model.parameters()}
        patch.apply(backbone, encoding, ledger)
        check_new_parameters(model, known, encoding)
        if model is not backbone:
            patch.forward_hooks(model, backbone, ledger)
        config.hf_posenc = record.make(encoding, before, config, native=patch.holds(encoding, before))
        if not config.hf_posenc["native"]:
            host: Any = type(config)
            write_marked(config)
            marked: Any = type(config)
            register_loaders(marked, host)
        ledger.add_state_dict_hook(model, mark_adapters)
        patch.prove(backbone, encoding)
    except BaseException as error:
        ledger.undo()
        if isinstance(error, EffectError):
            raise EffectError(f"{error}; the model has been put back as it was") from None
        raise
    backbone.__dict__[_STATE] = PatchState(encoding, ledger, copy.deepcopy(vars(config)))


def mark_adapters(model: Any, prefix: str, keep_vars: bool) -> None:
    """Let the adapters that PEFT has put into a patched model, or around it, be saved with its record."""
    _, backbone = find_backbone(model)
    state = backbone.__dict__.get(_STATE)
    saved = getattr(backbone.config, record.KEY, None)
    if state is not None and isinstance(saved, dict):
        adapters.remember(getattr(model, "peft_config", None), saved, state.ledger)


def check_new_parameters(model: nn.Module, known: set[int], encoding: Encoding) -> None:
    """Raise `StateError` for a parameter that is new in a model whose gradients processes share already."""
    if not in_a_data_parallel_wrap(model):
        return
    new = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if new:
        raise StateError(
            f"{encoding.name} adds a parameter ({new[0]}) to a model that is wrapped for several processes, and each "
            "would train its own; patch the model first, and wrap it (fully_shard, DistributedDataParallel) after that"
        )


def unpatch_model(model: M) -> M:
    """Take the patch out again, in place: same logits, state-dict keys and config as before, bit for bit.

    Raises `StateError` where there is none, or where the checkpoint held only the resized table.
    """
    _, backbone = find_backbone(model)
    state = backbone.__dict__.get(_STATE)
    if state is None:
        raise StateError("this model is not patched (by this process), so there is nothing to take out")
    if state.resized_on_disk:
        raise StateError(
            "this model was loaded from a checkpoint that holds only the resized table; "
            "load the original checkpoint instead"
        )
    edited = dict(vars(backbone.config))  # a copy: the ledger takes the attention out of that very config
    state.ledger.undo()
    del backbone.__dict__[_STATE]
    carry_edits(edited, state.config, backbone.config)
    return model


def carry_edits(edited: dict[str, Any], before: dict[str, Any], config: Any) -> None:
    """Bring over to `config` what the user has changed in the patched model's config since the patch."""
    for key, value in edited.items():
        if key in record.TOUCHED or key == record.KEY or (key in before and before[key] == value):
            continue
        if isinstance(value, str) and key == "_attn_implementation_internal":
            value = value.removeprefix("posenc_")
        config.__dict__[key] = value


@contextmanager
def patched(model: M, encoding: str | Encoding, /, **options: Any) -> Iterator[M]:
    """`patch_model` for the length of a `with` block, `unpatch_model` after it, whatever happens in between."""
    patch_model(model, encoding, **options)
    try:
        yield model
    finally:
        unpatch_model(model)


def get_encoding(model: nn.Module) -> Encoding | None:
    """The encoding in effect with every option filled in, or None for a model that has its own.

    A patched checkpoint of a type native to Transformers has it in effect also after a plain `from_pretrained`.
    """
    _, backbone = find_backbone(model)
    state = backbone.__dict__.get(_STATE)
    if state is not None:
        return state.encoding
    saved = record.read(backbone.config)
    return saved.encoding() if saved is not None and saved.native else None


def support(model_type: str, encoding: str) -> Support:
    """Whether `encoding` can go into the architecture `model_type`; an unknown encoding raises `UnknownNameError`."""
    if encoding not in ENCODINGS:
        raise unknown("encoding", encoding, ENCODINGS)
    if not has_patch(model_type):
        return Support(False, f"no patch for {model_type!r}; supported: {', '.join(list_architectures())}")
    reason = find_patch(model_type).refused(encoding)
    return Support(True) if reason is None else Support(False, reason)


def check_state(model: nn.Module, backbone: Any) -> None:
    """Raise `StateError` where a model is patched already, was saved patched, or is not fully loaded."""
    state = backbone.__dict__.get(_STATE)
    if state is not None:
        raise StateError(
            f"this model is already patched with {state.encoding.name} {state.encoding.options()}; "
            "unpatch_model(model) first"
        )
    try:
        saved = record.read(backbone.config)
    except PosencError as error:
        raise StateError(f"this model's config carries a patch record that cannot be used: {error}") from error
    if saved is not None:
        raise StateError(
            f"this checkpoint was saved patched with {saved.name} {saved.options}, and a patch does not go on top of "
            "another; load it with hf_posenc.from_pretrained, which can also put another encoding in its place"
        )
    for name, tensor in model.named_parameters():
        if tensor.is_meta and not any(hasattr(module, "_hf_hook") for module in model.modules()):
            raise StateError(
                f"the weights are on the meta device ({name}); load or initialise the model before patching it"
            )


def drop_spent_quantization(model: Any, config: Any, ledger: Ledger) -> None:
    """Forget that the weights came from GGUF: they are plain tensors by now, yet the record forbids saving them."""
    for module in model.modules():
        quantizer = module.__dict__.get("hf_quantizer")
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
        if str(getattr(method, "value", method)).lower() == "gguf":
            ledger.set_attribute(module, "hf_quantizer", None)
            for spent in ("quantization_method", "is_quantized"):
                if spent in module.__dict__:
                    ledger.set_attribute(module, spent, None)
            config.__dict__.pop("quantization_config", None)  # the config is the model's own copy
