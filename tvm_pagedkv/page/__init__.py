# SPDX-License-Identifier: Apache-2.0
"""Pages that the caller owns: appends and page-table arithmetic, as ``flashinfer.page`` has them.

The names, arguments and results are FlashInfer's; tensors lie on the CPU and may be of TVM, NumPy,
or anything with DLPack (torch). Pools are written in place, whatever their strides. Arguments are
checked before anything is written: a call that raises has changed nothing.

A page table of B sequences is `kv_indices` (pages, in order of position), `kv_indptr` ``[B + 1]``
and `kv_last_page_len` ``[B]`` (slots in use in the last page of each). Integers are int32 or int64.
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
