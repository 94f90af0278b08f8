# SPDX-License-Identifier: Apache-2.0
"""The kernel that looks up rows of a quantized matrix."""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import F32, ramp, store, temp
from tir_kernels.script import prim_func

from ...formats.weight_formats import GROUP
from ..define import attributes, built_once, match_int32, matcher, parallel_if
from .code_matrix import CodeMatrix

_PARALLEL_NUMBERS = 1 << 14  # below: cheaper than waking the other threads


@built_once
def code_embedding(matrix: CodeMatrix, dtype: str, scale: float = 1.0):
    """Build the kernel of rows of a quantized matrix times `scale`.

    Arguments of the kernel: ids int32 [n], packed weight, out [n, in_features] of `dtype`.
    """
    in_features, num_groups = matrix.in_features, matrix.num_groups

    match_weight, match_out = matcher(matrix.target, "uint8"), matcher(matrix.target, dtype)

    @prim_func
    def code_embedding(var_ids: T.handle, var_weight: T.handle, var_out: T.handle):
        T.func_attr(attributes(matrix.target))
        n = T.int64()
        ids = match_int32(var_ids, n)
        weight = match_weight(var_weight, *matrix.shape)
        out = match_out(var_out, n, in_features)
        for row in parallel_if(n * in_features >= _PARALLEL_NUMBERS, n):
            token = T.cast(ids[row], "int64")
            for group in range(T.int64(num_groups)):
                _copy_group(matrix, weight, token, group, out, row, scale)

    return code_embedding


def _copy_group(matrix: CodeMatrix, weight, token, group, out, row, scale: float) -> None:
    """Convert a group of a row."""
    width, n, per_byte = matrix.width, matrix.interleaved, 8 // matrix.format.bits
    block, column = temp(token // width, 1, "int64"), temp(token % width, 1, "int64")
    size = matrix.scale_bytes // width

    def half(first: int):
        data = weight[block, group, ramp(first + column * size, size)]
        return temp(T.cast(T.reinterpret(matrix.scale_dtype, data), F32))

    code_scale = half(matrix.code_bytes)
    if matrix.format.has_minima:
        offset = half(matrix.code_bytes + matrix.scale_bytes)
    else:
        offset = temp(code_scale * T.float32(-matrix.format.zero))
    with T.serial(T.int64(GROUP // per_byte)) as i:
        at = i // n * (n * width) + column * n + i % n
        data = temp(weight[block, group, at], 1, "uint8")
        for part in range(per_byte):
            code = data
            if per_byte == 2:
                code = T.bitwise_and(T.shift_right(data, T.uint8(4 * part)), T.uint8(15))
            value = T.cast(code, F32) * code_scale + offset
            target = group * GROUP + i + part * (GROUP // per_byte)
            value = value if scale == 1.0 else value * T.float32(scale)
            store(out, (row, target), 1, value)
