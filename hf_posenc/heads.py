"""Which head a checkpoint has: the class of the host library that loads it, and the auto class that finds that one."""

from __future__ import annotations

from typing import Any

import transformers

CAUSAL = "AutoModelForCausalLM"
_LAST = ("AutoModelForPreTraining", "AutoModelWithLMHead")  # they name classes that others name as well


def auto_classes(host: type, model_class: type) -> list[str]:
    """The auto classes that make a `model_class` of a config of class `host`, the one for causal models first."""
    from transformers.models.auto import modeling_auto

    found = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and not name.startswith("_") and host in mapping and mapping[host] is model_class:
            found.append(name)
    return sorted(found, key=lambda name: (name in _LAST, name != CAUSAL))


def loader_of(config: Any, trust_remote_code: bool = False) -> Any:
    """What loads a checkpoint with the head that its config names; a causal language model's where it names none."""
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and any(name.startswith("AutoModel") for name in remote):
        named = sorted((name for name in remote if name.startswith("AutoModel")), key=lambda name: name != CAUSAL)
        return getattr(transformers, named[0])
    names = getattr(config, "architectures", None) or []
    cls: Any = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        return transformers.AutoModelForCausalLM
    if not isinstance(config, cls.config_class or ()):  # type: ignore[arg-type]
        return transformers.AutoModelForCausalLM
    autos = auto_classes(type(config), cls)
    return getattr(transformers, autos[0], cls) if autos else cls
