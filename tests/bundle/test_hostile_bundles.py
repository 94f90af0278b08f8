# SPDX-License-Identifier: Apache-2.0
"""The functions that load bundles with every wrong argument: an error of the right kind."""

from __future__ import annotations

import hashlib

import pytest
import tvm
import tvm_ffi

import tvm_pagedkv  # noqa: F401  (registers the functions)

from ..support.harness.in_child import failures

load = tvm_ffi.get_global_func("pagedkv.load_bundle")
choose = tvm_ffi.get_global_func("pagedkv.choose_bundle_target")
TARGET = {"name": "a", "device": "cpu", "architecture": "x86_64", "features": ["avx2"]}
MACHINE = {"device": "cpu", "architecture": "x86_64", "features": ["avx2", "fma"]}
GPU_TARGET = TARGET | {
    "device": "cuda", "features": [], "device_code": ["sm_80"], "driver": 1, "driver_for_ptx": 1,
}  # fmt: skip
GPU = MACHINE | {"device": "cuda", "compute_capability": 80, "driver": 13000}
NO_TEXTS = (None, 1, 1.5, [], {}, tvm_ffi.Shape((1,)))
MANIFESTS = (
    "", "{", "[]", "1", "null", "{}", '{"versions": 1}', '{"format": 1, "versions": {}}',
    '{"format": 1, "versions": {"tvm-pagedkv": 1, "apache-tvm-ffi": []}}',
    '{"format": 99999999999999999999, "versions": {"tvm-pagedkv": "0"}}',
    "[" * 100_000,
)  # fmt: skip


def refused(function, *arguments):
    """Call it in a child, for it may crash."""

    def call():
        with pytest.raises((ValueError, TypeError, KeyError)):
            function(*arguments)

    return f"{arguments!r}"[:200], call


def without(described: dict, name: str, *values) -> list[dict]:
    """Descriptions that lack a field, or have another value in it."""
    return [
        {k: v for k, v in described.items() if k != name},
        *({**described, name: value} for value in values),
    ]


def test_choose():
    assert choose([TARGET], MACHINE, None) == choose([TARGET], MACHINE, "a") == 0
    lists = [None, 1, "a", {}, [], [None], [1], ["a"], [[]], [{}]]
    for name in TARGET:
        lists += [[bad] for bad in without(TARGET, name, None, 1, {}, [1])]
    machines = [1, "a", []]
    for name in MACHINE:
        machines += without(MACHINE, name, None, 1, {}, [1], "other" * 99)
    cases = [refused(choose, targets, MACHINE, None) for targets in lists]
    cases += [refused(choose, [TARGET], machine, None) for machine in machines]
    cases += [
        refused(choose, [TARGET], MACHINE, name) for name in (1, [], {}, "b", "\0", "a" * 9999)
    ]
    assert failures(cases) == []


def test_choose_for_gpus():
    assert choose([GPU_TARGET], GPU, None) == 0
    codes = ["", "sm_", "sm_8", "sm_80b", "sm_80aa", "sm_-80", "sm_0x80", "sm_8000", "ptx_80"]
    codes += ["compute_", "compute_80\0", "s" * 9999, None, 80, ["sm_80"], {}]
    lists = [[{**GPU_TARGET, "device_code": ["sm_80", code]}] for code in codes]
    lists += [[{**GPU_TARGET, "device_code": []}], [{**GPU_TARGET, "driver": 2**62}]]
    for name in ("device_code", "driver", "driver_for_ptx"):
        lists += [[bad] for bad in without(GPU_TARGET, name, None, "80", {}, [1], 1.5)]
    machines = []
    for name in ("compute_capability", "driver"):
        machines += without(GPU, name, None, "80", {}, [80], 1.5)
    cases = [refused(choose, targets, GPU, None) for targets in lists]
    cases += [refused(choose, [GPU_TARGET], machine, None) for machine in machines]
    cases += [
        refused(choose, [GPU_TARGET], {**GPU, "compute_capability": n}, None) for n in (-1, 1)
    ]
    assert failures(cases) == []


def test_load(tmp_path):
    cases = [refused(load, path, None, None) for path in NO_TEXTS]
    cases += [
        refused(load, str(path), None, None) for path in ("", "\0", tmp_path, tmp_path / "none")
    ]
    for i, manifest in enumerate(MANIFESTS):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "manifest.json").write_text(manifest)
        cases.append(refused(load, str(folder), None, None))  # without its digest
        whole = tmp_path / f"{i}-with-digest"
        whole.mkdir()
        (whole / "manifest.json").write_text(manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        (whole / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        cases += [refused(load, str(whole), target, None) for target in (None, "native", 1, [])]
        cases += [
            refused(load, str(whole), None, device) for device in (tvm.cuda(0), 1, "cuda", [])
        ]
    assert failures(cases) == []


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
