# SPDX-License-Identifier: Apache-2.0
"""The reader of TVMScript gives what TVM's own parser gives."""

import traceback

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

import tir_kernels
from tir_kernels.script import inline, prim_func, read_by_tvm
from tir_kernels.signatures.attention import PREFILL_RAGGED_SLIDING
from tir_kernels.signatures.inputs import RaggedInputs
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler.build import resolve_target
from tvm_pagedkv.compiler.lowering import compile_kernel

from .test_well_formed import SPECS


def assert_same(build) -> tvm.tirx.PrimFunc:
    """Return what our reader makes of a kernel, if TVM's makes the same."""
    own = build()
    with read_by_tvm():
        of_tvm = build()
    assert tvm_ffi.structural_equal(own, of_tvm, map_free_vars=True)
    return own


# TVM's parser takes seconds for a kernel, so most are left to the long runs.
FEW = {
    "cpu": {"merge", "copy_pages", "rope_append"},
    "cuda": {"merge", "rope_append"},
}
KERNELS = [
    pytest.param(name, kernel, marks=[] if kernel in FEW.get(name, ()) else pytest.mark.slow)
    for name, spec in SPECS.items()
    for kernel in tir_kernels.kernel_names(spec, for_stock=True)
]


@pytest.mark.parametrize("name, kernel", KERNELS)
def test_kernels(name, kernel):
    assert_same(lambda: tir_kernels.build_kernel(kernel, SPECS[name]))


@T.meta_class
class Sums:
    """A component: two running sums, and how many values they have."""

    def __init__(self):
        self.rows = T.alloc_buffer((2,), "float32")
        self.count = T.local_scalar("int32")

    @inline
    def reset(self):
        for row in T.unroll(2):
            self.rows[row] = T.float32(0)
        self.count = 0

    @inline
    def add(self, value, *, twice: bool = False):
        self.count += 1
        self.rows[0] += value
        if twice:
            total = self.rows[1] + value
            self.rows[1] = total


def test_statements():
    def build(has_bound: bool = True, width: int = 4):
        @prim_func
        def kernel(a: T.handle, o: T.handle, bound: T.int32):
            """A docstring."""
            T.func_attr({"s_tir": True})
            n, m = T.int32(), T.int32()
            values = T.match_buffer(a, (n, m), "float32", elem_offset=T.int64(), offset_factor=1)
            out = T.match_buffer(o, (n,), "float32")
            sums = Sums()

            @inline
            def clear(index):
                out[index] = T.float32(0)

            for row in T.parallel(n):
                clear(row)
                first: T.let = row * width
                last = first + width
                last = T.min(last, m)
                count: T.int32 = 0
                peak: T.float32
                peak = -1.0
                sums.reset()
                for column in range(first, last):
                    if has_bound and column >= bound:
                        continue
                    if 0 <= column < bound or not (row == 3):
                        sums.add(values[row, column], twice=not has_bound)
                    elif column != 7:
                        count += 1
                        break
                    else:
                        peak = T.max(peak, values[row, column])
                while count > 0:
                    count -= 1
                for i, j in T.grid(2, width):
                    out[row] = out[row] + (sums.rows[i] if has_bound else T.float32(j))
                with T.attr(T.int32(0), "pragma_x", 1):
                    out[row] = peak if row > 2 else sums.rows[1]
                assert row >= 0, ("ValueError", ["row is negative"])
                T.evaluate(T.call_extern("int32", "f", row))
            both = T.meta_var([i for i in range(3) if i and not has_bound])
            if len(both) == 0:
                out[0] = T.float32(1)
            else:
                out[0] = T.float32(2)

        return kernel

    with_bound, without = (assert_same(lambda b=b: build(b)) for b in (True, False))
    with read_by_tvm():
        assert with_bound.script() == build().script()  # names too
    assert not tvm_ffi.structural_equal(with_bound, without)


def test_absent_arguments():
    def build(absent):
        @prim_func(absent=absent)
        def kernel(o: T.handle, window: T.int32):
            T.func_attr({"s_tir": True})
            out = T.match_buffer(o, (4,), "int32")
            if window is None:
                out[0] = 1
            else:
                out[0] = window

        return kernel

    assert len(assert_same(lambda: build(())).params) == 2
    assert len(assert_same(lambda: build(("window",))).params) == 1


def test_arguments_of_a_signature():
    """A kernel gets what its signature matches, which errors name as the signature does."""

    def build(**fields):
        @prim_func(arguments=PREFILL_RAGGED_SLIDING.of(KernelSpec(4, 2, 16, 8, **fields)))
        def kernel(a: RaggedInputs):
            T.func_attr({"s_tir": True})
            for row in range(a.q.shape[0]):
                a.lse[row, 0] = T.Select(row < a.window, a.k[row, 1, 15], a.o[row, 3, 7])
            a.lse[0, 1] = T.cast(a.batch_size, "float32")
            if a.sink_logits is not None:
                a.lse[0, 2] = a.sink_logits[3]

        return kernel

    kernel = assert_same(build)
    names = [parameter.name for parameter in kernel.params]
    assert names == list(PREFILL_RAGGED_SLIDING.names[:-1])
    assert 'kv_indptr: T.Buffer((num_starts,), "int32"' in kernel.script()
    assert 'lse: T.Buffer((num_rows, 4), "float32"' in kernel.script()
    assert len(assert_same(lambda: build(sink_logits=True)).params) == len(names) + 1
    with pytest.raises(ValueError, match="has no pages"):
        PREFILL_RAGGED_SLIDING.without("pages")


def test_names_end_with_their_block():
    def build():
        @prim_func
        def kernel(o: T.handle, n: T.int32):
            T.func_attr({"s_tir": True})
            out = T.match_buffer(o, (4,), "int32")
            last = n
            for i in range(n):
                value = i + 1
                last = value
            for i in range(n):
                value = i + 2
                out[0] = value
            if n > 3:
                value = n + 1
                out[1] = value
            else:
                value = n + 2
                out[2] = value
            while last > 0:
                value = last - 1
                last = value
            with T.attr(T.int32(0), "pragma_x", 1):
                value = n + 3
                out[3] = value

        return kernel

    assert_same(build)


def test_errors_tell_the_line_of_the_kernel():
    with pytest.raises(TypeError, match="a loop goes over") as caught:

        @prim_func
        def kernel(o: T.handle):
            T.func_attr({"s_tir": True})
            for i in [1, 2]:
                T.evaluate(i)

    frames = traceback.extract_tb(caught.tb)
    assert any(frame.line == "for i in [1, 2]:" for frame in frames)


def test_only_variables_of_a_component_are_assigned():
    with pytest.raises(TypeError, match="width of Rows is no variable"):

        @T.meta_class
        class Rows:
            def __init__(self):
                self.width = 4

        @prim_func
        def kernel(o: T.handle):
            rows = Rows()
            rows.width = 5


def test_a_tuple_assigns_no_variable():
    """To TVM's parser these are new variables."""
    with pytest.raises(TypeError, match="last is a variable already; assign it alone"):

        @prim_func
        def kernel(o: T.handle, n: T.int32):
            T.func_attr({"s_tir": True})
            last = n
            for i in range(n):
                first, last = i, i + 1
                T.evaluate(first + last)


def test_annotations_that_are_text_are_refused():
    with pytest.raises(TypeError, match="annotations of kernel are text"):

        @prim_func
        def kernel(o: "T.handle"):
            T.evaluate(0)


def test_a_return_is_refused():
    with pytest.raises(SyntaxError, match="return nothing"):

        @prim_func
        def kernel(o: T.handle):
            return o


def test_variables_and_unrolled_loops_are_registers_on_cpus():
    @prim_func
    def sums(a: T.handle, o: T.handle):
        T.func_attr({"s_tir": True})
        n = T.int32()
        values = T.match_buffer(a, (n, 4), "float32")
        out = T.match_buffer(o, (4,), "float32")
        total = T.alloc_local((4,), "float32")
        for column in T.unroll(4):
            total[column] = T.float32(0)
        for row in range(n):
            for column in T.unroll(4):
                value = values[row, column]
                total[column] += value
        for column in T.unroll(4):
            out[column] = total[column]

    built = compile_kernel(sums, "sums", resolve_target("native"))
    assert "AllocWorkspace" not in built.inspect_source("ll")
    values, out = np.arange(12, dtype="float32").reshape(3, 4), tvm.runtime.empty((4,), "float32")
    built["sums"](tvm.runtime.tensor(values), out)
    np.testing.assert_array_equal(out.numpy(), values.sum(0))


def test_large_arrays_and_vectors_are_registers_on_cpus():
    @prim_func
    def reverse(a: T.handle, o: T.handle):
        T.func_attr({"s_tir": True})
        n = T.int32()
        values = T.match_buffer(a, (n, 512), "float32")
        out = T.match_buffer(o, (n, 512), "float32")
        for row in range(n):
            total = T.broadcast(T.float32(0), 16)
            vectors = T.alloc_local((32, 16), "float32")
            for i in T.unroll(32):
                vectors[i, T.ramp(0, 1, 16)] = values[row, T.ramp(i * 16, 1, 16)]
                total += vectors[i, T.ramp(0, 1, 16)]
            for i in T.unroll(32):
                out[row, T.ramp(i * 16, 1, 16)] = vectors[31 - i, T.ramp(0, 1, 16)] + total

    built = compile_kernel(reverse, "reverse", resolve_target("native"))
    assert "AllocWorkspace" not in built.inspect_source("ll")
    values, out = np.arange(1024, dtype="float32").reshape(2, 512), np.empty((2, 512), "float32")
    result = tvm.runtime.tensor(out)
    built["reverse"](tvm.runtime.tensor(values), result)
    vectors = values.reshape(2, 32, 16)
    want = vectors[:, ::-1] + vectors.sum(1, keepdims=True)
    np.testing.assert_array_equal(result.numpy(), want.reshape(2, 512))


def test_a_method_may_be_named_as_what_it_calls():
    def load(buffer, index):
        return buffer[index]

    @T.meta_class
    class Row:
        def __init__(self, values, out):
            self.values, self.out = values, out

        @inline
        def load(self, index):
            self.out[index] = load(self.values, index)

    def build():
        @prim_func
        def kernel(a: T.handle, o: T.handle):
            T.func_attr({"s_tir": True})
            values = T.match_buffer(a, (4,), "float32")
            out = T.match_buffer(o, (4,), "float32")
            row = Row(values, out)
            row.load(2)

        return kernel

    assert_same(build)


if __name__ == "__main__":
    tvm.testing.main()
