"""Everything about a model and about Transformers that a patch could leave behind, as plain values to compare."""

import inspect
from types import ModuleType
from typing import Any

import torch
from transformers import masking_utils, modeling_utils
from transformers.models.bloom import modeling_bloom
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
_HOST_FILES = (modeling_llama, modeling_gpt2, modeling_bloom, modeling_utils, masking_utils, torch.nn.modules.sparse)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple, type))


def of_module(module: torch.nn.Module) -> dict[str, Any]:
    """Class, instance attributes (plain ones by value, others by identity), hooks, mode."""
    seen = {key: value if _is_plain(value) else id(value) for key, value in vars(module).items()}
    hooks = {key: [id(hook) for hook in getattr(module, key).values()] for key in _HOOKS}
    flags = {key: list(value) for key, value in vars(module).items() if key.startswith("_forward") and "_hooks" in key}
    children = {key: id(child) for key, child in module._modules.items()}
    return {"class": type(module), "attributes": seen, "hooks": hooks, "flags": flags, "children": children}


def bits(tensor: torch.Tensor) -> bytes:
    """What is in the memory of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def of_model(model: Any) -> dict[str, Any]:
    """All modules, all tensors bit for bit (also buffers that are not saved), and the config."""
    tensors = {**model.state_dict(), **dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modules": {name: of_module(module) for name, module in model.named_modules()},
        "keys": list(model.state_dict()),
        "tensors": {key: (value.data_ptr(), value.dtype, value.shape, bits(value)) for key, value in tensors.items()},
        "config": model.config.to_dict(),
        "config attributes": {key: repr(value) for key, value in vars(model.config).items()},
        "generation config": model.generation_config.to_dict(),
    }


def of_transformers() -> dict[str, int]:
    """Functions and classes of the hosts' files, the attributes of those classes, and the stock attention functions."""
    found: dict[str, int] = {}
    for file in _HOST_FILES:
        for name, value in vars(file).items():
            if callable(value) or isinstance(value, (dict, ModuleType)):
                found[f"{file.__name__}.{name}"] = id(value)
            if inspect.isclass(value) and value.__module__ == file.__name__:
                parts = {key: id(part) for key, part in vars(value).items() if not key.startswith("__")}
                found |= {f"{file.__name__}.{name}.{key}": part for key, part in parts.items()}
    for name in ("sdpa", "eager", "flex_attention"):
        for table in (modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS):
            found[f"{type(table).__name__}[{name}]"] = id(table.get(name))
    return found
