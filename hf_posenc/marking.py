"""What `config.json` says of a patched model that plain Transformers cannot hold, so that nobody loads it unpatched.

In memory such a model's config is what it always was: the same model type, the same class name, the same values. In
the file the model type and the architecture are others, which plain Transformers and other readers do not know, and
one number is a sentence, over which a host's own class (`LlamaForCausalLM.from_pretrained`) stumbles, quoting it. A
host's own class that is given the config itself, in memory or read from such a file, is refused by the config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from .errors import CheckpointError, StateError

OWN_TYPE = "posenc" + "_"
OWN_CLASS = "Posenc"
OWN_CODE = "modeling_" + "posenc"  # the file that an exported model brings along
HELD = "held"  # in the record: the number in whose place the sentence stands
GUARDS = ("initializer_range", "init_std", "vocab_size")  # typed in the hosts' own config classes, so it is checked

UNKNOWN = "unknown"  # in the record: whether only the process that made it knows the encoding

_RECORD = "hf_posenc"


def mark(raw: dict[str, Any]) -> dict[str, Any]:
    """What goes into `config.json` in the place of `raw`: for a record that plain Transformers does not hold."""
    record = raw.get(_RECORD)
    if not isinstance(record, dict) or record.get("native") is not False or is_marked(raw):
        return raw
    if record.get(UNKNOWN):
        raise CheckpointError(
            f"{record.get('encoding')} is an encoding that only this process knows: no saved file could be read again; "
            "hf_posenc.register_encoding(its class) first, before patching, and again wherever it is loaded"
        )
    new = {**raw, "model_type": OWN_TYPE + raw["model_type"]}
    new["architectures"] = [OWN_CLASS + name.removeprefix(OWN_CLASS) for name in raw.get("architectures") or []]
    guard = next((key for key in GUARDS if key in raw), None)
    if guard is not None:
        new[_RECORD] = {**record, HELD: {guard: raw[guard]}}
        how = "AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True) or " if has_own_code(raw) else ""
        new[guard] = (
            f"this checkpoint is patched with {record.get('encoding')}, which {raw['model_type']} alone cannot "
            f"express; load it with {how}hf_posenc.from_pretrained"
        )
    return new


def has_own_code(raw: dict[str, Any]) -> bool:
    """Whether the code that an export brings along is named."""
    return any(str(name).startswith(OWN_CODE) for name in (raw.get("auto_map") or {}).values())


def foreign_code(config: Any, auto: str) -> str | None:
    """The code, other than an export's, that a config names for the auto class `auto`."""
    name = (getattr(config, "auto_map", None) or {}).get(auto)
    return None if name is None or str(name).startswith(OWN_CODE) else str(name)


def is_marked(raw: dict[str, Any]) -> bool:
    """Whether this is the content of a marked `config.json`."""
    return str(raw.get("model_type", "")).startswith(OWN_TYPE)


def unmark(raw: dict[str, Any]) -> dict[str, Any]:
    """The config's own values again, with the record."""
    if not is_marked(raw):
        return raw
    new = {**raw, "model_type": raw["model_type"].removeprefix(OWN_TYPE)}
    new["architectures"] = [name.removeprefix(OWN_CLASS) for name in raw.get("architectures") or []]
    new = {key: value for key, value in new.items() if not (key in GUARDS and isinstance(value, str))}
    record = new.get(_RECORD)
    if isinstance(record, dict):
        new[_RECORD] = {key: value for key, value in record.items() if key != HELD}
        held = record.get(HELD)
        new |= {key: value for key, value in held.items() if key in GUARDS} if isinstance(held, dict) else {}
    return new


def maker(frame: FrameType | None) -> Any:
    """The model whose constructor a frame is, or None."""
    if frame is None or frame.f_code.co_name != "__init__":
        return None
    from transformers import PreTrainedModel  # read by the auto classes' table, which is registered with as it is made

    made = frame.f_locals.get("self")
    return made if isinstance(made, PreTrainedModel) else None


def check_maker(config: Any, frame: FrameType | None) -> None:
    """Raise where `frame` constructs a model that would be without the encoding of its `config`.

    A class that puts it in names a marked config class as its own, and calls the constructor of the host's.
    """
    while frame is not None and frame.f_code.co_name == "__getattribute__":  # the host library's, of the config
        frame = frame.f_back
    made = maker(frame)
    record = vars(config).get(_RECORD)
    record = record if isinstance(record, dict) else {}
    if made is None or record.get("native", False) is not False:
        return
    while frame is not None:
        own = getattr(type(maker(frame)), "config_class", None)
        if isinstance(own, type) and issubclass(own, MarkedOnDisk):
            return
        frame = frame.f_back
    how = "AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True) or " if has_own_code(vars(config)) else ""
    raise StateError(
        f"this config is that of a model patched with {record.get('encoding', 'another encoding')}, which "
        f"{type(made).__name__} alone would be made without; load it with {how}hf_posenc.from_pretrained, or "
        "make one with AutoModelForCausalLM.from_config(config); to have it unpatched, give the original checkpoint's"
    )


class MarkedOnDisk:
    """Mixin of a host's config class: `config.json` is marked, what is read from there is not."""

    @property
    def name_or_path(self) -> Any:
        """As in the host library, whose models read it first in their constructor: others are refused there."""
        check_maker(self, sys._getframe(1))
        return super().name_or_path  # type: ignore[misc]

    @name_or_path.setter
    def name_or_path(self, value: Any) -> None:
        self._name_or_path = str(value)

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """As the host library writes it, but marked; in one go, so that no unmarked file is ever there."""
        marked = mark(json.loads(self.to_json_string(use_diff=use_diff)))  # type: ignore[attr-defined]
        text = json.dumps(marked, indent=2, sort_keys=True) + "\n"
        Path(json_file_path).write_text(text, encoding="utf-8")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As the host library finds it, of unmarked values: else it would warn of a foreign model type."""
        raw, rest = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        return unmark(raw), rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the host library reads it, of unmarked values."""
        return super().from_dict(unmark(config_dict), **kwargs)  # type: ignore[misc]


class MadeConfig(MarkedOnDisk):
    """Mixin of config classes that are made at run time; a copy or a pickle names how, and not the class."""

    host: ClassVar[Any]
    how: ClassVar[tuple[Callable[[Any], Any], Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty_config, type(self).how, self.__dict__


@cache
def marked_on_disk(host: Any) -> Any:
    """The config class `host`, by its own name, that writes marked files: the library finds classes by name."""
    if issubclass(host, MarkedOnDisk):
        return host
    members = {"__module__": host.__module__, "__qualname__": host.__qualname__, "__doc__": host.__doc__}
    return type(host.__name__, (MadeConfig, host), {**members, "host": host, "how": (marked_on_disk, host)})


def empty_config(make: Callable[[Any], Any], argument: Any) -> Any:
    """An empty config of a made class, to be filled with a state."""
    cls = make(argument)
    return cls.__new__(cls)


def write_marked(config: Any) -> None:
    """From now on `config`, which must be the model's own, is marked where it is written to disk."""
    host: Any = type(config)
    config.__class__ = marked_on_disk(host)


def plain(config: Any) -> Any:
    """The same config as an instance of the host's own class, without the code that an export brings along.

    Of a config in memory, the attention over which ours stands: the default one is left to the host library.
    """
    attention = str(vars(config).get("_attn_implementation_internal") or "")
    if attention.startswith(OWN_TYPE):
        base = attention.removeprefix(OWN_TYPE)
        config._attn_implementation_internal = None if base == "sdpa" else base
    host = getattr(type(config), "host", None)
    if host is not None:
        config.__class__ = host
    if has_own_code(vars(config)):
        del config.auto_map
    return config
