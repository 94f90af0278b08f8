# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: one table, compared with every import statement."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tvm_pagedkv

ROOT = Path(tvm_pagedkv.__file__).parent

# Each package and what it may import of the others; "base" are the modules beside the packages.
# A package may name only packages above its own line, so there is no cycle.
MAY_IMPORT = {
    "base": set(),
    "stores": {"base"},
    "config": {"base", "stores"},
    "cache": {"base", "stores", "config"},
    "compiler": {"config", "cache"},
    "measure": {"base", "compiler"},
    "page": {"base", "compiler"},
    "distributed": set(),
    "transfer": {"base", "cache"},
    "relax": {"config", "compiler"},
    "bundle": {"base", "config", "cache", "compiler"},
    "mlc": {"config", "distributed", "relax"},
}


class Import(NamedTuple):
    """``from module import name`` in a file; `module` is relative to the package."""

    file: Path
    module: str
    name: str | None

    @property
    def package(self) -> str:
        return _package(self.module.split(".")[0])


def _package(name: str) -> str:
    return name if (ROOT / name).is_dir() else "base"


def imports(file: Path, text: str) -> Iterator[Import]:
    """What a file imports of `tvm_pagedkv`, within functions too."""
    inside = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*inside[: len(inside) + 1 - node.level]]
            parts += node.module.split(".") if node.module else []
            for alias in node.names:
                if parts:
                    yield Import(file, ".".join(parts), alias.name)
                else:  # from .. import module
                    yield Import(file, alias.name, None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tvm_pagedkv"):
            module = node.module.partition(".")[2]
            for alias in node.names:
                yield Import(file, module or alias.name, alias.name if module else None)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tvm_pagedkv."):
                    yield Import(file, alias.name.partition(".")[2], None)


def faults(found: Iterator[Import]) -> list[str]:
    """What is wrong with imports: a direction, or a name that is not offered."""
    told = []
    for each in found:
        relative = each.file.relative_to(ROOT)
        own = relative.parts[0] if len(relative.parts) > 1 else "base"
        if own == each.package:
            continue
        line = f"{relative} imports {each.name or ''} of {each.module}"
        if each.package not in MAY_IMPORT[own]:
            told.append(f"{line}: {own} may not import {each.package}")
        elif each.package != "base":
            offered = importlib.import_module(f"tvm_pagedkv.{each.module}")
            if not hasattr(offered, "__path__"):
                told.append(f"{line}: take it from the package, not from its module")
            elif each.name not in offered.__all__:
                told.append(f"{line}: it is not in __all__")
    return told


def _files() -> list[Path]:
    """All but the package's face, which is on top of everything and imported by nothing."""
    return [file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py"]


def test_the_table_has_every_package_and_no_cycle():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(MAY_IMPORT) == packages | {"base"}
    earlier: set[str] = set()
    for package, allowed in MAY_IMPORT.items():
        assert allowed <= earlier, f"{package} names packages below it"
        earlier.add(package)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_table(package):
    of_package = [f for f in _files() if _package(f.relative_to(ROOT).parts[0]) == package]
    assert of_package
    assert not [line for f in of_package for line in faults(imports(f, f.read_text()))]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_line_of_the_table_is_left_over(package):
    """What the table allows happens somewhere, or the table says more than is so."""
    files = [f for f in _files() if _package(f.relative_to(ROOT).parts[0]) == package]
    used = {each.package for f in files for each in imports(f, f.read_text())}
    assert MAY_IMPORT[package] <= used


@pytest.mark.parametrize(
    ("file", "statement", "message"),
    [
        ("config/new.py", "from ..cache import KVCache", "config may not import cache"),
        ("config/new.py", "from tvm_pagedkv.cache import KVCache", "config may not import cache"),
        ("cache/new.py", "import tvm_pagedkv.bundle", "cache may not import bundle"),
        ("_new.py", "def f():\n    from .config import DTYPES", "base may not import config"),
        ("transfer/new.py", "from ..cache.kv_cache import KVCache", "not from its module"),
        (
            "compiler/cuda/new.py",
            "from ...page import get_seq_lens",
            "compiler may not import page",
        ),
        ("relax/new.py", "from ..compiler import sealed_file", "is not in __all__"),
    ],
)
def test_a_wrong_import_is_found(file, statement, message):
    (told,) = faults(imports(ROOT / file, statement))
    assert message in told


# --- the way from a configuration to loaded kernels ---------------------------------------------

# Files of `compiler`, from the bottom up: each may import only those before it. So `create` builds
# and loads, `build` chooses kernels, `cuda` and `lowering` compile them, `disk_cache` keeps them.
COMPILER = (
    *("bfloat16_loads", "cache_folder", "codec_cost", "cpu_classes", "progress", "targets"),
    "recurrent_specs",
    *(
        "disk_cache",
        "tasks",
        "plain_tir",
        "lowering",
        "cuda",
        "build",
        "scratch",
        "create",
        "__init__",
    ),
)
CUDA = ("library", "rewrite", "runtime", "source", "families", "build", "objects", "__init__")


def climbs(folder: str, order: tuple[str, ...], texts: dict[Path, str]) -> list[str]:
    """Imports within a folder that are not of a name before the importing one in `order`."""
    found = []
    for file, text in texts.items():
        own = file.relative_to(ROOT / folder).with_suffix("").parts[0]
        for each in imports(file, text):
            inner = each.module.removeprefix(folder.replace("/", ".")).strip(".")
            if inner == each.module or (not inner and each.name is None):
                continue
            name = inner.split(".")[0] or each.name
            if name != own and order.index(name) >= order.index(own):
                found.append(f"{file.relative_to(ROOT)} imports {name}")
    return found


@pytest.mark.parametrize(
    ("folder", "order"), [("compiler", COMPILER), ("compiler/cuda", CUDA)], ids=["all", "cuda"]
)
def test_kernels_are_built_in_one_direction(folder, order):
    files = [*(ROOT / folder).rglob("*.py")]
    assert {f.relative_to(ROOT / folder).with_suffix("").parts[0] for f in files} == {*order}
    assert climbs(folder, order, {file: file.read_text() for file in files}) == []


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("compiler/cuda/source.py", "from ..build import kernel_spec"),
        ("compiler/disk_cache.py", "from .lowering import KernelObjects"),
        ("compiler/lowering.py", "def f():\n    from .cuda import cuda_source"),
        ("compiler/targets.py", "from . import disk_cache"),
    ],
)
def test_a_climb_is_found(file, statement):
    (found,) = climbs("compiler", COMPILER, {ROOT / file: statement})
    assert found.startswith(file)


# --- circles ------------------------------------------------------------------------------------


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other in a loop: each reaches all others of its circle."""
    reach = {}
    for start in arrows:
        reach[start], waiting = set(), [*arrows[start]]
        while waiting:
            file = waiting.pop()
            if file not in reach[start]:
                reach[start].add(file)
                waiting += arrows[file]
    loops = {
        tuple(sorted(other for other in reach[file] if file in reach[other]))
        for file in arrows
        if file in reach[file]
    }
    return sorted(map(list, loops))


def arrows_of(texts: dict[Path, str]) -> dict[str, set[str]]:
    """Which file imports which: imports for type checkers and those within functions as well."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in texts}
    arrows: dict[str, set[str]] = {module: set() for module in modules}
    for module, file in modules.items():
        for each in imports(file, texts[file]):
            names = (f"{each.module}.{each.name}", each.module, f"{each.module}.__init__")
            arrows[module].update([name for name in names if name in modules][:1])
    return arrows


def test_no_files_import_each_other_in_a_circle():
    assert circles(arrows_of({file: file.read_text() for file in ROOT.rglob("*.py")})) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from .whole import Whole",
        "from . import whole",
        "import tvm_pagedkv.cache.whole",
        "def f():\n    from .whole import Whole",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .whole import Whole",
    ],
)
def test_a_circle_is_found(statement):
    whole = "from .middle import Middle"
    texts = {"whole": whole, "middle": "from .part import Part", "part": statement, "user": whole}
    paths = {ROOT / "cache" / f"{name}.py": text for name, text in texts.items()}
    assert circles(arrows_of(paths)) == [["cache.middle", "cache.part", "cache.whole"]]


# --- names --------------------------------------------------------------------------------------


def test_kernels_import_nothing_of_the_package():
    import tir_kernels

    for file in Path(tir_kernels.__file__).parent.rglob("*.py"):
        assert "tvm_pagedkv" not in file.read_text().replace("libtvm_pagedkv", ""), file


def test_every_name_that_a_package_offers_is_there():
    for package in MAY_IMPORT.keys() - {"base", "mlc"}:
        module = importlib.import_module(f"tvm_pagedkv.{package}")
        assert module.__doc__
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{package}.{name}"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
