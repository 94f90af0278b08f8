# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around latent attention: rows of the cache, of Q and of K, and the merged output."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.cpu.isa.simd import F32, broadcast, exp2, load, store, temp
from tir_kernels.spec import RopeSpec, VectorTarget

from ...config.latent_config import Latent
from .emit import parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS, normalize


def latent_rows(
    shape: Latent, epsilon: float, rope: RopeSpec | None, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that makes rows of the cache: a norm of `rank` columns, then a rotation.

    Without `rope` the last columns stay as they are.

    Arguments of the kernel: x [n, rank + rope_dim], weight float32 [rank], positions int32 [n],
    compressed [n, rank], latent [n, rank + rope_dim], whose first columns are `compressed`.
    """
    rank = shape.rank

    def body(n, x, weight, positions, compressed, latent):
        def row(i):
            normalize((x, weight, compressed), i, 0, (rank, epsilon, target))
            _copy(compressed, (i,), latent, (i, 0), rank, target)
            cos_sin = _angles(rope, positions[i], target)
            _rotate(cos_sin, x, (i, rank), latent, (i, rank), shape.rope_dim, target)

        parallel_if(n * shape.width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, shape.width), dtype),
            ("weight", (rank,), F32),
            ("positions", (n,), "int32"),
            ("compressed", (n, rank), dtype),
            ("latent", (n, shape.width), dtype),
        ]

    return rows_kernel(arguments, body, target)


def latent_queries(
    shape: Latent, num_heads: int, rope: RopeSpec | None, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that makes both forms of Q: of its parts, and of the absorbed part.

    Without `rope` nothing is rotated.

    Arguments of the kernel: nope [n, num_heads, nope_dim], rotated [n, num_heads, rope_dim], which
    is not rotated yet, absorbed [n, num_heads, rank], positions int32 [n], q [n, num_heads,
    nope_dim + rope_dim], latent [n, num_heads, rank + rope_dim].
    """

    def body(n, nope, rotated, absorbed, positions, q, latent):
        def row(i):
            cos_sin = _angles(rope, positions[i], target)
            scale = _growth(shape, positions[i])
            with T.serial(T.int64(num_heads)) as head:
                at = (i, head)
                _copy(nope, at, q, (*at, 0), shape.nope_dim, target, scale)
                _copy(absorbed, at, latent, (*at, 0), shape.rank, target, scale)
                begin = (*at, shape.nope_dim)
                _rotate(cos_sin, rotated, (*at, 0), q, begin, shape.rope_dim, target, scale)
                _copy(q, begin, latent, (*at, shape.rank), shape.rope_dim, target)

        parallel_if(n * (num_heads * shape.width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        heads = (n, num_heads)
        return [
            ("nope", (*heads, shape.nope_dim), dtype),
            ("rotated", (*heads, shape.rope_dim), dtype),
            ("absorbed", (*heads, shape.rank), dtype),
            ("positions", (n,), "int32"),
            ("q", (*heads, shape.qk_dim), dtype),
            ("latent", (*heads, shape.width), dtype),
        ]

    return rows_kernel(arguments, body, target)


def latent_keys(shape: Latent, num_heads: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that gives each head a K of its own and the rotated part of all heads.

    Arguments of the kernel: nope [n, num_heads, nope_dim], latent [n, rank + rope_dim], k [n,
    num_heads, nope_dim + rope_dim].
    """

    def body(n, nope, latent, k):
        def row(i):
            with T.serial(T.int64(num_heads)) as head:
                at = (i, head)
                _copy(nope, at, k, (*at, 0), shape.nope_dim, target)
                begin = (i, shape.rank)
                _copy(latent, begin, k, (*at, shape.nope_dim), shape.rope_dim, target)

        parallel_if(n * (num_heads * shape.qk_dim) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("nope", (n, num_heads, shape.nope_dim), dtype),
            ("latent", (n, shape.width), dtype),
            ("k", (n, num_heads, shape.qk_dim), dtype),
        ]

    return rows_kernel(arguments, body, target)


def merge_states(num_heads: int, width: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that merges attention to this step's rows with attention to the past.

    Arguments of the kernel: own [n, num_heads, width], own_lse float32 [n, num_heads], past float32
    [n, num_heads, width], past_lse float32 [n, num_heads] (-inf where there is no past), out [n,
    num_heads, width]. The logarithms have base 2.
    """
    lanes = math.gcd(width, target.lanes)

    def body(n, own, own_lse, past, past_lse, out):
        def row(i):
            with T.serial(T.int64(num_heads)) as head:
                at = [i, head]
                largest = temp(T.max(own_lse[i, head], past_lse[i, head]))
                weights = [temp(exp2(lse[i, head] - largest, 1)) for lse in (own_lse, past_lse)]
                total = temp(weights[0] + weights[1])
                shares = [temp(weight / total) for weight in weights]
                with T.serial(T.int64(width // lanes)) as j:
                    value = sum(
                        load(x, [*at, j * lanes], lanes) * broadcast(share, lanes)
                        for x, share in zip((own, past), shares, strict=True)
                    )
                    store(out, [*at, j * lanes], lanes, value)

        parallel_if(n * (num_heads * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows, states = (n, num_heads, width), (n, num_heads)
        return [
            ("own", rows, dtype),
            ("own_lse", states, F32),
            ("past", rows, F32),
            ("past_lse", states, F32),
            ("out", rows, dtype),
        ]

    return rows_kernel(arguments, body, target)


def _angles(rope: RopeSpec | None, position, target: VectorTarget) -> CosSin | None:
    if rope is None:
        return None
    cos_sin = CosSin(rope, target.lanes)
    cos_sin.fill(position)
    return cos_sin


def _growth(shape: Latent, position):
    """Return the factor on Q at a position; None if it has none."""
    if shape.growth is None:
        return None
    factor, length = shape.growth
    turns = T.cast(position // length, F32)
    return temp(T.float32(1.0) + T.float32(factor) * T.log(T.float32(1.0) + turns))


def _rotate(
    cos_sin: CosSin | None,
    source,
    source_at: tuple,
    sink,
    sink_at: tuple,
    width: int,
    target: VectorTarget,
    scale=None,
) -> None:
    """Rotate columns of a row, from the last index of `source_at` on, times `scale`.

    Without angles they are copied.
    """
    if cos_sin is None:
        _copy(source, source_at, sink, sink_at, width, target, scale)
        return

    def read(dim, lanes):
        return load(source, (*source_at[:-1], source_at[-1] + dim), lanes)

    def write(dim, lanes, value):
        value = value if scale is None else value * broadcast(scale, lanes)
        store(sink, (*sink_at[:-1], sink_at[-1] + dim), lanes, value)

    cos_sin.rotate(read, write)


def _copy(
    source, source_at: tuple, sink, sink_at: tuple, width: int, target: VectorTarget, scale=None
) -> None:
    """Copy columns of a row, from the last index or the first column on, times `scale`."""
    lanes = math.gcd(width, target.lanes)
    if len(source_at) < len(source.shape):
        source_at = (*source_at, 0)
    with T.serial(T.int64(width // lanes)) as j:
        value = load(source, (*source_at[:-1], j * lanes + source_at[-1]), lanes)
        value = value if scale is None else value * broadcast(scale, lanes)
        store(sink, (*sink_at[:-1], j * lanes + sink_at[-1]), lanes, value)
