# SPDX-License-Identifier: Apache-2.0
"""The pipeline of K and V of a spec: stages of rows as they are, or of codes that are widened."""

from __future__ import annotations

from tvm.script import tirx as T

from ...spec import KernelSpec
from ..emit import index_temp
from ..tiles.code_pipeline import CodePipeline
from ..tiles.pipeline import KvPipeline, ThreadGroup
from ..tiles.shared_tiles import SharedTiles
from ..tiles.tiling import BlockTiling


def kv_pipeline(
    spec: KernelSpec, tiling: BlockTiling, memory, begin: int, threads: ThreadGroup, v_begin
) -> KvPipeline:
    """Lay out the stages of K and V behind a byte of shared memory.

    Parameters
    ----------
    spec : KernelSpec
    tiling : BlockTiling
    memory : uint8 Buffer in the scope "shared.dyn"
    begin : int
    threads : ThreadGroup
        Each group of threads has stages of its own.
    v_begin : int32 expression
        First column of V that the block sums.
    """
    if tiling.codes:
        return CodePipeline(tiling, memory, begin, threads, v_begin)
    num_tiles, chunk = tiling.stages * threads.count, tiling.v.per_chunk
    k = SharedTiles(memory, begin, tiling.k, num_tiles)
    if tiling.is_latent:
        first_chunk = index_temp(T.truncdiv(v_begin, tiling.k.per_chunk))
        v = SharedTiles(memory, k.begin, tiling.k, num_tiles, first_chunk)
    else:
        v = SharedTiles(memory, k.end, tiling.v, num_tiles)
    v_chunks = spec.v_head_dim // chunk
    if tiling.slices > 1:
        left = T.truncdiv(spec.v_head_dim - v_begin, chunk)
        v_chunks = index_temp(T.min(tiling.v.chunks, left))
    k_chunks = spec.qk_head_dim // chunk
    return KvPipeline(tiling, k, v, threads, k_chunks=k_chunks, v_chunks=v_chunks, v_begin=v_begin)
