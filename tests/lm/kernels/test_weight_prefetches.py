# SPDX-License-Identifier: Apache-2.0
"""What linear layers prefetch, by the class of the CPU."""

from __future__ import annotations

import platform
import re
from collections import Counter

import pytest

from tir_kernels.cpu.isa.simd import CACHE_LINE_BYTES, INTO_L1, INTO_L2
from tvm_pagedkv.compiler import vector_target
from tvm_pagedkv_lm.formats.weight_formats import FORMATS
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.linear import linear
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix
from tvm_pagedkv_lm.kernels.linear.packed_products import LINES_PER_STEP

SHAPE = 1024, 2048
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 CPUs")


def _prefetches(kernel) -> Counter:
    """Count the prefetches of a kernel by the cache that they ask into."""
    found = re.findall(r"T\.prefetch\(.*, 0, (\d), 1\)$", kernel.script(), re.MULTILINE)
    return Counter(map(int, found))


@pytest.mark.parametrize("weights", ["int8", "int4", "int4_minima", "mxfp4"])
def test_codes(weights):
    """A Zen 4 asks for every other line of a group, once, and into the L2 cache only."""
    targets = {cpu: vector_target(cpu) for cpu in ("znver4", "znver5")}
    matrices = {cpu: CodeMatrix(*SHAPE, FORMATS[weights], t) for cpu, t in targets.items()}
    found = {
        cpu: _prefetches(linear(matrix, "bfloat16", "bfloat16")) for cpu, matrix in matrices.items()
    }
    lines = matrices["znver4"].shape[-1] // CACHE_LINE_BYTES
    loops = found["znver5"][INTO_L1] // lines  # one for each number of rows
    every = {INTO_L1: loops * lines}
    assert loops >= 3
    assert found["znver5"] == (every | {INTO_L2: loops * lines} if weights == "int8" else every)
    assert found["znver4"] == {INTO_L2: loops * -(-lines // 2)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers(dtype):
    """A step of a row asks for the lines of a later one, on a Zen 4 for every other line."""
    found = {}
    for cpu in ("znver4", "znver5"):
        matrix = PackedMatrix(*SHAPE, dtype, vector_target(cpu))
        found[cpu] = _prefetches(linear(matrix, dtype, dtype))
    loops = found["znver5"][INTO_L2] // LINES_PER_STEP
    assert loops >= 1
    assert found["znver5"] == {INTO_L2: loops * LINES_PER_STEP}
    assert found["znver4"] == {INTO_L2: loops * LINES_PER_STEP // 2}


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
