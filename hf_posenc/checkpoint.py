"""From disk and back: checkpoints, adapters and merged models that know their own encoding.

A patched model's `save_pretrained` writes its record into `config.json`. An adapter's folder holds no config of the
base, so `save_pretrained` of this module puts the record beside it, in `posenc_config.json`.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import adapters, record
from .auto import register
from .encodings import Encoding, Learned
from .errors import CheckpointError, OptionError, OptionTypeError, StateError
from .heads import loader_of
from .ledger import Ledger
from .marking import MarkedOnDisk, foreign_code, is_marked, marked_on_disk, plain
from .owned import OWN, check_adapter, fill_own
from .patching import PatchState, drop_spent_quantization, find_backbone, get_encoding, install, patch_model
from .registry import ENCODINGS, create

POSENC_CONFIG = "posenc_config.json"
OWN_POSITIONS = {"encoding": None}  # beside an adapter that was trained with its base's own positions
_HUB = (
    "cache_dir",
    "revision",
    "token",
    "subfolder",
    "local_files_only",
    "trust_remote_code",
    "force_download",
    "proxies",
)


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    encoding: str | Encoding | None = None,
    options: dict[str, Any] | None = None,
    auto_class: Any = None,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint, an adapter folder or a merged model, and put its patch back in.

    With `encoding` that one is put in instead, whether or not the checkpoint was patched; the options of a name stand
    beside it (`encoding="yarn", factor=4`) or in `options`. `auto_class`: by default what loads the class that the
    checkpoint names under `architectures`, so that its head stays; without one, `AutoModelForCausalLM`. All other
    keyword arguments go to Transformers. Weights are read from safetensors only.

    Raises `CheckpointError` for a folder or record that cannot be read, `StateError` where another encoding cannot
    take the place of the saved one, and what `patch_model` raises.
    """
    wanted = take_encoding(encoding, options, kwargs)
    if not isinstance(path, (str, os.PathLike)):
        raise OptionTypeError(f"a path is the folder of a checkpoint or a hub id, got {path!r} ({type(path).__name__})")
    path = os.fspath(path)
    if Path(path, "adapter_config.json").is_file():
        return load_adapter(Path(path), wanted, auto_class, kwargs)
    hub = {key: kwargs[key] for key in _HUB if key in kwargs}
    gguf = {"gguf_file": kwargs["gguf_file"]} if "gguf_file" in kwargs else {}
    found = copy.deepcopy(kwargs.pop("config", None)) or load_config(path, {**hub, **gguf})
    if hub.get("trust_remote_code"):
        found = in_its_own_class(found, path, hub)
    saved, config = read_record(found, path), plain(found)
    auto_class = auto_class or loader_of(config, bool(kwargs.get("trust_remote_code")))
    if saved is None:
        model = load_weights(auto_class, path, config, kwargs)
        drop_spent_quantization(model, model.config, Ledger())  # for good: it can be saved unpatched, too
        return model if wanted is None else patch_model(model, wanted)
    recorded = saved.encoding()
    if holds_new_table(recorded, saved):
        return load_new_table(path, config, recorded, wanted, auto_class, kwargs)
    restore_base(config, saved)
    with unknown_tensors_expected():
        model = load_weights(auto_class, path, config, kwargs)
    patch_model(model, recorded if wanted is None else wanted)
    if wanted is None:
        fill_own(model, path, hub)
    return model


def take_encoding(
    encoding: str | Encoding | None, options: dict[str, Any] | None, kwargs: dict[str, Any]
) -> Encoding | None:
    """The encoding asked for; the options of a name are taken out of `kwargs`, the rest is for Transformers."""
    if options is not None and not isinstance(encoding, str):
        raise OptionError("options=… go with encoding='name'")
    if encoding is None:
        return None
    row = ENCODINGS.get(encoding) if isinstance(encoding, str) else None
    beside = {key: kwargs.pop(key) for key in row.options if key in kwargs} if row is not None else {}
    return create(encoding, **{**beside, **(options or {})})


def read_record(config: Any, path: str) -> record.Record | None:
    """The record of a config; raises `CheckpointError` also where it is gone from a file that is marked as patched."""
    saved = record.read(config)
    if saved is None and isinstance(config, MarkedOnDisk):
        raise CheckpointError(
            f"{path!r} is marked as patched, and its record in config.json is gone; restore that file"
        )
    return saved


def restore_base(config: Any, saved: record.Record) -> None:
    """Put back what the config said before the patch."""
    try:
        for key, value in saved.base.items():
            setattr(config, key, value)
    except Exception as error:  # what a config's own validation raises differs by release
        raise CheckpointError(f"the record of the patch holds a value that the config refuses: {error}") from error
    delattr(config, record.KEY)


@contextmanager
def unknown_tensors_expected() -> Iterator[None]:
    """Leave out the loader's report where all it has to say is that it does not know what a patch owns."""

    def keep(message: logging.LogRecord) -> bool:
        text = message.getMessage()
        rows = [line for line in text.splitlines() if "UNEXPECTED" in line and not line.startswith("-")]
        return not (rows and all(f"{OWN}." in row for row in rows) and "MISSING" not in text)

    logger = logging.getLogger("transformers.modeling_utils")
    handlers = [*logger.handlers, *logging.getLogger("transformers").handlers]
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


def load_config(path: str, kwargs: dict[str, Any]) -> Any:
    """The config of a checkpoint, with an error that names the folder."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint")
    register()  # architectures that have been added since the import, too
    try:
        if "gguf_file" not in kwargs:
            raw, _ = PretrainedConfig.get_config_dict(path, **kwargs)
            if is_marked(raw) and raw["model_type"] in CONFIG_MAPPING:  # code beside it does not know the mark
                kwargs = {**kwargs, "trust_remote_code": False}
        return AutoConfig.from_pretrained(path, **kwargs)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"no model could be read from {path!r}: {error}") from error


def in_its_own_class(config: Any, path: str, hub: dict[str, Any]) -> Any:
    """The config of a marked checkpoint in the class that trusted code beside it, other than ours, has for it."""
    code = foreign_code(config, "AutoConfig") if isinstance(config, MarkedOnDisk) else None
    if code is None:
        return config
    reference, place = code, path
    if "--" in code:
        place, reference = code.split("--")
    given = {key: value for key, value in hub.items() if key not in ("trust_remote_code", "subfolder")}
    host: Any = get_class_from_dynamic_module(reference, place, **given)
    if isinstance(config, host):
        return config
    own = marked_on_disk(host).from_dict(config.to_dict())
    own._attn_implementation_internal = config._attn_implementation_internal
    return own


def load_weights(auto_class: Any, path: str, config: Any, kwargs: dict[str, Any]) -> Any:
    """The stock loader, for safetensors alone, with an error of ours that names the folder."""
    if not kwargs.get("gguf_file"):
        kwargs = {**kwargs, "use_safetensors": True}  # whatever the caller says: other files would be unpickled
    try:
        return auto_class.from_pretrained(path, config=config, **kwargs)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"no weights could be read from {path!r} (safetensors are wanted): {error}") from error


def holds_new_table(encoding: Encoding, saved: record.Record) -> bool:
    """Whether the checkpoint's own position table is one that the patch made: longer than the base's, or fresh."""
    lengths = {"n_positions", "max_position_embeddings"}
    return isinstance(encoding, Learned) and not lengths.isdisjoint(saved.base)


def load_new_table(
    path: str, config: Any, recorded: Encoding, wanted: Encoding | None, auto_class: Any, kwargs: dict[str, Any]
) -> Any:
    """A checkpoint whose own table was resized is loaded as it is, and given its record and its bounds again."""
    if wanted is not None:
        raise StateError(
            f"this checkpoint holds only the resized table of {recorded.options()}, not the one it was trained with, "
            f"so {wanted.name} cannot take its place; load the original checkpoint instead"
        )
    raw = config.hf_posenc
    delattr(config, record.KEY)
    model = load_weights(auto_class, path, config, kwargs)
    patch, backbone = find_backbone(model)
    install(model, patch, backbone, Learned())
    state: PatchState = backbone._posenc_state
    state.encoding, state.resized_on_disk = recorded, True
    backbone.config.hf_posenc = raw
    return model


def load_adapter(path: Path, wanted: Encoding | None, auto_class: Any, kwargs: dict[str, Any]) -> Any:
    """Base, then patch, then adapter; the record is the one beside the adapter, or in its config."""
    wanted = recorded_with(path) if wanted is None else wanted
    base = adapters.read(path).base_model_name_or_path
    if not base:
        raise CheckpointError(f"{path}/adapter_config.json names no base model")
    if not (path / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{path} holds no adapter_model.safetensors; adapters are read from safetensors only")
    model = from_pretrained(base, auto_class=auto_class, **kwargs)
    if wanted is None and get_encoding(model) is not None:
        raise CheckpointError(
            f"the adapter in {path} was trained with its base's own positions, and {base} is now patched with "
            f"{get_encoding(model).name}; give the base that it was trained on"  # type: ignore[union-attr]
        )
    if get_encoding(model) != wanted:
        model = from_pretrained(base, encoding=wanted, auto_class=auto_class, **kwargs)
    return adapters.attach(model, path)


def is_recorded(path: Path) -> bool:
    """Whether something in an adapter's folder says which encoding it was trained with."""
    if (path / POSENC_CONFIG).is_file():
        return True
    return (path / adapters.ADAPTER_CONFIG).is_file() and adapters.marked_as(path)[1] is not None


def recorded_with(path: Path) -> Encoding | None:
    """The encoding of an adapter, which two files may name, or None for its base's own.

    Raises `CheckpointError` where neither names it, or they disagree: PEFT's own save writes one of them alone.
    """
    if not is_recorded(path):
        raise CheckpointError(
            f"{path} holds an adapter but no {POSENC_CONFIG}, so nothing says which encoding it was trained with; "
            "name it with encoding=…, or save adapters with hf_posenc.save_pretrained(model, path)"
        )
    name, raw = adapters.marked_as(path)
    own = None if raw is None else encoding_of(raw)
    if not (path / POSENC_CONFIG).is_file():
        return own
    beside = read_beside(path / POSENC_CONFIG)
    if name != getattr(beside, "name", None) or (own is not None and own != beside):
        raise CheckpointError(
            f"in {path}, {POSENC_CONFIG} says {beside or 'no encoding'} and {adapters.ADAPTER_CONFIG} says "
            f"{own or name or 'no encoding'}: another adapter was saved over hf_posenc.save_pretrained's. Name the "
            "encoding it was trained with, encoding=…, or where that is none, load it with PeftModel.from_pretrained"
        )
    return beside


def encoding_of(raw: dict[str, Any]) -> Encoding:
    """The encoding that a record names."""

    class Holder:
        hf_posenc = raw

    saved = record.read(Holder)
    assert saved is not None
    return saved.encoding()


def read_beside(file: Path) -> Encoding | None:
    """The encoding named by a `posenc_config.json`, or None where it says that the host's own was left in place."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error

    if raw == OWN_POSITIONS:
        return None

    if raw is None:
        raise CheckpointError(f"{file} is empty")
    return encoding_of(raw)


def save_pretrained(model: Any, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """`model.save_pretrained(path)` with the record beside it, which an adapter's folder would otherwise lack.

    Raises `CheckpointError` where the folder cannot be written, `OptionError` for `safe_serialization=False`,
    and for an adapter with `push_to_hub=True`.
    """
    if kwargs.get("safe_serialization") is False:
        raise OptionError("safe_serialization=False would write a pickle; weights are written as safetensors only")
    if kwargs.get("push_to_hub") and getattr(model, "peft_config", None):
        raise OptionError(
            "an adapter's save_pretrained uploads nothing; save it without push_to_hub, and upload the folder: "
            "huggingface_hub.upload_folder(repo_id=…, folder_path=…)"
        )
    _, backbone = find_backbone(model)
    check_adapter(model, backbone)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        raw = getattr(backbone.config, record.KEY, None)
        names = kwargs.get("selected_adapters") or getattr(model, "peft_config", None) or ["default"]
        folders = [folder if name == "default" else folder / name for name in names]
        for each in folders:
            (each / POSENC_CONFIG).unlink(missing_ok=True)
        model.save_pretrained(str(folder), **kwargs)
        for each in folders:
            if raw is not None or getattr(model, "peft_config", None):
                beside = OWN_POSITIONS if raw is None else raw
                (each / POSENC_CONFIG).write_text(json.dumps(beside, indent=2) + "\n")
            adapters.mark(each, raw)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error
