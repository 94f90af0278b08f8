# SPDX-License-Identifier: Apache-2.0
"""Bundles and the runtime on CPUs that qemu-user emulates: x86-64, AVX2 and AArch64."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tvm_pagedkv as pkv

from .. import reference
from ..support.cases.caches.bundle_cases import CONFIG, ROWS, SCALING, expected
from ..support.emulators.emulated_cpus import CPUS, EmulatedCPU
from ..support.harness.cpp_build import BUILDS, ROOT, build, locked, needs_cmake, run

TARGETS = {
    "x86_64": ["x86-64", "x86-64-v3", "x86-64-v4"],
    "aarch64": ["aarch64-linux-gnu", "aarch64-linux-gnu:neoverse-n1"],
}
TOOLCHAINS = {"aarch64": {"CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake" / "aarch64-linux-gnu.cmake")}}
# The target that each CPU must choose, and one that it must refuse, with what it says.
CASES = {
    "x86-64": ("x86-64", "x86-64-v3", "x86-64-v3 needs abm avx avx2"),
    "Haswell": ("x86-64-v3", "x86-64-v4", "x86-64-v4 needs avx512bw"),
    "AArch64": ("aarch64-linux-gnu:neoverse-n1", "no", "the bundle has no target 'no'"),
    "Cortex-A57": ("aarch64-linux-gnu", "aarch64-linux-gnu:neoverse-n1", "n1 needs asimddp"),
}
# The libraries of AArch64 are compiled for these tests only, for a minute.
parametrize_cpus = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if CPUS[n].architecture in TOOLCHAINS else [])
        for n in CASES
    ],
)


def _options(cpu: EmulatedCPU) -> dict[str, str]:
    return TOOLCHAINS.get(cpu.architecture, {}) | {"CMAKE_BUILD_TYPE": "Release"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Write the bundle of an architecture, once."""
    folder, written = tmp_path_factory.mktemp("bundles"), {}

    def of(cpu: EmulatedCPU) -> Path:
        if cpu.architecture not in written:
            written[cpu.architecture] = _write(folder / cpu.architecture, cpu)
        return written[cpu.architecture]

    return of


def _write(path: Path, cpu: EmulatedCPU) -> Path:
    config = pkv.KVCacheConfig(**CONFIG | {"rope": pkv.RopeConfig(scaling=SCALING)})
    libraries = path.with_suffix(".libraries")
    if cpu.architecture in TOOLCHAINS:
        libraries.mkdir()
        wheels = str(cpu.packages())
        name = f"emulated-{cpu.architecture}"
        built = build(name, "tvm_pagedkv", TVM_PAGEDKV_WHEELS=wheels, **_options(cpu))
        names = ("tvm/lib/libtvm_runtime.so", "tvm_ffi/lib/libtvm_ffi.so")
        for file in (built / "libtvm_pagedkv.so", *(cpu.packages() / name for name in names)):
            shutil.copy(file, libraries)
    given = [libraries] if libraries.exists() else []
    return pkv.write_bundle(config, path, TARGETS[cpu.architecture], libraries=given)


@needs_cmake
@parametrize_cpus
def test_cpp_program(bundles, tmp_path, name):
    cpu = CPUS[name]
    if cpu.obstacle:
        pytest.skip(cpu.obstacle)
    bundle, (chosen, refused, said) = bundles(cpu), CASES[name]
    folder = BUILDS / f"emulated-example-{cpu.architecture}"
    options = {"BUNDLE": str(bundle), "Python_EXECUTABLE": sys.executable, **_options(cpu)}
    definitions = [f"-D{key}={value}" for key, value in options.items()]
    with locked(folder):  # two CPUs of an architecture share it
        run("cmake", "-S", str(ROOT / "runtime_ext" / "example"), "-B", str(folder), *definitions)
        run("cmake", "--build", str(folder), "--target", "run_bundle")
        program = shutil.copy(folder / "run_bundle", tmp_path)
    lines = cpu.run(program, str(bundle), LD_LIBRARY_PATH="").splitlines()
    assert lines[0] == f"target {chosen}"
    rows = [line.split() for line in lines[1:] if not line.startswith("library")]
    actual = np.array(rows, "float32").reshape(ROWS, 4, 32)
    reference.assert_close(actual, expected(), "float32")
    command = [*cpu.emulator, program, str(bundle), refused]
    done = subprocess.run(command, capture_output=True, text=True, env=cpu.environment())
    assert done.returncode == 1 and said in done.stderr


@needs_cmake
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_units_of_the_runtime(name):
    cpu = CPUS[name]
    if cpu.obstacle:
        pytest.skip(cpu.obstacle)
    options = _options(cpu) | {"TVM_PAGEDKV_BUILD_TESTS": "ON"}
    folder = build(f"emulated-units-{cpu.architecture}", "runtime_tests", **options)
    fast = "--test-case-exclude=*random*"
    assert "0 failed" in cpu.run(folder / "runtime_tests", fast, LD_LIBRARY_PATH="")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
