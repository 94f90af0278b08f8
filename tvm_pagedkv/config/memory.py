# SPDX-License-Identifier: Apache-2.0
"""The memory of a cache, computed from its configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .dtypes import ITEMSIZE
from .layer_spec import MHA_KINDS
from .resolved_config import ResolvedConfig
from .resolved_layer import ResolvedLayer


def memory_bytes(config: ResolvedConfig) -> int:
    """Return the bytes that a new cache allocates: `KVCacheConfig.memory_bytes`."""
    config.refuse_states()
    bounds = list(itertools.pairwise(config.layer_indptr))
    stages = bounds if config.stage is None else bounds[config.stage : config.stage + 1]
    return max(_memory_bytes_of(config, config.layers[begin:end]) for begin, end in stages)


def _memory_bytes_of(config: ResolvedConfig, layers: Sequence[ResolvedLayer]) -> int:
    num_rows = config.prefill_chunk_size
    page_pool = sum(config.num_pages_of(s) * s.page_bytes(config.page_size) for s in layers)

    # Rows of Q, K and V of the widest layer, and their float32 lse. MLA layers need no workspace:
    # their kernels read and write the model's tensors.
    mha = [s for s in layers if s.kind in MHA_KINDS]
    q_width = max((s.num_qo_heads * s.qk_head_dim for s in mha), default=0)
    kv_width = max((s.num_kv_heads * s.qk_head_dim for s in mha), default=0)
    lse_bytes = max((s.num_qo_heads for s in mha), default=0) * ITEMSIZE["float32"]
    workspace = num_rows * ((q_width + 2 * kv_width) * ITEMSIZE[config.dtype] + lse_bytes)

    num_sequences = min(config.max_num_sequences, num_rows)
    groups = {
        (
            *(s.kind, s.num_qo_heads, s.num_kv_heads, s.qk_head_dim, s.v_head_dim),
            *(s.window, s.kv_dtype),
        ): s
        for s in layers
        if s.keeps_kv
    }
    arrays = [2 * num_rows, num_sequences + 1]  # token trees
    arrays += [num_sequences + 1, num_sequences]
    arrays += [num_rows, num_rows]  # positions in sequences, and for RoPE
    for spec in groups.values():
        arrays += [num_sequences + 1, config.num_pages_of(spec)]
        length_rows = 4 if config.sliding_window and spec.window is None else 1
        arrays += [length_rows * num_sequences, num_sequences, num_rows]
        arrays.append(3 * num_sequences)  # page copies
    aux = sum(-(-size // 16) * 64 for size in arrays)  # int32, each aligned to 64 bytes
    return page_pool + workspace + aux
