# SPDX-License-Identifier: Apache-2.0
"""Appends of rows of K and V to pages that the caller owns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tvm_ffi

from tir_kernels.cpu.page_ops import page_layer
from tir_kernels.cpu.page_ops.page_layer import PageLayerSpec

from ..compiler import load_kernels, resolve_target, vector_target
from .arguments import MLA_LAYOUT, Pools, empty_slots, integers, no_finding, raise_finding
from .table import table_kernels


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Append rows of K and V to sequences.

    T is the number of rows, P the number of pages, H the number of KV heads, D the head dimension.

    Parameters
    ----------
    append_key, append_value : tensors ``[T, H, D]``, float32, float16 or bfloat16
        Rows, with any strides between them.
    batch_indices, positions : integer tensors ``[T]``
        Sequence (-1: skip the row) and position of each row, from `get_batch_indices_positions`.
        Rows must not repeat a position.
    paged_kv_cache : tensor, or pair of tensors (K, V)
        ``[P, 2, page_size, H, D]``, or twice ``[P, page_size, H, D]``. With `kv_layout` "HND":
        ``[P, 2, H, page_size, D]``, or twice ``[P, H, page_size, D]``. The D elements of a row are
        contiguous; other strides are arbitrary. The dtype may differ from that of the rows.
    kv_indices, kv_indptr, kv_last_page_len : integer tensors
        The page table, which includes the appended rows.
    kv_layout : {"NHD", "HND"}

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If shapes, dtypes, strides or the page table do not fit.
    IndexError
        If a sequence, position or page does not exist.
    """
    pools = Pools.of(paged_kv_cache, kv_layout)
    sources = pools.rows_for({"append_key": append_key, "append_value": append_value})
    _append_rows(
        sources, pools, batch_indices, positions, (kv_indices, kv_indptr, kv_last_page_len)
    )


def append_paged_kv_cache_decode(
    append_key: Any,
    append_value: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Append one row of K and V to the last position of each sequence.

    Parameters
    ----------
    append_key, append_value : tensors ``[B, H, D]``, float32, float16 or bfloat16
        A row for each sequence.
    paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As for `append_paged_kv_cache`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `append_paged_kv_cache`; ValueError also if a sequence is empty.
    """
    pools = Pools.of(paged_kv_cache, kv_layout)
    sources = pools.rows_for({"append_key": append_key, "append_value": append_value})
    table = _table(kv_indices, kv_indptr, kv_last_page_len)
    num_sequences = table[2].shape[0]
    if sources[0].shape[0] != num_sequences:
        raise ValueError(
            f"append_key must have a row for each of {num_sequences} sequences, "
            f"got {sources[0].shape[0]}"
        )
    slots, found = empty_slots(num_sequences), no_finding()
    sizes = (pools.num_pages, pools.page_size)
    table_kernels()["last_slots"](*table, *sizes, slots, found)
    raise_finding(found, page_size=pools.page_size, num_pages=pools.num_pages, minimum=1)
    _write(sources, pools, slots)


def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> None:
    """Append rows of the compressed KV and of the rotated key part (MLA) to sequences.

    Parameters
    ----------
    append_ckv, append_kpe : tensors ``[T, ckv_dim]`` and ``[T, kpe_dim]``
        Rows of any width.
    ckv_cache, kpe_cache : tensors ``[P, page_size, ckv_dim]`` and ``[P, page_size, kpe_dim]``
        Pages, with any strides between rows; they can be two slices of one pool.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
        As for `append_paged_kv_cache`.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `append_paged_kv_cache`.
    """
    pools = Pools.of((ckv_cache, kpe_cache), MLA_LAYOUT)
    sources = pools.rows_for({"append_ckv": append_ckv, "append_kpe": append_kpe})
    _append_rows(
        sources, pools, batch_indices, positions, (kv_indices, kv_indptr, kv_last_page_len)
    )


def _table(
    kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any
) -> tuple[tvm_ffi.Tensor, tvm_ffi.Tensor, tvm_ffi.Tensor]:
    """Check a page table; return its indices, indptr and last page lengths as int32."""
    indptr = integers("kv_indptr", kv_indptr)
    last = integers("kv_last_page_len", kv_last_page_len, indptr.shape[0] - 1)
    return integers("kv_indices", kv_indices), indptr, last


def _append_rows(
    sources: Sequence[tvm_ffi.Tensor],
    pools: Pools,
    batch_indices: Any,
    positions: Any,
    page_table: tuple[Any, Any, Any],
) -> None:
    """Find the slot of every row, and write the rows."""
    num_rows = sources[0].shape[0]
    batch_indices = integers("batch_indices", batch_indices, num_rows)
    positions = integers("positions", positions, num_rows)
    table = _table(*page_table)
    slots, found = empty_slots(num_rows), no_finding()
    sizes = (pools.num_pages, pools.page_size)
    table_kernels()["row_slots"](batch_indices, positions, *table, *sizes, slots, found)
    raise_finding(
        found,
        page_size=pools.page_size,
        num_pages=pools.num_pages,
        num_entries=table[0].shape[0],
        num_sequences=table[2].shape[0],
    )
    _write(sources, pools, slots)


def _write(sources: Sequence[tvm_ffi.Tensor], pools: Pools, slots: tvm_ffi.Tensor) -> None:
    if 0 in (pools.num_pages, slots.shape[0]):
        return
    k_dim, v_dim = (source.shape[-1] for source in sources)
    append = _append_kernel(
        k_dim, v_dim, str(sources[0].dtype), pools.dtype, pools.axes, pools.is_fused
    )
    append(*pools.tensors, *sources, slots)


@functools.cache
def _append_kernel(
    k_dim: int, v_dim: int, dtype: str, kv_dtype: str, layout: str, is_fused: bool
) -> tvm_ffi.Function:
    target = resolve_target()
    spec = PageLayerSpec(k_dim, v_dim, dtype, kv_dtype, layout, is_fused, vector_target(target))
    builders = {"append": functools.partial(page_layer.append, spec)}
    return load_kernels(builders, ("append", repr(spec)), target)["append"]
