# SPDX-License-Identifier: Apache-2.0
"""The wall between the cache and the language models: what `tvm_pagedkv_lm` may import."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tvm_pagedkv
import tvm_pagedkv_lm
from tvm_pagedkv_lm.families.registry import FAMILIES

ROOT = Path(tvm_pagedkv_lm.__file__).parent

# Each folder and the folders it may use, which stand above it; so there is no cycle.
MAY_IMPORT: dict[str, set[str]] = {
    "formats": set(),
    "config": {"formats"},
    "kernels": {"config", "formats"},
    "weights": {"config", "formats"},
    "blocks": {"config", "kernels", "weights"},
    "text": {"config"},
    "gguf": {"config", "formats", "text"},
    "families": {"blocks", "config", "gguf", "weights"},
    "model": {"blocks", "config", "families", "formats", "gguf", "kernels", "text", "weights"},
    "parallel": {"blocks", "config", "model", "text"},
    "engine": {"model", "text"},
    "cli": {"engine", "model", "parallel", "text"},
}
# Of kernels: specs of types, and for kernels, what those for any target are written with, and the
# instructions of CPUs.
SPECS = {"tir_kernels", "tir_kernels.spec", "tir_kernels.codec"}
KERNEL_PARTS = ("define", "script", "semantics", "targets", "cpu.isa")


class Import(NamedTuple):
    """``from module import name``, or ``import module``, with absolute names."""

    file: Path
    module: str
    name: str | None

    @property
    def folder(self) -> str:
        return self.file.relative_to(ROOT).parts[0]


def imports(file: Path, text: str) -> Iterator[Import]:
    """What a file imports, within functions too."""
    inside = (ROOT.name, *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            base = list(inside[: len(inside) + 1 - node.level]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield from (Import(file, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Import(file, alias.name, None) for alias in node.names)


def fault(each: Import) -> str | None:
    """What is wrong with an import; None if nothing is."""
    line = f"{each.file.relative_to(ROOT)} imports {each.name or ''} of {each.module}"
    top, *rest = [*each.module.split("."), *([each.name] if each.name else [])]
    if top == "tvm_pagedkv_lm":
        if rest and rest[0] not in {each.folder, *MAY_IMPORT[each.folder]}:
            return f"{line}: {each.folder} may not import {rest[0]}"
    elif top == "tvm_pagedkv":
        offered = importlib.import_module(each.module)
        if not hasattr(offered, "__path__"):
            return f"{line}: take it from the package, not from its module"
        if each.name is not None and each.name not in {*offered.__all__, *_packages()}:
            return f"{line}: it is not in __all__"
    elif top == "tir_kernels" and each.module not in SPECS:
        if each.folder != "kernels":
            return f"{line}: only kernels use parts of kernels"
        parts = tuple(f"tir_kernels.{part}" for part in KERNEL_PARTS)
        if not any(f"{each.module}.".startswith(f"{part}.") for part in parts):
            return f"{line}: of kernels they may use {', '.join(parts)}"
    return None


def _packages() -> set[str]:
    return {path.parent.name for path in Path(tvm_pagedkv.__file__).parent.glob("*/__init__.py")}


def test_the_table_has_every_folder_and_no_cycle():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(MAY_IMPORT) == folders
    earlier: set[str] = set()
    for folder, allowed in MAY_IMPORT.items():
        assert allowed <= earlier, f"{folder} names folders below it"
        earlier.add(folder)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_table(folder):
    files = [*(ROOT / folder).rglob("*.py")]
    assert files
    found = [each for file in files for each in imports(file, file.read_text())]
    assert not [line for line in map(fault, found) if line]
    used = {e.module.split(".")[1] for e in found if e.module.startswith("tvm_pagedkv_lm.")}
    used |= {e.name for e in found if e.module == "tvm_pagedkv_lm"}
    assert MAY_IMPORT[folder] <= used, "the table allows what nothing uses"


@pytest.mark.parametrize(
    ("file", "statement", "message"),
    [
        ("blocks/new.py", "from ..model.model import DecoderModel", "blocks may not import model"),
        ("config/new.py", "def f():\n    from ..engine import engine", "may not import engine"),
        ("engine/new.py", "from tvm_pagedkv.cache.kv_cache import KVCache", "not from its module"),
        ("engine/new.py", "from tvm_pagedkv import _checks", "it is not in __all__"),
        ("engine/new.py", "from tvm_pagedkv._errors import CacheFullError", "not from its module"),
        ("model/new.py", "from tvm_pagedkv.compiler import sealed_file", "is not in __all__"),
        ("model/new.py", "from tir_kernels.cpu.isa.simd import load", "only kernels use parts"),
        ("kernels/new.py", "from tir_kernels.cpu.worker import items", "of kernels they may use"),
        ("kernels/new.py", "from tir_kernels.cuda.emit import launch", "of kernels they may use"),
    ],
)
def test_a_wrong_import_is_found(file, statement, message):
    (told,) = [line for line in map(fault, imports(ROOT / file, statement)) if line]
    assert message in told


# Kinds of tokenizers and splitters are called after families, too.
TOKENIZERS = {
    *("gguf/special_tokens.py", "gguf/tokenizer.py"),
    *("text/llama_tokenizer.py", "text/splitters.py"),
}


def test_only_files_of_families_ask_for_a_family():
    families = FAMILIES.values()
    names = {name for each in families for name in (each.architecture, each.model_type)}
    names |= {each.gguf.architecture for each in families if each.gguf is not None}
    names -= {"mamba2"}  # also a rule of recurrences
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT)
        if path.parts[0] == "families" or str(path) in TOKENIZERS:
            continue
        nodes = ast.walk(ast.parse(file.read_text()))
        found = {node.value for node in nodes if isinstance(node, ast.Constant)} & names
        assert not found, f"{path} names {found}"


def test_the_cache_does_not_know_the_language_models():
    for file in Path(tvm_pagedkv.__file__).parent.rglob("*.py"):
        assert "tvm_pagedkv_lm" not in file.read_text(), file


def test_every_name_that_the_package_offers_is_there():
    for name in tvm_pagedkv_lm.__all__:
        assert hasattr(tvm_pagedkv_lm, name), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tvm_pagedkv_lm.nothing  # noqa: B018


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
