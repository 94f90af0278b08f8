# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around latent attention: rows of the cache, of Q and of K, and the merged output."""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.script import prim_func
from tir_kernels.spec import RopeSpec, VectorTarget
from tir_kernels.targets import row_worker

from ...config.latent_config import Latent
from ..define import attributes, built_once, match_float32, match_int32, matcher
from .copies import copy_columns, rotate_columns
from .norms import Norm, normalize


@built_once
def latent_rows(
    shape: Latent, epsilon: float, rope: RopeSpec | None, dtype: str, target: VectorTarget
):
    """Build the kernel that makes rows of the cache: a norm of `rank` columns, then a rotation.

    Without `rope` the last columns stay as they are.

    Arguments of the kernel: x [n, rank + rope_dim], weight float32 [rank], positions int32 [n],
    compressed [n, rank], latent [n, rank + rope_dim], whose first columns are `compressed`.
    """
    match_rows, rank = matcher(target, dtype), shape.rank

    @prim_func
    def latent_rows(
        var_x: T.handle,
        var_weight: T.handle,
        var_positions: T.handle,
        var_compressed: T.handle,
        var_latent: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, shape.width)
        weight = match_float32(var_weight, rank)
        positions = match_int32(var_positions, n)
        compressed = match_rows(var_compressed, n, rank)
        latent = match_rows(var_latent, n, shape.width)
        worker = row_worker(target)
        v, rotated = worker.vectors(rank), worker.vectors(shape.rope_dim)
        for row in worker.items(n, shape.width):
            normalize(Norm(v, epsilon), x, row, 0, weight, compressed, 0)
            copy_columns(v, compressed, (row,), 0, latent, (row,), 0)
            if rope is None:
                copy_columns(rotated, x, (row,), rank, latent, (row,), rank)
            else:
                cos_sin = CosSin(rope, target.lanes)
                cos_sin.fill(positions[row])
                rotate_columns(cos_sin, x, (row,), rank, latent, (row,), rank)

    return latent_rows


@built_once
def latent_queries(
    shape: Latent, num_heads: int, rope: RopeSpec | None, dtype: str, target: VectorTarget
):
    """Build the kernel that makes both forms of Q: of its parts, and of the absorbed part.

    Without `rope` nothing is rotated.

    Arguments of the kernel: nope [n, num_heads, nope_dim], rotated [n, num_heads, rope_dim], which
    is not rotated yet, absorbed [n, num_heads, rank], positions int32 [n], q [n, num_heads,
    nope_dim + rope_dim], latent [n, num_heads, rank + rope_dim].
    """
    match_rows, nope_dim, rank = matcher(target, dtype), shape.nope_dim, shape.rank
    factor, length = shape.growth or (0.0, 1)

    @prim_func
    def latent_queries(
        var_nope: T.handle,
        var_rotated: T.handle,
        var_absorbed: T.handle,
        var_positions: T.handle,
        var_q: T.handle,
        var_latent: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        nope = match_rows(var_nope, n, num_heads, nope_dim)
        rotated = match_rows(var_rotated, n, num_heads, shape.rope_dim)
        absorbed = match_rows(var_absorbed, n, num_heads, rank)
        positions = match_int32(var_positions, n)
        q = match_rows(var_q, n, num_heads, shape.qk_dim)
        latent = match_rows(var_latent, n, num_heads, shape.width)
        worker = row_worker(target)
        nope_vectors, rank_vectors = worker.vectors(nope_dim), worker.vectors(rank)
        rope_vectors = worker.vectors(shape.rope_dim)
        for row in worker.items(n, num_heads * shape.width):
            if rope is not None:
                cos_sin = CosSin(rope, target.lanes)
                cos_sin.fill(positions[row])
            if shape.growth is not None:
                turns = T.meta_var(T.cast(positions[row] // length, "float32"))
                scale = T.float32(1.0) + T.float32(factor) * T.log(T.float32(1.0) + turns)
            else:
                scale = T.meta_var(None)
            for head in range(T.int64(num_heads)):
                at = T.meta_var((row, head))
                copy_columns(nope_vectors, nope, at, 0, q, at, 0, scale)
                copy_columns(rank_vectors, absorbed, at, 0, latent, at, 0, scale)
                if rope is None:
                    copy_columns(rope_vectors, rotated, at, 0, q, at, nope_dim, scale)
                else:
                    rotate_columns(cos_sin, rotated, at, 0, q, at, nope_dim, scale)
                copy_columns(rope_vectors, q, at, nope_dim, latent, at, rank)

    return latent_queries


@built_once
def latent_keys(shape: Latent, num_heads: int, dtype: str, target: VectorTarget):
    """Build the kernel that gives each head a K of its own and the rotated part of all heads.

    Arguments of the kernel: nope [n, num_heads, nope_dim], latent [n, rank + rope_dim], k [n,
    num_heads, nope_dim + rope_dim].
    """
    match_rows, nope_dim = matcher(target, dtype), shape.nope_dim

    @prim_func
    def latent_keys(var_nope: T.handle, var_latent: T.handle, var_k: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        nope = match_rows(var_nope, n, num_heads, nope_dim)
        latent = match_rows(var_latent, n, shape.width)
        k = match_rows(var_k, n, num_heads, shape.qk_dim)
        worker = row_worker(target)
        nope_vectors, rope_vectors = worker.vectors(nope_dim), worker.vectors(shape.rope_dim)
        for row in worker.items(n, num_heads * shape.qk_dim):
            for head in range(T.int64(num_heads)):
                at = T.meta_var((row, head))
                copy_columns(nope_vectors, nope, at, 0, k, at, 0)
                copy_columns(rope_vectors, latent, (row,), shape.rank, k, at, nope_dim)

    return latent_keys


@built_once
def merge_states(num_heads: int, width: int, dtype: str, target: VectorTarget):
    """Build the kernel that merges attention to this step's rows with attention to the past.

    Arguments of the kernel: own [n, num_heads, width], own_lse float32 [n, num_heads], past float32
    [n, num_heads, width], past_lse float32 [n, num_heads] (-inf where there is no past), out [n,
    num_heads, width]. The logarithms have base 2.
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def merge_states(
        var_own: T.handle,
        var_own_lse: T.handle,
        var_past: T.handle,
        var_past_lse: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        own = match_rows(var_own, n, num_heads, width)
        own_lse = match_float32(var_own_lse, n, num_heads)
        past = match_float32(var_past, n, num_heads, width)
        past_lse = match_float32(var_past_lse, n, num_heads)
        out = match_rows(var_out, n, num_heads, width)
        worker = row_worker(target)
        v = worker.vectors(width)
        exp2 = T.meta_var(v.arithmetic.exp2)
        for row in worker.items(n, num_heads * width):
            for head in range(T.int64(num_heads)):
                largest = T.max(own_lse[row, head], past_lse[row, head])
                own_weight = exp2(own_lse[row, head] - largest, 1)
                past_weight = exp2(past_lse[row, head] - largest, 1)
                total = own_weight + past_weight
                own_share, past_share = own_weight / total, past_weight / total
                for column in v.columns():
                    at = T.meta_var((row, head, column))
                    value = v.load(own, at) * v.filled(own_share)
                    value += v.load(past, at) * v.filled(past_share)
                    v.store(out, at, value)

    return merge_states
