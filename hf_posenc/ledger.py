"""The undo ledger: every change a patch makes to a model goes through here, and can be taken back bit for bit.

A change can be toggled: it puts back what was there before and keeps what it took away, so that a patch can also be
set aside for a moment and put back with the very same objects. A ledger is plain data that lives on the patched
instance, so that `copy.deepcopy` and `pickle` of a model carry it along and the copy can be unpatched on its own. It
writes to instances only, never to a class or a module of the host.
"""

from __future__ import annotations

import copy
import enum
import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .errors import StateError
from .offload import without_weights


class Absent(enum.Enum):
    """Stands for "there was no such attribute"; an enum keeps its identity through pickle and deepcopy."""

    ABSENT = enum.auto()


@dataclass
class ClassChange:
    """`module.__class__` was swapped for a subclass of it."""

    module: nn.Module
    other: type[nn.Module]

    def toggle(self) -> None:
        now = type(self.module)
        swap_class(self.module, self.other)
        self.other = now


@dataclass
class AttributeChange:
    """A plain attribute in the instance's `__dict__` was set."""

    owner: Any
    name: str
    other: Any

    def toggle(self) -> None:
        now = self.owner.__dict__.pop(self.name, Absent.ABSENT)
        if self.other is not Absent.ABSENT:
            self.owner.__dict__[self.name] = self.other
        self.other = now


@dataclass
class ModuleChange:
    """A submodule was replaced (or added, where there was None)."""

    parent: nn.Module
    name: str
    other: nn.Module | None

    def toggle(self) -> None:
        modules = self.parent._modules
        now = modules.get(self.name)
        if self.other is None:
            modules.pop(self.name, None)
        else:
            if now is not None:
                move_accelerate_hook(now, self.other)
            modules[self.name] = self.other  # in its old place: the order of the state dict is kept, too
        self.other = now


@dataclass
class HookChange:
    """A forward pre-hook (or, with `after`, a forward hook) was registered, ahead of those that were there."""

    module: nn.Module
    hook: Callable[..., Any]
    after: bool = False
    active: bool = False

    def toggle(self) -> None:
        if not self.active:
            if self.after:
                self.module.register_forward_hook(self.hook, with_kwargs=True, always_call=True)
            else:
                self.module.register_forward_pre_hook(self.hook, with_kwargs=True, prepend=True)
        else:
            self._remove()
        self.active = not self.active

    def _remove(self) -> None:
        module, tables = self.module, list[Any]()
        if self.after:
            tables = [module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called]
        else:
            tables = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
        for key in [key for key, hook in tables[0].items() if hook is self.hook]:
            for table in tables:
                table.pop(key, None)


@dataclass
class StateDictHookChange:
    """A hook that is called before the tensors of a module are listed."""

    module: nn.Module
    hook: Callable[..., Any]
    active: bool = False

    def toggle(self) -> None:
        if self.active:
            hooks = self.module._state_dict_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is self.hook]:
                del hooks[key]
        else:
            self.module.register_state_dict_pre_hook(self.hook)
        self.active = not self.active


@dataclass
class Ledger:
    """The changes made so far, oldest first."""

    changes: list[Any] = field(default_factory=list)

    def swap_class(self, module: nn.Module, expected: type[nn.Module], new: type[nn.Module]) -> None:
        """Make `module` an instance of `new`, a subclass of `expected`; raise `StateError` if it is no `expected`."""
        if type(module) is not expected:
            raise StateError(
                f"found a {type(module).__module__}.{type(module).__qualname__} where a stock {expected.__qualname__} "
                "is needed; another tool has replaced it. Patch the model before that tool, or load it anew"
            )
        self._make(ClassChange(module, new))

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set a plain attribute of `owner` in its instance `__dict__`."""
        self._make(AttributeChange(owner, name, value))

    def set_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace (or add) the submodule `name` of `parent`, keeping its mode and accelerate's hook."""
        module.train(parent.training)
        self._make(ModuleChange(parent, name, module))

    def add_pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register `hook(module, args, kwargs)` before `module.forward`, ahead of the hooks that are already there."""
        self._make(HookChange(module, hook))

    def add_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register `hook(module, args, kwargs, output)` after `module.forward`, called also when that raises."""
        self._make(HookChange(module, hook, after=True))

    def add_state_dict_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register `hook(module, prefix, keep_vars)` before the tensors of `module` are listed, as for saving."""
        self._make(StateDictHookChange(module, hook))

    def _make(self, change: Any) -> None:
        change.toggle()
        self.changes.append(change)

    def own_config(self, root: nn.Module, config: Any) -> Any:
        """A copy of `config`, bound everywhere under `root` where that very object was.

        Two models made from one config object share it; editing it in place would change the other one.
        """
        own = copy.deepcopy(config)
        for module in root.modules():
            for name in [name for name, value in vars(module).items() if value is config]:
                self.set_attribute(module, name, own)
        return own

    def undo(self) -> None:
        """Take everything back, newest change first."""
        while self.changes:
            self.changes.pop().toggle()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Everything taken back for the length of a `with` block, and put back after it with the same objects."""
        for change in reversed(self.changes):
            change.toggle()
        try:
            yield
        finally:
            for change in self.changes:
                change.toggle()


def swap_class(module: nn.Module, new: type[nn.Module]) -> None:
    """`module.__class__ = new`, also where accelerate has put its own `forward` on the instance around the old one."""
    module.__class__ = new
    if "_old_forward" in module.__dict__:
        module.__dict__["_old_forward"] = types.MethodType(new.forward, module)


def move_accelerate_hook(old: nn.Module, new: nn.Module) -> None:
    """Give accelerate's device hook of `old` to the module that takes its place."""
    if hasattr(old, "_hf_hook") and not hasattr(new, "_hf_hook"):
        hooks = importlib.import_module("accelerate.hooks")  # not `import`: exported models run without accelerate
        hooks.add_hook_to_module(new, without_weights(old._hf_hook))
