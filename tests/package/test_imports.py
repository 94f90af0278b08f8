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
    "relax": {"base", "config", "compiler"},
    "bundle": {"base", "config", "cache", "compiler"},
    "models": {"base", "config", "cache", "compiler", "distributed", "bundle"},
    "generation": {"base", "config", "cache", "transfer", "models"},
    "mlc": {"config", "distributed", "relax"},
}
# The package itself and the former names of modules: on top of everything, imported by nothing.
TOP = {"__init__", "disaggregated", "disco"}


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
    return [file for file in ROOT.rglob("*.py") if file.stem not in TOP or file.parent != ROOT]


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
        ("cache/new.py", "import tvm_pagedkv.models", "cache may not import models"),
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


@pytest.mark.parametrize("name", ["disco", "disaggregated"])
def test_former_names_of_modules_work(name):
    folder = {"disco": "distributed", "disaggregated": "generation"}[name]
    former = importlib.import_module(f"tvm_pagedkv.{name}")
    assert former is importlib.import_module(f"tvm_pagedkv.{folder}.{name}")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
