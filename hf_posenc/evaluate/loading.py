"""Models, tokenizers and texts by the names that a user gives on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_posenc.errors import CheckpointError, OptionError, PosencError, unknown

DEMO = "demo:"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_model(name: str) -> str:
    """What `from_pretrained` understands for `name`: a folder, a hub id, or the folder of `demo:llama|gpt2|bloom`."""
    if not name.strip():
        raise OptionError("the name of the model is empty; give a folder, a hub id, or demo:llama")
    if name.startswith(DEMO):
        from hf_posenc.demo import MODEL_NAMES, model_path

        short = next((known for known in MODEL_NAMES if known == name.removeprefix(DEMO)), None)
        if short is None:
            raise unknown("embedded model", name.removeprefix(DEMO), MODEL_NAMES)
        return str(model_path(short))
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(folder.glob("*.json")) and not any(folder.glob("*.gguf")):
        raise CheckpointError(f"{name} is a folder but holds no config.json, so no model was saved there")
    if not Path(name).expanduser().exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise CheckpointError(f"no such folder: {name}")
    return str(Path(name).expanduser()) if name.startswith("~") else name


def public_name(name: str, gguf_file: str | None = None) -> str:
    """A model's name for a report: a hub id as it is, of a folder its last part (the rest is the machine's own)."""
    short = Path(name).resolve().name if name and Path(name).expanduser().exists() else name or "a model without a name"
    return f"{short}/{gguf_file}" if gguf_file else short


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` as a torch dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def parse_device(device: str | None) -> torch.device:
    """The named device; for None the first GPU where there is one, else the CPU."""
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise OptionError(f"unknown device {device!r} (cpu, cuda, cuda:1, mps)") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices here; give cpu")
    return found


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_model(
    name: str,
    *,
    encoding: str | None = None,
    options: dict[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    gguf_file: str | None = None,
    own_head: bool = False,
) -> Any:
    """The causal language model `name` in eval mode, with `encoding`, or else with the patch that its folder holds.

    `own_head`: with the head that the checkpoint names, whichever that is.
    """
    from transformers import AutoModelForCausalLM

    import hf_posenc

    kwargs: dict[str, Any] = {} if encoding is None else {"encoding": encoding, "options": options}
    kwargs |= {"dtype": dtype if dtype == "auto" else parse_dtype(dtype)}
    kwargs |= {} if own_head else {"auto_class": AutoModelForCausalLM}
    if gguf_file:
        kwargs["gguf_file"] = gguf_file
    place, what = parse_device(device), "a model" if own_head else "a causal language model"
    try:
        model = hf_posenc.from_pretrained(resolve_model(name), **kwargs)
        return model.eval().to(place)
    except PosencError:
        raise
    except ImportError as error:
        raise OptionError(f"cannot load {name!r}: {_first_line(error)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {what} from {name!r}: {_first_line(error)}") from error


def load_tokenizer(name: str, *, gguf_file: str | None = None) -> Any:
    """The tokenizer that lies beside the model `name`."""
    from transformers import AutoTokenizer

    kwargs = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name), **kwargs)
    except PosencError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"cannot load a tokenizer from {name!r}: {_first_line(error)}") from error


def trained_length(config: Any) -> int | None:
    """Number of tokens that the model was pretrained on, as its config states it; None where it does not (BLOOM)."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(config, "rope_parameters", None) or {}
    candidates = [rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None]
    names = ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "max_seq_len")
    candidates += [getattr(config, name, None) for name in names]
    return next((int(n) for n in candidates if n), None)
