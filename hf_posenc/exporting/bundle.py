"""The one Python file that an exported model brings along: this package's own sources, put together.

What is shipped is what ran here: the modules that a patch needs, found by following their imports, one after another
with the imports among them taken out. So every formula exists once, and nothing is written for a second time.
Top-level names must therefore be unique over those modules, which is checked; modules that are used as namespaces
(`frequencies.rope`) become one.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import types
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_imports

from hf_posenc.errors import UnsupportedError
from hf_posenc.patches import Patch

PACKAGE = "hf_posenc"
RUNTIME = f"{PACKAGE}.exporting.runtime"  # what an exported model does in its constructor

# names under which attention functions are registered: others in every version, as two may meet in one process
_REGISTERED = re.compile(r"\bposenc_(?=sdpa|eager|flex_attention|[\"'{])")
_OWN_NAMES = re.compile(r"\bposenc_[0-9a-f]{8}_")


@dataclass
class Module:
    """One module, taken apart: its own code, and what it imports from within and from without."""

    name: str
    summary: str
    code: str
    within: list[str] = field(default_factory=list)
    namespaces: dict[str, str] = field(default_factory=dict)  # alias → module, for `from . import frequencies`
    aliases: dict[str, str] = field(default_factory=dict)  # `from .x import a as b`
    without: list[ast.stmt] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    passed_on: list[str] = field(default_factory=list)  # names from within, as a package's own file imports them


def is_ours(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a module goes into the file: this package, and a patch that comes from elsewhere."""
    return name == PACKAGE or name.startswith(f"{PACKAGE}.") or name in roots


@cache
def take_apart(name: str, roots: tuple[str, ...]) -> Module:
    """Read a module's source and cut out what cannot stand in one file; `roots`: those outside of this package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UnsupportedError(f"the source of {name} is not at hand, so it cannot go into an exported model")
    text = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(text)
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    module = Module(name, (ast.get_docstring(tree) or name).splitlines()[0], "")
    cut: list[ast.stmt] = []
    if ast.get_docstring(tree) is not None:
        cut.append(tree.body[0])
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            cut.append(node)
            if not take_import(module, node, package, roots) and getattr(node, "module", "") != "__future__":
                module.without.append(node)
        elif is_for_checkers(node) or is_list_of_names(node):
            cut.append(node)
        else:
            module.names += defined(node)
            cut += [inner for inner in ast.walk(node) if take_inner_import(module, inner, package, roots)]  # type: ignore[misc]
    module.code = without_nodes(text, cut)
    return module


def take_import(module: Module, node: Any, package: str, roots: tuple[str, ...]) -> bool:
    """Note an import from within; False for one from without."""
    if not isinstance(node, ast.ImportFrom):
        return False
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    if not is_ours(base, roots):
        return False
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        is_package = importlib.util.find_spec(base).submodule_search_locations is not None  # type: ignore[union-attr]
        if is_package and importlib.util.find_spec(inner) is not None:
            module.within.append(inner)
            module.namespaces[alias.asname or alias.name] = inner
        else:
            module.within.append(base)
            module.passed_on.append(alias.asname or alias.name)
            if alias.asname and alias.asname != alias.name:
                module.aliases[alias.asname] = alias.name
    return True


def take_inner_import(module: Module, node: ast.AST, package: str, roots: tuple[str, ...]) -> bool:
    """An import from within that stands in a function."""
    return isinstance(node, ast.ImportFrom) and take_import(module, node, package, roots)


def is_for_checkers(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:`"""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_list_of_names(node: ast.stmt) -> bool:
    """`__all__ = […]`"""
    return isinstance(node, ast.Assign) and defined(node) == ["__all__"]


def defined(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def without_nodes(text: str, nodes: list[ast.stmt]) -> str:
    """The text without the lines of some statements, and without holes."""
    gone = {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in gone]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip("\n")


def collect(roots: tuple[str, ...]) -> list[Module]:
    """The modules that `roots` need, every one after those that it imports."""
    done: dict[str, Module | None] = {}
    foreign = tuple(root for root in roots if not is_ours(root, ()))

    def visit(name: str) -> None:
        if name in done or name == PACKAGE:
            return
        done[name] = None
        module = take_apart(name, foreign)
        for inner in module.within:
            visit(inner)
        del done[name]
        done[name] = module

    for root in roots:
        visit(root)
    return [module for module in done.values() if module is not None]


def outside_imports(modules: list[Module]) -> str:
    """All imports from without, each name once."""
    plain: dict[str, None] = {}
    names: dict[str, set[tuple[str, str | None]]] = {}
    for node in (node for module in modules for node in module.without):
        if isinstance(node, ast.ImportFrom):
            names.setdefault(node.module or "", set()).update((a.name, a.asname) for a in node.names)
        else:
            plain[ast.unparse(node)] = None
    lines = sorted(plain)
    for module, found in sorted(names.items()):
        listed = ", ".join(f"{name} as {alias}" if alias else name for name, alias in sorted(found, key=str))
        lines.append(f"from {module} import {listed}")
    return "\n".join(lines)


def check_names(modules: list[Module]) -> None:
    """Raise where two modules define one name."""
    owner: dict[str, str] = {}
    for module in modules:
        for name in dict.fromkeys(module.names):
            if name.startswith("__") or name == "_function":
                continue
            if name in owner:
                raise UnsupportedError(
                    f"{owner[name]} and {module.name} both define {name}, so they cannot stand in one file; rename one"
                )
            owner[name] = module.name


def joined(roots: tuple[str, ...]) -> str:
    """The sources of `roots` and all that they need, as one module."""
    modules = collect(roots)
    check_names(modules)
    by_name = {module.name: module for module in modules}
    used_as_namespace = {inner: alias for module in modules for alias, inner in module.namespaces.items()}
    parts = ["from __future__ import annotations", "import types\n" + outside_imports(modules)]
    for module in modules:
        lines = [f"{alias} = {name}" for alias, name in module.aliases.items()]
        lines += [module.code] if module.code.strip() else []
        alias = used_as_namespace.get(module.name)
        if alias is not None:
            held = dict.fromkeys(by_name[module.name].names + by_name[module.name].passed_on)
            members = ", ".join(f"{name}={name}" for name in held)
            lines.append(f"{alias} = types.SimpleNamespace({members})")
        if lines:
            parts.append(f"# {module.name}: {module.summary}")
            parts += lines
    text = "\n\n\n".join(parts) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return _REGISTERED.sub(f"posenc_{digest}_", text)


def roots_of(patch: Patch) -> tuple[str, ...]:
    """The modules from which a patch's code can be reached."""
    values = [type(patch), *(type(value) for value in vars(patch).values())]
    found = [cls.__module__ for cls in values if cls.__module__ != "builtins"]
    return (*dict.fromkeys(found), RUNTIME)


def modelling_file(patch: Patch, config_class: Any, model_classes: list[type], version: str, prefix: str) -> str:
    """The whole file: sources, the patch of this host, its config class, and its model classes."""
    kind = type(patch)
    state = ", ".join(f"{name}={value!r}" for name, value in vars(patch).items())
    parts = [
        f'"""Made by hf_posenc {version} (Apache-2.0): a host of Transformers with another position encoding.\n\n'
        "What the encoding is, and its numbers, stand in config.json under `hf_posenc`. Needs torch and Transformers,\n"
        'and nothing else. The sources of that package, put together; the classes are at the end."""',
        joined(roots_of(patch)),
        "# the host, and the classes that config.json names\n",
        f"def host_patch() -> Patch:\n    patch = {kind.__name__}.__new__({kind.__name__})\n"
        f"    patch.__dict__.update({state})\n    return patch\n",
        stock_import(config_class),
        f"class {prefix}{config_class.__name__}(MarkedOnDisk, {config_class.__name__}):\n"
        f'    """{config_class.__name__} with the record of an encoding."""\n',
    ]
    for model_class in model_classes:
        parts += [stock_import(model_class), subclass(model_class, f"{prefix}{config_class.__name__}", prefix)]
    return "\n\n".join(parts)


def prove_file(file: Path) -> None:
    """Load the file as whoever is given it will; raises `UnsupportedError` where that cannot be done."""
    needed = set(get_imports(file)) - set(sys.stdlib_module_names) - {"torch", "transformers"}
    if needed:
        raise UnsupportedError(
            f"the modelling file that was put together imports {', '.join(sorted(needed))}, which Transformers asks "
            "for before it loads it; an exported model needs torch and Transformers alone, so import that by importlib"
        )
    run_once(file.read_text(encoding="utf-8"))


@cache
def run_once(text: str) -> None:
    """Execute the file's text under names of its own: attention functions of a model that is loaded from such a file,
    which may be there, stay what they are.
    """
    trial = types.ModuleType("posenc_trial")
    sys.modules[trial.__name__] = trial  # where `dataclass` looks names up
    try:
        exec(compile(_OWN_NAMES.sub("posenc_trial_", text), "<exported>", "exec"), vars(trial))
    except Exception as error:  # a source that cannot stand in one file may raise anything
        raise UnsupportedError(
            f"the modelling file that was put together cannot be imported ({type(error).__name__}: {error}); a module "
            "that a patch needs uses what one file cannot give it: import names, not modules, there"
        ) from error
    finally:
        del sys.modules[trial.__name__]


def stock_import(cls: type) -> str:
    """The line that imports a class of the host library."""
    return f"from {inspect.getmodule(cls).__name__} import {cls.__name__}"  # type: ignore[union-attr]


def subclass(model_class: type, config_name: str, prefix: str) -> str:
    """The class of an exported model: the host's own, and the encoding put in by its constructor."""
    name = f"{prefix}{model_class.__name__}"
    return (
        f"class {name}({model_class.__name__}):\n"
        f'    """{model_class.__name__} with the encoding of its config."""\n\n'
        f"    config_class = {config_name}\n\n"
        "    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:\n"
        "        super().__init__(config, *args, **kwargs)\n"
        "        put_in(self, host_patch())\n"
    )
