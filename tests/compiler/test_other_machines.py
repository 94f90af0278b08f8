# SPDX-License-Identifier: Apache-2.0
"""Compiled files and the CPUs that they are for: asked of the CPU, kept apart, refused."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

import tir_kernels
import tvm_pagedkv as pkv
from tvm_pagedkv.compiler import resolve_target, targets
from tvm_pagedkv.compiler.disk_cache import load_library

from ..support.harness import fast_compilation
from ..support.harness.foreign_code import runs_here

HIDE = "TVM_PAGEDKV_CPU_FEATURES"
CONFIG = pkv.KVCacheConfig(1, 2, 1, 32, dtype="float32", page_size=4)
needs_avx2 = pytest.mark.skipif(
    platform.machine() != "x86_64" or not runs_here("x86-64-v3"), reason="hides features of x86-64"
)


def _linux_features() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":")[1].split())
    return set()


def test_features_are_those_that_linux_tells(monkeypatch):
    monkeypatch.delenv(HIDE, raising=False)
    known = set(targets._LINUX_NAMES[targets.architecture(resolve_target())].values())
    missing = known & _linux_features() - targets.cpu_features()
    assert not missing or missing == {name for name in known if name.startswith("amx_")}


def test_variables_leave_features_out_and_add_none(monkeypatch):
    features = targets.cpu_features()
    first, second, *_ = sorted(features)
    for names in ("", "no_such_feature", f"{first} {second}"):
        monkeypatch.setenv(HIDE, names)
        assert targets.cpu_features() == features & set(names.split())
    for names in (f"-{first}", f"-{first} -no_such_feature"):
        monkeypatch.setenv(HIDE, names)
        assert targets.cpu_features() == features - {first}
    monkeypatch.setenv(HIDE, f"{first} {second} -{first}")
    assert targets.cpu_features() == {second}


def test_llvm_is_asked_once_for_the_features_of_a_target(monkeypatch):
    """The answer takes a quarter of a millisecond, and every library that is loaded needs it."""
    asked = []
    enabled = targets._enabled
    monkeypatch.setattr(targets, "_enabled", lambda target: asked.append(target) or enabled(target))
    targets.required_features(resolve_target("x86-64-v3"))
    assert len(asked) == 1


@needs_avx2
def test_machines_that_share_a_folder_have_files_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    few = {"merge": tir_kernels.catalogue.KERNELS["merge"]}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
    seen: set[Path] = set()
    targets_seen: set[str] = set()
    for features in ("", " ".join(targets.required_features(resolve_target("x86-64-v3"))), None):
        monkeypatch.setenv(HIDE, features) if features is not None else monkeypatch.delenv(HIDE)
        with fast_compilation.unoptimized():
            kernels = pkv.build(CONFIG)
        needed = set(targets.required_features(kernels.target))
        assert needed <= targets.cpu_features()
        o, lse = np.ones((1, 2, 32), "float32"), np.zeros((1, 2), "float32")
        arrays = [tvm.runtime.tensor(each) for each in (o, lse, 3 * o, lse)]
        kernels.kernels["merge"](*arrays)
        np.testing.assert_allclose(arrays[0].numpy(), 2 * o, rtol=1e-6)
        files = set((tmp_path / "cache").glob("*.so"))
        if str(kernels.target) not in targets_seen:  # without AVX-512 the last two are alike
            assert files > seen, "a machine uses the file of another one"
        targets_seen.add(str(kernels.target))
        seen = files


@pytest.mark.parametrize(
    "target, needed",
    [
        ({"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["+amx-tile"]}, "amx_tile"),
        ({"kind": "llvm", "mcpu": "sapphirerapids"}, "amx_bf16 amx_int8 amx_tile"),
        ({"kind": "llvm", "mcpu": "bdver2"}, "fma4 tbm xop"),
    ],
)
@needs_avx2
def test_a_library_for_another_cpu_is_refused(monkeypatch, target, needed):
    """Before the file is read. What this machine has of AMX is hidden."""
    left = targets.cpu_features() - {"amx_bf16", "amx_int8", "amx_tile"}
    monkeypatch.setenv(HIDE, " ".join(left))
    with pytest.raises(ValueError, match=f"cannot run here: this CPU lacks .*{needed}"):
        load_library(Path("no such file"), resolve_target(target))


def test_a_library_for_another_architecture_is_refused():
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    target = tvm.target.Target({"kind": "llvm", "mtriple": f"{other}-linux-gnu"})
    with pytest.raises(ValueError, match=f"code for {other}-linux-gnu cannot run .* for {other}, "):
        load_library(Path("no such file"), target)


@needs_avx2
def test_every_way_to_kernels_refuses(monkeypatch):
    """Before anything is compiled."""
    monkeypatch.setenv(HIDE, "sse2")
    monkeypatch.setattr("tvm_pagedkv.compiler.build._build_set", lambda *_: pytest.fail("compiled"))
    for make in (pkv.build, pkv.create):
        with pytest.raises(ValueError, match="code for x86-64-v3 cannot run here: this CPU lacks"):
            make(CONFIG, target="x86-64-v3")


@pytest.mark.parametrize(
    "hidden, attributes", [(set(), None), ({"sve", "sve2"}, ["-sve", "-sve2"])]
)
def test_what_is_hidden_of_an_arm_cpu_is_not_used(monkeypatch, hidden, attributes):
    triple = "aarch64-linux-gnu"
    make = targets.Target

    def target_of_arm(fields):
        return make(fields | {"mtriple": triple})

    monkeypatch.setattr(targets, "Target", target_of_arm)
    monkeypatch.setattr(targets.codegen, "llvm_get_system_cpu", lambda: "neoverse-v2")
    everything = frozenset(targets._LINUX_NAMES["aarch64"].values()) - hidden
    target = targets._target_with.__wrapped__("aarch64", everything)
    assert target.attrs["mcpu"] == "neoverse-v2"
    assert list(target.attrs.get("mattr", [])) == (attributes or [])
    assert set(targets.required_features(target)) <= everything


def test_the_runtime_refuses_wrong_arguments():
    ask, require = (
        tvm_ffi.get_global_func(f"pagedkv.{n}") for n in ("cpu_features", "require_cpu")
    )
    architecture = platform.machine()
    require("kernels", architecture, list(ask()))
    for wrong in (None, 1, ["x"]):
        with pytest.raises(TypeError):
            ask(wrong)
        for position in range(3):
            arguments = ["kernels", architecture, ["sse2"]]
            arguments[position] = wrong if position < 2 else [None]
            with pytest.raises(TypeError):
                require(*arguments)
    with pytest.raises(TypeError):
        require("kernels", architecture)
    with pytest.raises(ValueError, match="kernels"):
        require("kernels", architecture, ["no_such_feature"])
    with pytest.raises(ValueError, match="kernels"):
        require("kernels", "no_such_architecture", [])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
