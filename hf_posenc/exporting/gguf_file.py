"""Complete a GGUF file that llama.cpp's converter made of an exported folder: `python -m … MODEL.gguf FOLDER`.

The converter keeps of `longrope` only the name, where llama.cpp's Llama graph reads two lists of factors; it writes a
temperature that llama.cpp computes anew (0.1 ln s + 1); its YaRN has one ramp, with rounded ends; and of some hosts it
writes no rotation at all. All that can be said in the file by other means, which is done here. The file is replaced
when the new one is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hf_posenc import record
from hf_posenc.encodings import LongRope, NtkByParts, Rotation
from hf_posenc.encodings.frequencies import yarn_temperature
from hf_posenc.errors import CheckpointError, UnsupportedError
from hf_posenc.patches.native_rope import rescale_factors, typed

from .llamacpp import HOSTS, completed, explicit_temperature, is_list

_OWN_FIELDS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")  # the writer makes them anew
_ALIGNMENT = "general.alignment"


def read_rotation(folder: Path) -> tuple[Rotation, str, int] | None:
    """The rotation of an exported folder, its host, and the channels of a head that turn; None without a rotation."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from error
    saved = record.read(SimpleNamespace(hf_posenc=raw.get("hf_posenc")))
    encoding = None if saved is None else saved.encoding()
    if not isinstance(encoding, Rotation):
        return None
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return (
        encoding,
        str(raw["model_type"]),
        int(head * (raw.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)),
    )


def additions(encoding: Rotation, host: str, dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors to add, and the values under `<architecture>.rope.…` to set (None: to take out)."""
    if not is_list(encoding, HOSTS[host]):
        return {}, stated(encoding, dim)
    if HOSTS[host].lists == "written":
        first = encoding.segment_inv_freq(dim, 0) if isinstance(encoding, LongRope) else encoding.inv_freq(dim)
        return {}, {"scaling.attn_factor": float(first[1])}
    values: dict[str, Any] = {"scaling.type": "none", "scaling.factor": None, "freq_base": float(encoding.theta)}
    names: tuple[str, ...] = ("rope_freqs",)
    if isinstance(encoding, LongRope):
        names = ("rope_factors_short", "rope_factors_long")
        found = [encoding.segment_inv_freq(dim, segment) for segment in (0, 1)]
        # a longer context takes the long list
        values = {"scaling.original_context_length": encoding.length, "freq_base": float(encoding.theta)}
    else:
        found = [encoding.inv_freq(dim)]
    factors = [rescale_factors(inv_freq, encoding.theta) for inv_freq, _ in found]
    tensors = {f"{name}.weight": f.float().numpy() for name, f in zip(names, factors)}
    return tensors, {**values, "scaling.attn_factor": float(found[0][1])}


def stated(encoding: Rotation, dim: int) -> dict[str, Any]:
    """A rotation that llama.cpp has a type for, in its words."""
    parameters = typed(encoding, dim)
    assert parameters is not None
    kind, base = parameters["rope_type"], {"freq_base": float(parameters["rope_theta"]), "scaling.attn_factor": None}
    if kind == "default":
        return {**base, "scaling.type": "none", "scaling.factor": None}
    values = {**base, "scaling.type": kind, "scaling.factor": parameters["factor"]}
    if isinstance(encoding, NtkByParts):
        wanted = explicit_temperature(encoding)  # of which 0.1 ln s + 1 is computed anew
        share = None if wanted is None else wanted / yarn_temperature(encoding.factor)
        betas = {f"scaling.yarn_{key}": parameters[key] for key in ("beta_fast", "beta_slow")}
        values |= {**betas, "scaling.original_context_length": encoding.length, "scaling.attn_factor": share}
    return values


def complete(file: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Add to `file` what the converter dropped of the encoding in `folder`; False where it dropped nothing.

    Raises `CheckpointError` for files that cannot be read or written, `UnsupportedError` without the package gguf.
    """
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError("GGUF files need the package gguf: pip install 'hf_posenc[gguf]'") from error
    found = read_rotation(Path(folder))
    if found is None or not completed(found[0], found[1]):
        return False
    tensors, values = additions(*found)
    try:
        reader = gguf.GGUFReader(str(file), "r")
        architecture = reader.fields["general.architecture"].contents()
        values = {f"{architecture}.rope.{name}": value for name, value in values.items()}
        handle, beside = tempfile.mkstemp(prefix=".gguf.", dir=Path(file).resolve().parent)
        os.close(handle)
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{file} is no GGUF file that can be completed: {error}") from error
    try:
        rewrite(gguf, reader, gguf.GGUFWriter(beside, architecture), tensors, values)
        os.replace(beside, file)
    finally:
        Path(beside).unlink(missing_ok=True)
    return True


def rewrite(gguf: Any, reader: Any, writer: Any, tensors: dict[str, Any], values: dict[str, Any]) -> None:
    """A copy of the file with some tensors more, and with other values in some fields."""
    for field in reader.fields.values():
        if field.name in (*_OWN_FIELDS, *values, *writer.kv_data[0]):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
        if field.name == _ALIGNMENT:
            writer.data_alignment = field.contents()
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for name, value in values.items():
        if value is not None:
            add[type(value)](name, value)
    for name, factors in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(factors, dtype=np.float32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hf_posenc.exporting.gguf_file", description=__doc__)
    parser.add_argument("file", help="what convert_hf_to_gguf.py wrote")
    parser.add_argument("folder", help="the exported folder that it was made of")
    given = parser.parse_args()
    print("completed" if complete(given.file, given.folder) else "nothing was missing")


if __name__ == "__main__":
    main()
