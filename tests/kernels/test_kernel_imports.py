# SPDX-License-Identifier: Apache-2.0
"""The kernels' components import each other in one direction only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tir_kernels

ROOT = Path(tir_kernels.__file__).parent
TARGETS = {"tir_kernels.cpu", "tir_kernels.gpu", "tir_kernels.cuda"}
# Component -> what it must not import. `targets` alone joins them.
FORBIDDEN = {
    "cpu": {"tir_kernels.gpu", "tir_kernels.cuda", "tir_kernels.moves", "tir_kernels.targets"},
    "cpu/rows": {
        "tir_kernels.cpu.attention",
        "tir_kernels.cpu.tiles",
        "tir_kernels.cpu.isa.matrices",
    },
    "gpu": {"tir_kernels.cpu", "tir_kernels.cuda", "tir_kernels.moves", "tir_kernels.targets"},
    "cuda": {"tir_kernels.cpu", "tir_kernels.moves", "tir_kernels.targets"},
    "semantics": {*TARGETS, "tir_kernels.moves", "tir_kernels.targets"},
    "moves": TARGETS,
}


def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, and of what it takes from them."""
    package = ("tir_kernels", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("component", FORBIDDEN)
def test_no_import_against_the_arrows(component):
    files = sorted((ROOT / component).rglob("*.py"))
    assert len(files) > 3
    for path in files:
        for name in imports_of(path):
            for forbidden in FORBIDDEN[component]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{path} imports {name}"


def test_kernels_for_gpus_emit_no_instruction_of_a_target():
    """They ask `gpu.isa` for what a target has its own instructions for."""
    for path in (ROOT / "gpu").rglob("*.py"):
        found = re.findall(
            r"\bptx\b|T\.cuda|call_extern|tvm_warp|ptr_to|CudaTarget", path.read_text()
        )
        assert not found, f"{path} has {found}"


def test_imports_are_found():
    assert "tir_kernels.spec" in imports_of(ROOT / "cpu/attention/mla.py")
    assert "tir_kernels.gpu.rows" in imports_of(ROOT / "targets.py")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
