# SPDX-License-Identifier: Apache-2.0
"""The passes that lower kernels keep what loops mean."""

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels.define import target_attributes
from tir_kernels.script import prim_func
from tvm_pagedkv.compiler.build import resolve_target
from tvm_pagedkv.compiler.lowering import compile_kernel

NOTHING = -1


@prim_func
def record_loops(var_begins: T.handle, var_seen: T.handle):
    """Store what the variables of nested loops are, one after another."""
    T.func_attr(target_attributes(on_cpu=True))
    num_begins, num_seen = T.int32(), T.int32()
    begins = T.match_buffer(var_begins, (num_begins,), "int32")
    seen = T.match_buffer(var_seen, (num_seen, 2), "int32")
    count = 0
    for i in range(begins[0], begins[1]):
        for j in range(begins[i], begins[i + 1]):  # bounds that depend on the loop around
            seen[count, 0] = i
            seen[count, 1] = j
            count += 1
    for i in T.serial(begins[0], begins[1]):
        begins[0] = 90  # a loop begins where it began
        for j in T.unroll(1, 6, step=2):
            seen[count, 0] = i
            seen[count, 1] = j
            count += 1


def test_loops_begin_where_they_say():
    begins = [2, 5, 3, 5, 6, 9]
    expected = [(i, j) for i in range(2, 5) for j in range(begins[i], begins[i + 1])]
    expected += [(i, j) for i in range(2, 5) for j in range(1, 6, 2)]
    seen = tvm.runtime.tensor(np.full((len(expected) + 1, 2), NOTHING, np.int32))
    kernel = compile_kernel(record_loops, "record_loops", resolve_target(None))["record_loops"]
    kernel(tvm.runtime.tensor(np.int32(begins)), seen)
    np.testing.assert_array_equal(seen.numpy(), [*expected, (NOTHING, NOTHING)])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
