# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel that takes heads out of fused rows, rotated where the cache does not do that."""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.script import prim_func
from tir_kernels.spec import RopeSpec, VectorTarget
from tir_kernels.targets import row_worker

from ..define import attributes, built_once, match_int32, matcher, unused
from .copies import copy_columns, rotate_columns


@built_once
def take_heads(
    heads: tuple[int, int, int],
    num_rows: int,
    rope: RopeSpec | None,
    dtype: str,
    target: VectorTarget,
):
    """Build the kernel that takes consecutive heads out of rows of Q, K and V.

    Parameters
    ----------
    heads : (first, count, head_dim)
    num_rows : int
        Number of heads of Q, K and V in a row of x.
    rope : RopeSpec, optional
        The rotation of all heads; None: they are copied.

    Arguments of the kernel: x [n, num_rows * head_dim], positions int32 [n] with a rotation, out
    [n, count * head_dim].
    """
    (first, count, dim), match_rows = heads, matcher(target, dtype)
    rotated = rope.rotary_dim if rope is not None else 0

    @prim_func(absent=unused(positions=rope is not None))
    def take_heads(var_x: T.handle, var_positions: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, num_rows * dim)
        positions = match_int32(var_positions, n)
        out = match_rows(var_out, n, count * dim)
        worker = row_worker(target)
        rest = worker.vectors(dim - rotated)
        for row in worker.items(n, count * dim):
            if rope is not None:
                cos_sin = CosSin(rope, target.lanes)
                cos_sin.fill(positions[row])
            for head in range(T.int64(count)):
                source, sink = T.meta_var((head + first) * dim), T.meta_var(head * dim)
                if rope is not None:
                    rotate_columns(cos_sin, x, (row,), source, out, (row,), sink)
                if rotated < dim:
                    copy_columns(rest, x, (row,), source + rotated, out, (row,), sink + rotated)

    return take_heads
