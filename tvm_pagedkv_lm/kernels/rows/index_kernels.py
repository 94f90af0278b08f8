# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of an indexer: its keys, normalized and rotated, and the rows of its heads."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.cpu.isa.simd import F32, load, store
from tir_kernels.spec import RopeSpec, VectorTarget

from .emit import built_once, parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS, normalize


@built_once
def index_keys(
    dim: int, epsilon: float, rope: RopeSpec, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel of index keys: a layer norm, then a rotation of the first columns.

    Arguments of the kernel: x [n, dim], weight and bias float32 [dim], positions int32 [n], keys
    [n, dim].
    """

    def body(n, x, weight, bias, positions, keys):
        def row(i):
            how = (dim, epsilon, target)
            normalize((x, weight, keys), i, 0, how, bias=bias, subtracts_mean=True)
            cos_sin = CosSin(rope, target.lanes)
            cos_sin.fill(positions[i])
            cos_sin.rotate(
                lambda at, lanes: load(keys, (i, at), lanes),
                lambda at, lanes, value: store(keys, (i, at), lanes, value),
            )

        parallel_if(n * dim >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, dim), dtype),
            ("weight", (dim,), F32),
            ("bias", (dim,), F32),
            ("positions", (n,), "int32"),
            ("keys", (n, dim), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def index_queries(
    num_heads: int, dim: int, rope: RopeSpec, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that rotates the first columns of each index head.

    Arguments of the kernel: x [n, num_heads * dim], the columns to rotate of all heads before the
    others of all heads; positions int32 [n]; q [n, num_heads, dim].
    """
    rotated = rope.rotary_dim
    rest = dim - rotated
    lanes = math.gcd(rest, target.lanes)

    def body(n, x, positions, q):
        def row(i):
            cos_sin = CosSin(rope, target.lanes)
            cos_sin.fill(positions[i])
            with T.serial(T.int64(num_heads)) as head:
                cos_sin.rotate(
                    lambda at, lanes: load(x, (i, head * rotated + at), lanes),
                    lambda at, lanes, value: store(q, (i, head, at), lanes, value),
                )
                with T.serial(T.int64(rest // lanes)) as j:
                    source = (i, head * rest + j * lanes + num_heads * rotated)
                    store(q, (i, head, j * lanes + rotated), lanes, load(x, source, lanes))

        parallel_if(n * (num_heads * dim) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, num_heads * dim), dtype),
            ("positions", (n,), "int32"),
            ("q", (n, num_heads, dim), dtype),
        ]

    return rows_kernel(arguments, body, target)
