# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel that takes heads out of fused rows, rotated where the cache does not do that."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.cpu.isa.simd import load, store
from tir_kernels.spec import RopeSpec, VectorTarget

from .emit import built_once, parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS


@built_once
def take_heads(
    heads: tuple[int, int, int],
    num_rows: int,
    rope: RopeSpec | None,
    dtype: str,
    target: VectorTarget,
) -> tirx.PrimFunc:
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
    first, count, dim = heads

    def body(n, x, *positions_and_out):
        *positions, out = positions_and_out

        def row(i):
            rotated, cos_sin = 0, None
            if rope is not None:
                rotated, cos_sin = rope.rotary_dim, CosSin(rope, target.lanes)
                cos_sin.fill(positions[0][i])
            lanes = math.gcd(dim - rotated, target.lanes)
            with T.serial(T.int64(count)) as head:
                source, sink = (head + first) * dim, head * dim

                def read(column, width):
                    return load(x, [i, source + column], width)

                def write(column, width, value):
                    store(out, [i, sink + column], width, value)

                if cos_sin is not None:
                    cos_sin.rotate(read, write)
                if rotated < dim:
                    with T.serial(T.int64((dim - rotated) // lanes)) as j:
                        column = j * lanes + rotated
                        write(column, lanes, read(column, lanes))

        parallel_if(n * (count * dim) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, num_rows * dim), dtype),
            *([("positions", (n,), "int32")] if rope is not None else []),
            ("out", (n, count * dim), dtype),
        ]

    return rows_kernel(arguments, body, target)
