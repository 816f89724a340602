"""What decides a run, in groups: model, encoding, data, LoRA, training, evaluation; read from YAML or JSON and written.

Every dataclass is plain values, so that a file holds a run in full and the same file repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hf_posenc.errors import CheckpointError, OptionError, OptionTypeError, unknown

Mode = Literal["concat", "packed", "pose", "randomized", "task"]
MODES: tuple[Mode, ...] = get_args(Mode)
FAR: tuple[Mode, ...] = ("pose", "randomized")  # short windows that stand at far positions
FILE = "finetune.yaml"


def whole(value: Any, least: int = 1) -> bool:
    """Whether `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Group:
    """Mixin of the dataclasses below: made from a mapping, with an error that names the nearest key."""

    @classmethod
    def of(cls, values: Mapping[str, Any] | Self | None) -> Self:
        """The group from `values`; an unknown key is an `UnknownNameError`, a value of no use an `OptionError`."""
        if isinstance(values, cls):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise OptionTypeError(f"{cls.section()} holds key: value pairs, got {values!r:.80}")
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in values or {}:
            if key not in known:
                raise unknown(f"setting of {cls.section()}", key, known)
        return cls(**dict(values or {}))

    @classmethod
    def section(cls) -> str:
        """The group's name in a settings file."""
        return cls.__name__.removesuffix("Settings").lower()

    def require(self, ok: bool, key: str, allowed: str) -> None:
        """Raise `OptionError` for the value of `key` unless `ok`."""
        if not ok:
            raise OptionError(f"{self.section()}: {key}={getattr(self, key)!r}; give {allowed}")


@dataclass(frozen=True)
class DataSettings(Group):
    """Where text comes from and how it is cut.

    `source`: files, folders, names of `datasets`, or a task's documents (`task:passkey`). `max_length`: tokens a
    window. `mode`: concat (cut one after another), packed (positions restart at each document), pose (short windows
    whose positions skip, up to `target_length`), randomized (short windows whose positions are drawn below that),
    task (one document a row). `shuffle`: windows held to draw from.
    """

    source: tuple[str, ...] = ()
    max_length: int = 0
    mode: Mode = "concat"
    column: str = "text"
    split: str = "train"
    target_length: int | None = None
    chunks: int = 2
    shuffle: int = 64
    answer_only: bool = True

    def __post_init__(self) -> None:
        given = self.source
        object.__setattr__(self, "source", (given,) if isinstance(given, str) else tuple(map(str, given or ())))
        self.require(whole(self.max_length, 2), "max_length", "the tokens of a window, at least 2 (--max-length)")
        if self.mode not in MODES:
            raise unknown("data mode", self.mode, MODES)
        if any(name.startswith("task:") for name in self.source):
            self.require(len(self.source) == 1, "source", "one task alone, or texts alone")
            self.require(self.mode in ("concat", "task"), "mode", "a task's documents without a mode of texts")
            object.__setattr__(self, "mode", "task")
        elif self.mode == "task":
            raise OptionError("data: mode='task' needs a task's documents: source='task:passkey'")
        told = self.target_length is None or self.mode in FAR
        self.require(told, "target_length", "it with mode='pose' or 'randomized' only")
        self.require(self.target_length is None or whole(self.target_length), "target_length", "a length in tokens")
        self.require(whole(self.chunks, 2), "chunks", "the pieces of a window, at least 2")
        self.require(whole(self.shuffle), "shuffle", "a number of windows, 1 for the text's own order")


@dataclass(frozen=True)
class LoraSettings(Group):
    """What is trained: LoRA (Hu et al. 2021, 2106.09685) of rank `r` on the attention's projections, and norms.

    `targets`: names of modules instead of the attention's projections. `embeddings`: train them too (LongLoRA, Chen et
    al. 2023, 2309.12307). `full`: every parameter, no adapter. `quantize`: the base in 4 bits (QLoRA, 2305.14314).
    """

    full: bool = False
    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    norms: bool = True
    embeddings: bool = False
    quantize: bool = False

    def __post_init__(self) -> None:
        if self.targets is not None:
            named = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
            object.__setattr__(self, "targets", named)
        self.require(whole(self.r), "r", "the rank, at least 1")
        self.require(isinstance(self.alpha, int | float) and self.alpha > 0, "alpha", "a number above 0")
        self.require(isinstance(self.dropout, int | float) and 0 <= self.dropout < 1, "dropout", "a share in [0, 1)")
        self.require(not (self.full and self.quantize), "quantize", "it without full: 4-bit weights cannot be trained")


@dataclass(frozen=True)
class EvaluationSettings(Group):
    """Measured before the first step, every `every` steps, and after the last: perplexity of `text`, and `tasks`."""

    every: int | None = None
    lengths: tuple[int, ...] = ()
    text: str | None = None
    tasks: tuple[str, ...] = ()
    num_samples: int = 10

    def __post_init__(self) -> None:
        from hf_posenc.eval_tasks.tasks import parse_lengths

        given = (self.tasks,) if isinstance(self.tasks, str) else self.tasks
        object.__setattr__(self, "tasks", tuple(name for item in given for name in item.split(",") if name))
        object.__setattr__(self, "lengths", tuple(parse_lengths(self.lengths)) if self.lengths else ())
        self.require(self.every is None or whole(self.every), "every", "a number of steps")
        self.require(whole(self.num_samples), "num_samples", "documents a length")
        asked = self.every is not None or self.text is not None or bool(self.tasks) or bool(self.lengths)
        self.require(not asked or bool(self.lengths), "lengths", "the lengths to measure at: 256,512")
        self.require(not asked or self.text is not None or bool(self.tasks), "text", "a held-out text, tasks, or both")


@dataclass(frozen=True)
class Settings:
    """A whole run. `encoding` is {name, option, ...} or empty; `training` holds fields of `TrainingArguments`.

    `shifted_group`: tokens of a group of LongLoRA's shifted sparse attention, for training alone.
    """

    data: DataSettings
    model: str = ""
    dtype: str = "auto"
    gguf_file: str | None = None
    encoding: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings = field(default_factory=LoraSettings)
    training: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    adapter: str | None = None
    merge: bool = False
    shifted_group: int | None = None

    def __post_init__(self) -> None:
        if self.shifted_group is not None and not whole(self.shifted_group, 2):
            raise OptionError(f"shifted_group={self.shifted_group!r}: give the tokens of a group, at least 2")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """A run from nested mappings, such as a settings file holds."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise unknown("group of settings", key, known)
        plain = {key: value for key, value in values.items() if value is not None}
        groups: dict[str, Any] = {"data": DataSettings, "lora": LoraSettings, "evaluation": EvaluationSettings}
        made = {key: group.of(plain.get(key)) for key, group in groups.items()}
        for key in ("encoding", "training"):
            if not isinstance(plain.get(key, {}), Mapping):
                raise OptionTypeError(f"{key} holds key: value pairs, got {plain[key]!r:.80}")
        return cls(**{**plain, **made})

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, lists for tuples: what `of` takes back."""
        return json.loads(json.dumps(asdict(self)))


def read_settings(file: Path) -> dict[str, Any]:
    """The nested mappings of a YAML or JSON file; raises a `PosencError` that says what is wrong with it."""
    import yaml

    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=float_loader())
    except OSError as error:
        raise CheckpointError(f"cannot read the settings {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"the settings {file} are neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise OptionError(f"the settings {file} hold no groups (data, lora, training, ...), but {values!r:.80}")
    return {key: value for key, value in values.items() if key != "versions"}


def float_loader() -> Any:
    """YAML's safe loader that also reads 2e-5 as a number, which YAML 1.1 takes for a text."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader


def write_settings(settings: Settings, folder: Path) -> None:
    """`finetune.yaml` in the output folder: the whole run, and the versions that ran it."""
    import torch
    import transformers
    import yaml

    import hf_posenc
    from hf_posenc.report import write_atomically

    versions = {
        "hf_posenc": hf_posenc.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    values = settings.as_dict() | {"versions": {name: str(version) for name, version in versions.items()}}
    write_atomically(folder / FILE, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`first` with the values of `second` in their place, group by group."""
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result
