"""`AutoModelForCausalLM.from_pretrained` of a patched checkpoint, where this package has been imported.

Marked checkpoints have model types of their own (`hf_posenc.marking`). They are registered with the host library's
auto classes, beside its own and through its own API, once its table of models has been imported: `import hf_posenc`
alone imports neither torch nor Transformers.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from typing import Any

_TABLE = "transformers.models.auto.modeling_auto"


class _AfterTable(MetaPathFinder):
    """Registers once the host library's table of models has been imported; looks at that one module, once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The spec that the others find, with a loader that registers afterwards."""
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module
                execute(module)
                try_register()

            loader.exec_module = exec_module
        return spec


def register_on_import() -> None:
    """Register now, or as soon as the host library's table of models is imported."""
    if _TABLE in sys.modules:
        try_register()
    elif not any(type(finder).__name__ == _AfterTable.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())


def try_register() -> None:
    """Register; a host library that we do not understand is not to fail on import because of us."""
    with suppress(Exception):
        register()


def register() -> None:
    """Register the model types of marked checkpoints for every architecture that can be patched."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .marking import OWN_TYPE
    from .patches import list_architectures

    for model_type in list_architectures():
        if OWN_TYPE + model_type not in CONFIG_MAPPING and model_type in CONFIG_MAPPING:
            AutoConfig.register(OWN_TYPE + model_type, stand_in(model_type))


@cache
def stand_in(model_type: str) -> Any:
    """What stands in the table for `posenc_<model_type>` until one is read: the host's file is not imported before."""
    from transformers import PretrainedConfig

    from .marking import OWN_CLASS, OWN_TYPE

    def from_dict(cls: Any, /, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return known_config(model_type).from_dict(config_dict, **kwargs)

    members = {"model_type": OWN_TYPE + model_type, "from_dict": classmethod(from_dict), "__module__": __name__}
    return type(f"{OWN_CLASS}Config", (PretrainedConfig,), members)


@cache
def known_config(model_type: str) -> Any:
    """The config class of a marked checkpoint, which the auto classes load through `hf_posenc.from_pretrained`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .marking import OWN_CLASS, MadeConfig

    host: Any = CONFIG_MAPPING[model_type]
    members = {"host": host, "how": (known_config, model_type), "__module__": __name__}
    config_class = type(f"{OWN_CLASS}{host.__name__}", (MadeConfig, host), members)
    register_loaders(config_class, host)
    return config_class


@cache
def register_loaders(config_class: Any, host: Any) -> None:
    """Let `AutoModel….from_config` of a `config_class`, which is a patched `host`, make a patched model."""
    from transformers.models.auto import modeling_auto

    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and host in mapping and isinstance(mapping[host], type):
            auto.register(config_class, loader(auto, mapping[host], config_class), exist_ok=True)


def loader(auto: Any, model_class: type, config_class: type) -> type:
    """What `auto` finds for a marked checkpoint: loads it patched, as a `model_class` or by trusted code beside it."""
    from .marking import OWN_CLASS, foreign_code, plain

    def from_pretrained(cls: Any, /, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        from .checkpoint import from_pretrained

        for passed_down in ("adapter_kwargs", "_from_auto", "_commit_hash"):
            kwargs.pop(passed_down, None)
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        return from_pretrained(path, auto_class=auto, config=config, **kwargs)

    def from_config(cls: Any, /, config: Any, **kwargs: Any) -> Any:
        from . import record
        from .checkpoint import restore_base
        from .patching import patch_model

        own = plain(copy.deepcopy(config))
        code = foreign_code(own, auto.__name__)
        if code is not None:
            warnings.warn(
                f"this config names code of its own ({code}), and {auto.__name__}.from_config of a patched one makes a "
                f"{model_class.__name__}; load that model with hf_posenc.from_pretrained(…, trust_remote_code=True)",
                stacklevel=3,
            )
        saved = record.read(own)
        if saved is None:
            return model_class._from_config(own, **kwargs)  # type: ignore[attr-defined]
        restore_base(own, saved)
        return patch_model(model_class._from_config(own, **kwargs), saved.encoding())  # type: ignore[attr-defined]

    members: dict[str, Any] = {"config_class": config_class, "__module__": __name__}
    members |= {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
    return type(f"{OWN_CLASS}{model_class.__name__}", (model_class,), members)
