# SPDX-License-Identifier: Apache-2.0
"""Appends and page-table arithmetic on pages that the caller owns, for the CPU.

Names, arguments and results are those of ``flashinfer.page``
(https://docs.flashinfer.ai/api/page.html). Tensors are TVM tensors, NumPy arrays, or objects with
``__dlpack__`` such as torch tensors, on the CPU. Pools are written in place, with any strides.
Arguments are checked before anything is written: a call that raises changes nothing.

A page table of B sequences has three integer tensors, int32 or int64:

- `kv_indices`: page ids, in order of position;
- `kv_indptr` ``[B + 1]``: entries ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` belong to sequence b;
- `kv_last_page_len` ``[B]``: number of used slots in the last page of each sequence.
"""

from .append import (
    append_paged_kv_cache,
    append_paged_kv_cache_decode,
    append_paged_mla_kv_cache,
)
from .table import (
    block_sparse_indices_to_vector_sparse_offsets,
    get_batch_indices_positions,
    get_seq_lens,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_kv_cache_decode",
    "append_paged_mla_kv_cache",
    "block_sparse_indices_to_vector_sparse_offsets",
    "get_batch_indices_positions",
    "get_seq_lens",
]
