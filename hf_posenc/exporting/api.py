"""`export`: a loaded model as a folder for Transformers, vLLM or llama.cpp, with what each of them can hold."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_MAPPING

from hf_posenc import __version__, marking
from hf_posenc.encodings import Learned, Segmented
from hf_posenc.errors import CheckpointError, StateError, UnsupportedError, unknown
from hf_posenc.heads import auto_classes
from hf_posenc.patching import find_backbone

from . import bundle
from .card import card, loading
from .folder import check_place, check_size, find_tokenizer, shard_size, written_beside
from .keys import rewrite, whole
from .targets import COUNTS_PADDING, TARGETS, Subject, Target, Verdict, row, subject


@dataclass(frozen=True)
class Exported:
    """What was written where, how the target holds it, how to load it, and what the other targets would say."""

    path: Path
    verdict: Verdict
    row: tuple[Verdict, ...]
    load: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    model: Any,
    path: str | os.PathLike[str],
    target: Target = "transformers",
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
) -> Exported:
    """Write a model with its encoding to `path`, so that `target` loads it with no hf_posenc installed.

    transformers: config.json alone where the library has a type for the encoding, else with one modelling file, made
    of this package's own sources. vllm, gguf: the keys that those read, in the form of Transformers 4 as well.
    `tokenizer`: one of Transformers, or a folder; by default the one beside the checkpoint. `overwrite`: replace an
    earlier model at `path`, if nothing else lies there. The model stays as it is; the folder appears whole or not at
    all, and holds the model under its own head.

    Raises `UnsupportedError` where the target cannot hold the encoding, with the reason; `CheckpointError` for a folder
    that is not empty (without `overwrite=True`, or with files of another kind), cannot be written, or has no tokenizer
    where the target needs one; `OptionError` for a `max_shard_size` that is none;
    `StateError` for an adapter that is not merged.
    """
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    place, size = check_place(path, overwrite), check_size(max_shard_size)
    about = checked(model)
    verdicts = row(about)
    verdict = next(v for v in verdicts if v.target == target)
    if verdict.refused:
        assert about.encoding is not None
        raise UnsupportedError(f"{target} cannot hold {about.encoding.name}: {verdict.text}")
    found = find_tokenizer(tokenizer, model)
    if found is None and target != "transformers":
        raise CheckpointError(f"{target} needs a tokenizer, and none lies beside the model; give tokenizer=…")
    notes = remarks(about, found)
    with written_beside(place) as folder:
        write_weights(model, folder, size, legacy=verdict.how != "code")
        notes += write_config(model, about, verdict, folder)
        if found is not None:
            found.save_pretrained(folder)
        (folder / "README.md").write_text(card(verdict, about, model, notes), encoding="utf-8")
    return Exported(place, verdict, verdicts, tuple(loading(verdict, about, place)), tuple(notes))


def checked(model: Any) -> Subject:
    """What is to be exported; raises for a model that cannot be written as it is."""
    if getattr(model, "peft_config", None) or type(model).__module__.startswith("peft."):
        raise StateError("an adapter is exported merged: export(model.merge_and_unload(), …)")
    about = subject(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise StateError("the weights are on the meta device or offloaded; load the model in whole before exporting it")
    return about


def remarks(about: Subject, tokenizer: Any) -> list[str]:
    """What a reader of the card should know beside the verdict."""
    notes = []
    if tokenizer is None:
        notes.append("No tokenizer lay beside the model, so none is here.")
    if isinstance(about.encoding, Learned):
        notes.append("Its positions end with its table: a longer input is an error.")
        if about.native and about.counts_padding:
            notes.append(COUNTS_PADDING)
    foreign = foreign_code(about.config)
    if about.remote_code:
        notes.append(f"The model is code of its own, which is kept and needs trust_remote_code=True: {foreign}.")
    elif foreign:
        notes.append(f"The base named code of its own that was not in use, and is not named any more: {foreign}.")
    return notes


def foreign_code(config: Any) -> str:
    """The code that a config names and that is not ours, in words."""
    named = sorted({str(v) for v in (getattr(config, "auto_map", None) or {}).values()})
    return ", ".join(name for name in named if not name.startswith(marking.OWN_CODE))


@contextmanager
def config_kept(model: Any) -> Iterator[None]:
    """The library notes dtype and class in the config when it saves; afterwards the config is what it was."""
    before = dict(vars(model.config))
    try:
        yield
    finally:
        vars(model.config).clear()
        vars(model.config).update(before)


def write_weights(model: Any, folder: Path, max_shard_size: int | str | None, legacy: bool) -> None:
    """Weights, config and generation config, as the library writes them.

    `legacy`: with the names that the weights of some hosts have on disk alone; they are not looked for by own code.
    """
    with config_kept(model):
        size = max_shard_size or shard_size(model)
        model.save_pretrained(folder, max_shard_size=size, save_original_format=legacy)


def write_config(model: Any, about: Subject, verdict: Verdict, folder: Path) -> list[str]:
    """What the target needs beside: its keys, or the modelling file."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    if verdict.how == "approximation" and isinstance(about.encoding, Segmented) and not about.native:
        static = whole(model, about)
        static.architectures = [type(model).__name__]
        static.to_json_file(file)
        rewrite(folder, verdict.target, about.encoding)
        return [f"An approximation: {verdict.text}."]
    if not about.remote_code:
        raw.pop("auto_map", None)
    if verdict.how == "code":
        raw = marking.mark({**marking.unmark(raw), "auto_map": write_code(model, about, folder)})
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if verdict.target != "transformers":
        rewrite(folder, verdict.target, about.encoding)
    return []


def write_code(model: Any, about: Subject, folder: Path) -> dict[str, str]:
    """The modelling file, and the `auto_map` that names its classes."""
    _, backbone = find_backbone(model)
    host = type(marking.plain(copy.copy(model.config)))
    # the host library's AutoModel may have one class more around the backbone (OPT)
    bare: Any = MODEL_MAPPING.get(host, None)
    bare = bare if isinstance(bare, type) else type(backbone)
    classes: list[type] = list(dict.fromkeys([type(model), bare]))
    text = bundle.modelling_file(about.patch, host, classes, __version__, marking.OWN_CLASS)
    file = folder / f"{marking.OWN_CODE}.py"
    file.write_text(text, encoding="utf-8")
    bundle.prove_file(file)
    found = {"AutoConfig": host}
    for cls in classes:
        found |= {auto: cls for auto in auto_classes(host, cls) if auto not in found}
    return {auto: f"{marking.OWN_CODE}.{marking.OWN_CLASS}{cls.__name__}" for auto, cls in found.items()}
