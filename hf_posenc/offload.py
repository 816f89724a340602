"""Weights that are not here in whole: moved away by accelerate (`device_map`) until their call, or sharded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def held(module: nn.Module, name: str = "weight") -> Tensor:
    """The whole tensor `name` of `module`; every process asks for one that is sharded."""
    tensor: Any = getattr(module, name)
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if not tensor.is_meta:
        return tensor
    for hook in accelerate_hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            return weights[name].to(hook.execution_device)
    return tensor


def accelerate_hooks(module: nn.Module) -> list[Any]:
    """The hooks that accelerate has put on a module; several are held by one."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def execution_device(module: nn.Module) -> torch.device:
    """Where a module that has weights computes, though they may have been moved away."""
    tensor = next(module.parameters())
    if tensor.is_meta:
        found = [
            hook.execution_device
            for part in module.modules()
            for hook in accelerate_hooks(part)
            if getattr(hook, "execution_device", None) is not None
        ]
        return torch.device(found[0]) if found else tensor.device
    return tensor.device


def is_offloaded(model: nn.Module) -> bool:
    """Whether a part of a model waits elsewhere for its call: the host library then warns of gathering it."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return (len(places) > 1 and not places.isdisjoint(("cpu", "disk"))) or any(p.is_meta for p in model.parameters())


def without_weights(hook: Any) -> Any:
    """The same hook for a module that keeps its own tensors: what is kept elsewhere belongs to the one before it."""
    own = copy.copy(hook)
    if hasattr(own, "hooks"):
        own.hooks = tuple(without_weights(one) for one in own.hooks)
    if hasattr(own, "weights_map"):
        own.offload, own.weights_map, own.tied_params_map = False, None, None
    return own


def in_a_data_parallel_wrap(model: nn.Module) -> bool:
    """Whether the gradients of a model are shared between processes already: a new parameter's would not be."""
    wraps = ("DistributedDataParallel", "FullyShardedDataParallel")
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return sharded or any(type(module).__name__ in wraps for module in model.modules())
