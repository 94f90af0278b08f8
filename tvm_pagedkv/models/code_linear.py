# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear layers with quantized weights; `code_matrix` has their layout.

CPUs with byte dot products multiply the codes as they are; `row_codes` has the activations. Other
CPUs convert the codes of a few groups to float32 numbers, which stay in the L1 cache while they are
multiplied with all `UNIT_ROWS` rows.
"""

from tvm.script import tirx as T

from tir_kernels.cpu.simd import F32, INTO_L1, constant, import_llvm, prefetch, store
from tir_kernels.define import target_attributes
from tir_kernels.script import inline, prim_func
from tir_kernels.spec import ITEMSIZE

from .code_matrix import CodeMatrix
from .code_products import products_of
from .linear import PARALLEL_FLOPS, TILE_ROWS, UNIT_ROWS, store_sums
from .row_codes import ROW_BYTES

_BYTES_AHEAD = 4096  # of weights that are prefetched, into the L1 cache


def code_linear(
    matrix: CodeMatrix, dtype: str, out_dtype: str, *, bias: bool = False, residual: bool = False
):
    """Build the kernel of ``out = x @ weight.T (+ bias) (+ residual)``, summed in float32.

    Arguments of the kernel: x, packed weight, bias [out_features] and residual [n, out_features] of
    `dtype` where chosen, out [n, out_features] of `out_dtype`. If `matrix.multiplies_codes`, x is
    the three results of `row_codes.encode_rows`, otherwise [n, in_features] of `dtype`.
    """
    num_outputs, num_inputs, width = matrix.out_features, matrix.in_features, matrix.width
    num_blocks, num_groups, group_bytes = matrix.shape
    encoded = ("x_codes", "x_scales", "x_sums")
    absent: tuple[str, ...] = ("x",) if matrix.multiplies_codes else encoded
    absent += (() if bias else ("bias",)) + (() if residual else ("residual",))
    make_products = products_of(matrix)
    part = make_products.num_groups
    num_parts = -(-num_groups // part)

    def match(handle, shape, dtype: str):
        if handle is None:
            return None
        return T.match_buffer(handle, shape, dtype, align=ITEMSIZE.get(dtype, 1))

    @inline
    def compute(unit, n, x, weight, out, addends):
        row_units = (n + UNIT_ROWS - 1) // UNIT_ROWS
        block = unit // row_units
        first_row = unit % row_units * UNIT_ROWS
        count = T.min(n - first_row, T.int64(UNIT_ROWS))
        sums = T.alloc_buffer((UNIT_ROWS, width), F32)
        products = make_products(matrix, weight, x, UNIT_ROWS)
        for row in range(count):
            for column in T.unroll(0, width, step=matrix.target.lanes):
                store(sums, (row, column), matrix.target.lanes, constant(0.0, matrix.target.lanes))
        for i in range(num_parts):
            group = T.cast(i, "int64") * part
            for line in T.unroll(0, part * group_bytes, step=64):
                ahead = T.meta_var(group * group_bytes + line + _BYTES_AHEAD)
                at = T.meta_var((block, ahead // group_bytes, ahead % group_bytes))
                prefetch(weight, at, INTO_L1)
            products.begin_part(block, group, first_row, count)
            for tile in range(count // TILE_ROWS):
                products.add_tile(sums, tile * TILE_ROWS, TILE_ROWS, block, group, first_row)
            whole = count // TILE_ROWS * TILE_ROWS
            rest = count - whole
            if rest >= 4:
                products.add_tile(sums, whole, 4, block, group, first_row)
            if rest % 4 >= 2:
                products.add_tile(sums, whole + rest // 4 * 4, 2, block, group, first_row)
            if rest % 2 == 1:
                products.add_tile(sums, count - 1, 1, block, group, first_row)
        store_sums(matrix, sums, (block, first_row, count), out, *addends)

    @prim_func(absent=absent)
    def code_linear(
        x: T.handle,
        x_codes: T.handle,
        x_scales: T.handle,
        x_sums: T.handle,
        weight: T.handle,
        bias: T.handle,
        residual: T.handle,
        out: T.handle,
    ):
        T.func_attr(target_attributes(on_cpu=True))
        n = T.int64()
        rows = T.meta_var(
            (
                match(x_codes, (n, num_groups, ROW_BYTES), "uint8"),
                match(x_scales, (n, num_groups), F32),
                match(x_sums, (n, num_groups), "int32"),
            )
            if matrix.multiplies_codes
            else (match(x, (n, num_inputs), dtype),)
        )
        weights = T.match_buffer(weight, matrix.shape, "uint8", align=1)
        addends = T.meta_var(
            (match(bias, (num_outputs,), dtype), match(residual, (n, num_outputs), dtype))
        )
        outputs = T.match_buffer(out, (n, num_outputs), out_dtype, align=ITEMSIZE[out_dtype])
        with T.sblock("root"):  # Relax asks every function for one
            T.reads()
            T.writes()
            import_llvm(*make_products.llvm_helpers)
            num_units = T.meta_var((n + UNIT_ROWS - 1) // UNIT_ROWS * num_blocks)
            if n * (num_outputs * num_inputs) >= PARALLEL_FLOPS:
                for unit in T.parallel(num_units):
                    compute(unit, n, rows, weights, outputs, addends)
            else:
                for unit in range(num_units):
                    compute(unit, n, rows, weights, outputs, addends)

    return code_linear
