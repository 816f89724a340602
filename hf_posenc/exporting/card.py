"""The model card of an exported folder: what was done, with which numbers, and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from hf_posenc import __version__
from hf_posenc.marking import OWN_CODE
from hf_posenc.registry import ENCODINGS

from .keys import served_length
from .llamacpp import completed
from .targets import COMPLETE, Subject, Verdict, stated_length


def loading(verdict: Verdict, about: Subject, path: Path) -> list[str]:
    """The lines with which the target takes the folder at `path`."""
    if verdict.target == "vllm":
        length = served_length(about)
        return [f"vllm serve {path}" + (f" --max-model-len {length}" if length else "")]
    if verdict.target == "gguf":
        lines = [f"python llama.cpp/convert_hf_to_gguf.py {path} --outfile model.gguf"]
        return lines + ([f"{COMPLETE} model.gguf {path}"] if completed(about.encoding, about.config.model_type) else [])
    remote = ", trust_remote_code=True" if verdict.how == "code" or about.remote_code else ""
    return [f'model = {about.loader}.from_pretrained("{path}"{remote})']


def card(verdict: Verdict, about: Subject, model: Any, notes: list[str]) -> str:
    """The README.md of an exported folder."""
    name, encoding = about.config.model_type, about.encoding
    what = "its own position encoding" if encoding is None else f"the position encoding `{encoding.name}`"
    parts = ["---", "library_name: transformers", "tags:", "- hf_posenc", "---", "", f"# {name} with {what}", ""]
    if encoding is not None:
        parts += [*changed(about), ""]
    parts += ["## Load it", "", f"```{'python' if verdict.target == 'transformers' else 'sh'}"]
    if verdict.target == "transformers":
        parts += [f"from transformers import {about.loader}", ""]
    parts += [*loading(verdict, about, Path(".")), "```", ""]
    if verdict.how == "code":
        parts += [
            f"`{OWN_CODE}.py` stands beside the weights and puts the encoding in; it needs torch and Transformers and "
            "nothing else. Without it (and without `trust_remote_code=True`) nothing loads, rather than a model "
            "without its positions. With hf_posenc installed, `hf_posenc.from_pretrained` loads the folder too.",
            "",
        ]
    parts += [f"How {verdict.target} holds it: {verdict.text}.", ""]
    parts += [f"- {note}" for note in notes] + ([""] if notes else [])
    parts.append(f"Written by hf_posenc {__version__} with Transformers {transformers.__version__}.")
    return "\n".join(parts) + "\n"


def changed(about: Subject) -> list[str]:
    """What was done to the model, and its numbers."""
    encoding = about.encoding
    assert encoding is not None
    known = ENCODINGS.get(encoding.name)
    lines = [f"`{encoding.name}`: {known.summary} ({known.paper})." if known else f"`{encoding.name}`."]
    source = str(getattr(about.config, "_name_or_path", "") or "")
    if source:
        lines.append(f"Made from `{Path(source).name if Path(source).exists() else source}`.")
    lines += ["", "| option | value |", "|---|---|"]
    for key, value in encoding.options().items():
        text = f"{len(value)} numbers, see config.json" if isinstance(value, list) and len(value) > 8 else str(value)
        lines.append(f"| `{key}` | {text} |")
    length, trained = stated_length(about.config), getattr(encoding, "original_max_position_embeddings", None)
    if trained:
        lines += ["", f"Trained on {trained} tokens; the config states {length}."]
    return lines
