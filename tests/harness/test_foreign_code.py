# SPDX-License-Identifier: Apache-2.0
"""Tests run no code for a CPU that this one is not: on lesser CPUs they skip it, or fail."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import partial

import pytest

from tir_kernels import build_kernel
from tvm_pagedkv.compiler import compile_kernel, load_kernels, resolve_target, vector_target

from ..support.cases.kernels.kernel_specs import make_spec
from ..support.harness.cpp_build import ROOT
from ..support.harness.foreign_code import runs_here
from ..support.harness.selections import few_of

# What Linux says of CPUs, as far as kernels could use it.
FEATURES = {
    "x86-64": "sse2",
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse2 sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse2 sse4_1 sse4_2 "
    "ssse3",
}
FEATURES["Zen 3"] = f"{FEATURES['x86-64-v3']} adx aes pclmulqdq sha_ni sse4a vaes vpclmulqdq"
FILES = (
    "tests/kernels/test_quantized_attention.py",
    "tests/kernels/test_quantized_page_kernels.py",
    "tests/lm/kernels/test_linear_kernels.py",
)
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not runs_here("x86-64-v3"), reason="hides features of x86-64"
)


def _outcomes(machine: str, *arguments: str) -> dict[str, int]:
    """Run tests as if on another machine; they must not fail."""
    environment = os.environ | {"TVM_PAGEDKV_CPU_FEATURES": FEATURES[machine], "CI": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    counts = re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])
    return {outcome: int(count) for count, outcome in counts}


def _compile_merge(cpu: str):
    spec = make_spec((2, 1), 32, target=vector_target(cpu))
    return compile_kernel(build_kernel("merge", spec), "merge", resolve_target(cpu))


@pytest.mark.parametrize("machine", ["x86-64-v2", "Zen 3"])
def test_a_function_of_foreign_code_is_refused(monkeypatch, machine):
    monkeypatch.setenv("TVM_PAGEDKV_CPU_FEATURES", FEATURES[machine])
    foreign = "x86-64-v4" if machine == "Zen 3" else "x86-64-v3"
    module = _compile_merge(foreign)
    assert "merge" in module.inspect_source("s")  # which may be read
    with pytest.raises(AssertionError, match=f"a test runs foreign code: code for {foreign} canno"):
        module["merge"]
    assert _compile_merge("native")["merge"]


def test_a_library_of_foreign_code_is_refused(monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CPU_FEATURES", FEATURES["Zen 3"])
    spec = make_spec((2, 1), 32, target=vector_target("x86-64-v4"))
    builders = {"merge": partial(build_kernel, "merge", spec)}
    with pytest.raises(ValueError, match="code for x86-64-v4 cannot run here: this CPU lacks avx5"):
        load_kernels(builders, ("merge", repr(spec)), resolve_target("x86-64-v4"))


def test_code_for_avx512_is_skipped_without_it():
    counts = _outcomes("Zen 3", *FILES, "-m", "not slow", "-k", "x86-64-v4 or pairs")
    assert counts.pop("skipped") >= 4 and not counts


@pytest.mark.parametrize("machine", few_of(["x86-64", "x86-64-v3"], 1))
@pytest.mark.parametrize("folder", ["tests/kernels", pytest.param("tests", marks=pytest.mark.slow)])
def test_files_are_collected_on_other_machines(folder, machine):
    """A spec that such a machine refuses, made while a file is read, would end the whole run."""
    assert not _outcomes(machine, folder, "--collect-only", "-q")


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86-64", "x86-64-v2", "x86-64-v3", "Zen 3"])
def test_kernels_pass_on_other_machines(machine):
    counts = _outcomes(machine, "tests/kernels", "-m", "quick")
    assert counts["passed"] > 100


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
