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
    bounds = list(itertools.pairwise(config.layer_indptr))
    stages = bounds if config.stage is None else bounds[config.stage : config.stage + 1]
    return max(_memory_bytes_of(config, config.layers[begin:end]) for begin, end in stages)


def _memory_bytes_of(config: ResolvedConfig, layers: Sequence[ResolvedLayer]) -> int:
    num_rows = config.prefill_chunk_size
    page_pool = sum(
        config.num_pages_of(s)
        * (s.page_bytes(config.page_size) + s.page_bounds_bytes(config.dtype))
        for s in layers
    )
    page_pool += sum(_recurrent_bytes(config, s) for s in layers)

    # Rows of Q, K and V of the widest layer, and their float32 lse. MLA layers need no workspace:
    # their kernels read and write the model's tensors.
    mha = [s for s in layers if s.kind in MHA_KINDS]
    q_width = max((s.num_qo_heads * s.qk_head_dim for s in mha), default=0)
    kv_width = max((s.num_kv_heads * max(s.qk_head_dim, s.v_head_dim) for s in mha), default=0)
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
    arrays += [num_rows] if config.spans else []
    for spec in groups.values():
        arrays += [num_sequences + 1, config.num_pages_of(spec)]
        length_rows = 4 if config.sliding_window and spec.window is None else 1
        arrays += [length_rows * num_sequences, num_sequences, num_rows]
        arrays.append(3 * num_sequences)  # page copies
    arrays += _recurrent_arrays(config, layers)
    aux = sum(-(-size // 16) * 64 for size in arrays)  # int32, each aligned to 64 bytes
    return page_pool + workspace + aux


def _recurrent_bytes(config: ResolvedConfig, layer: ResolvedLayer) -> int:
    """Bytes of the states, the ingredients and the rows of a convolution that a layer keeps."""
    num_bytes = 0
    if layer.recurrent is not None:
        row_bytes = layer.recurrent.row_bytes(config.dtype)
        num_bytes += config.num_ingredient_pages_of(layer) * config.page_size * row_bytes
        num_bytes += config.num_states_of(layer) * layer.recurrent.state_bytes
    if layer.conv is not None:
        row_bytes = layer.conv.channels * ITEMSIZE[config.dtype]
        num_bytes += config.num_conv_pages_of(layer) * config.page_size * row_bytes
    return num_bytes


def _recurrent_arrays(config: ResolvedConfig, layers: Sequence[ResolvedLayer]) -> list[int]:
    """Sizes of the arrays of a step for groups of recurrent layers and of convolutions."""
    num_rows = config.prefill_chunk_size
    num_sequences = min(config.max_num_sequences, num_rows)
    arrays: list[int] = []

    def add_group(num_pages: int, num_taps: int) -> None:
        arrays.extend([num_sequences + 1, num_pages, num_sequences, num_sequences, num_rows])
        arrays.extend([num_rows * num_taps, 3 * num_sequences])

    recurrent = {s.recurrent: s for s in layers if s.recurrent is not None}
    for layer in recurrent.values():
        add_group(config.num_ingredient_pages_of(layer), 0)
        num_segments = num_sequences + num_rows // config.interval_of(layer)
        arrays.extend([num_sequences + 1, num_segments + 1, num_segments, num_segments])
        arrays.extend([num_rows, num_rows])
    convs = {
        (s.conv.channels, s.conv.width, config.num_conv_pages_of(s)): s
        for s in layers
        if s.conv is not None
    }
    for layer in convs.values():
        assert layer.conv is not None
        add_group(config.num_conv_pages_of(layer), layer.conv.width - 1)
    return arrays
