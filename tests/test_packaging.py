"""The package as it is built: nothing forgotten, nothing imported that need not be, no import that points up."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_posenc"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())

# bottom to top; a module may import from its own layer and from those below it
LAYERS = [
    ["errors", "auto", "marking", "offload", "versions", ""],
    ["encodings"],
    ["registry", "ledger", "rotation", "joined", "late", "views", "viewed", "biases", "flex_bias", "linear_bias"],
    ["attention", "modules", "turned_keys"],
    ["positions", "record", "layout", "heads"],
    ["patches", "formulas", "reference_bias", "eval_tasks"],
    ["adapters"],
    ["patching"],
    ["checkpoint", "owned"],
    ["probe"],
    ["verification", "evaluate", "report", "exporting"],
    ["demo", "finetuning", "search"],
    ["cli", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def sources() -> list[tuple[str, Path]]:
    """(dotted name below hf_posenc, file) of every module, through the tracked links."""
    found = []
    for folder in (PACKAGE, PACKAGE / "patches", PACKAGE / "eval_tasks"):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(PACKAGE).with_suffix("").parts
            found.append((".".join(part for part in parts if part != "__init__"), file))
    return sorted(set(found))


def imports(name: str, file: Path) -> set[str]:
    """The modules of this package that a file imports at its top, as first names below hf_posenc."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    result = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join(["hf_posenc", *[p for p in above if p], *([base] if base else [])])
            if base == "hf_posenc":
                result |= {alias.name for alias in node.names if alias.name in RANK}
            elif base.startswith("hf_posenc."):
                result.add(base.split(".")[1])
    return result


@pytest.mark.parametrize(("name", "file"), [pytest.param(*s, id=s[0] or "hf_posenc") for s in sources()])
def test_no_import_points_up(name: str, file: Path) -> None:
    layer = name.split(".")[0]
    assert layer in RANK, f"{layer} is in no layer: add it to LAYERS"
    for target in imports(name, file):
        assert RANK[target] <= RANK[layer], f"{name} imports {target}, which stands above it"


def test_every_folder_with_code_is_in_the_packages_list() -> None:
    folders = {"hf_posenc"} | {
        f"hf_posenc.{'.'.join(file.parent.relative_to(PACKAGE).parts)}"
        for _, file in sources()
        if file.name == "__init__.py" and file.parent != PACKAGE
    }
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == folders


def test_links_are_relative_and_tracked_as_links() -> None:
    for name in ("patches", "eval_tasks"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def test_import_is_lazy() -> None:
    heavy = "{'torch', 'transformers', 'lm_eval', 'peft', 'matplotlib', 'jinja2', 'accelerate'}"
    assert run(f"import sys, hf_posenc; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_encodings_need_torch_alone() -> None:
    code = "import sys, hf_posenc.encodings; print([m for m in ('transformers', 'numpy.linalg_') if m in sys.modules])"
    assert run(code) == "[]"


def test_the_public_names_are_all_there_and_no_module_hides_one() -> None:
    code = "from hf_posenc import *; import hf_posenc as h; print([n for n in h.__all__ if type(eval(n)) is type(h)])"
    assert run(code) == "[]"


def test_wheel_holds_every_module_and_the_models(tmp_path: Path) -> None:
    copy = tmp_path / "source"  # a build writes beside its sources
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "benchmarks", "demo-results")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    wanted = {f"hf_posenc/{file.relative_to(PACKAGE)}" for _, file in sources()}
    wanted |= {f"hf_posenc/{f.relative_to(PACKAGE)}" for f in (PACKAGE / "demo" / "models").rglob("*.safetensors")}
    wanted |= {
        f"hf_posenc/eval_tasks/harness/{f.name}" for f in (ROOT / "eval_tasks" / "harness").iterdir() if f.is_file()
    }
    wanted.add("hf_posenc/report/report.html.j2")
    assert wanted <= names, sorted(wanted - names)
