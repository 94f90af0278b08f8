# SPDX-License-Identifier: Apache-2.0
"""The folders of the C++ runtime are components: their includes point one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "runtime_ext"
# Bottom up. A folder may include those of lower levels and itself.
LEVELS = [
    {"base"},
    {"state/pages"},
    {"state/host_memory"},
    {"state/prefix_tree"},
    {"state/sequences"},
    {"state/prefix_cache"},
    {"state/table"},
    {"state/plans"},
    {"device"},
    {"config"},
    {"storage"},
    {"step"},
    {"prefixes"},
    {"attention", "checkpoint", "transfer", "rnn"},
    {"inspect", "bundle"},
    {"ffi"},
]
VENDORED = "third_party/"  # below everything
STANDARD_ONLY = ("base", "state/")
PROGRAMS = {"tests", "fuzz", "bench", "example", "third_party"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def folder_of(path: str) -> str:
    """The component that a file belongs to: `state` has one in each of its folders."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "state" and len(parts) > 2 else parts[0]


def find_violations(root: Path) -> list[str]:
    """Includes that point up or sideways, or to TVM where only the standard library may be."""
    level_of = {folder: i for i, folders in enumerate(LEVELS) for folder in folders}
    violations = []
    for path in sorted([*root.rglob("*.h"), *root.rglob("*.cc")]):
        name = path.relative_to(root)
        folder = folder_of(name.as_posix())
        if folder in PROGRAMS:
            continue
        if folder not in level_of:
            violations.append(f"{name}: the folder has no level")
            continue
        for kind, target in INCLUDE.findall(path.read_text()):
            to = folder_of(target)
            if kind == "<" and to in ("tvm", "dlpack") and folder.startswith(STANDARD_ONLY):
                violations.append(f"{name} includes <{target}>")
            if target.startswith(VENDORED):
                continue
            if kind == '"' and to != folder and level_of.get(to, len(LEVELS)) >= level_of[folder]:
                violations.append(f'{name} includes "{target}"')
    return violations


def test_includes_point_down():
    assert find_violations(RUNTIME) == []


def test_every_level_is_there():
    assert {folder for folders in LEVELS for folder in folders} <= {
        folder_of(path.relative_to(RUNTIME).as_posix()) for path in RUNTIME.rglob("*.h")
    }


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("state/pages/page_pool.h", '"step/step.h"'),  # up
        ("state/pages/page_pool.h", '"state/sequences/sequence.h"'),
        ("transfer/kv_sender.h", '"attention/attention.h"'),  # sideways
        ("state/pages/page_pool.h", "<tvm/ffi/container/tensor.h>"),
        ("step/step.h", '"page_pool.h"'),  # without its folder
        ("new/new.h", "<vector>"),
    ],
)
def test_violations_are_found(tmp_path, path, include):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f"#include {include}\n")
    assert len(find_violations(tmp_path)) == 1


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
