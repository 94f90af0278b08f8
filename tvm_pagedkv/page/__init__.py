# SPDX-License-Identifier: Apache-2.0
"""Pages that the caller owns: appends and page-table arithmetic, as ``flashinfer.page`` has them.

The names, arguments and results are FlashInfer's; tensors lie on the CPU and may be of TVM, NumPy,
or anything with DLPack (torch). Pools are written in place, whatever their strides. Arguments are
checked before anything is written: a call that raises has changed nothing.

A page table of B sequences is `kv_indices` (pages, in order of position), `kv_indptr` ``[B + 1]``
and `kv_last_page_len` ``[B]`` (slots in use in the last page of each). Integers are int32 or int64.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tvm_ffi

from tir_kernels import page_layer, page_table
from tir_kernels.page_layer import PageLayerSpec

from ..compiler import load_kernels, resolve_target, vector_target
from .arguments import (
    MLA_LAYOUT,
    Pools,
    check_range,
    empty_like,
    empty_places,
    integers,
    integers_out,
    no_finding,
    raise_finding,
)


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
    """Write rows of K and V to the pages of their sequences.

    Parameters
    ----------
    append_key, append_value : ``[T, H, D]``
        float32, float16 or bfloat16; any strides between rows.
    batch_indices, positions : ``[T]``
        Sequence (-1: do not write the row) and position of each row, as
        `get_batch_indices_positions` returns them. No two rows should have one position.
    paged_kv_cache : one tensor or a pair (K, V)
        ``[P, 2, page_size, H, D]`` or two of ``[P, page_size, H, D]``; with `kv_layout` "HND"
        ``[P, 2, H, page_size, D]`` or two of ``[P, H, page_size, D]``. Rows of D elements are
        contiguous; all other strides are free. The type may differ from that of the rows.
    kv_indices, kv_indptr, kv_last_page_len : the page table, with the appended rows in it.
    kv_layout : {"NHD", "HND"}

    Raises
    ------
    TypeError
        For what is no tensor.
    ValueError
        For shapes, types, strides and page tables that do not fit.
    IndexError
        For a sequence, position or page that does not exist.
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
    """Write one row of K and V to the last position of each sequence.

    Parameters and errors are those of `append_paged_kv_cache`; `append_key` and `append_value` are
    ``[B, H, D]``, and no sequence may be empty.
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
    places, found = empty_places(num_sequences), no_finding()
    sizes = (pools.num_pages, pools.page_size)
    _table_kernels()["last_places"](*table, *sizes, places, found)
    raise_finding(found, page_size=pools.page_size, num_pages=pools.num_pages, least=1)
    _write(sources, pools, places)


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
    """Write rows of the compressed KV and of the rotated key part to the pages of their sequences.

    Parameters
    ----------
    append_ckv, append_kpe : ``[T, ckv_dim]`` and ``[T, kpe_dim]``, of any widths.
    ckv_cache, kpe_cache : ``[P, page_size, ckv_dim]`` and ``[P, page_size, kpe_dim]``
        With any strides between rows: two parts of one pool will do.
    others : as `append_paged_kv_cache` takes them, and so are the errors.
    """
    pools = Pools.of((ckv_cache, kpe_cache), MLA_LAYOUT)
    sources = pools.rows_for({"append_ckv": append_ckv, "append_kpe": append_kpe})
    _append_rows(
        sources, pools, batch_indices, positions, (kv_indices, kv_indptr, kv_last_page_len)
    )


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """Give each appended row its sequence and its position.

    Parameters
    ----------
    append_indptr : ``[B + 1]``
        Rows ``append_indptr[b]`` up to ``append_indptr[b + 1]`` belong to sequence b.
    seq_lens : ``[B]``
        Lengths with the appended rows.
    nnz : int
        Number of rows; those that belong to no sequence get -1 and position 0.
    batch_indices, positions : int32 ``[nnz]``, optional
        Where to write the results.

    Returns
    -------
    batch_indices, positions : int32 ``[nnz]``, of the library of `append_indptr`.
    """
    indptr = integers("append_indptr", append_indptr)
    lens = integers("seq_lens", seq_lens, indptr.shape[0] - 1)
    check_range("nnz", nnz, 0)
    outputs = []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        result = empty_like(append_indptr, nnz) if given is None else given
        outputs.append((result, integers_out(name, result, nnz)))
    found = no_finding()
    tensors = [tensor for _, tensor in outputs]
    _table_kernels()["batch_indices_positions"](indptr, lens, *tensors, found)
    raise_finding(found, indptr="append_indptr", num_entries=nnz, entries="nnz")
    return outputs[0][0], outputs[1][0]


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Lengths of the sequences of a page table.

    Parameters
    ----------
    kv_indptr : ``[B + 1]``
    kv_last_page_len : ``[B]``
        Of no meaning where a sequence has no page: its length is 0.
    page_size : int

    Returns
    -------
    int32 ``[B]``, of the library of `kv_indptr`.
    """
    indptr = integers("kv_indptr", kv_indptr)
    last = integers("kv_last_page_len", kv_last_page_len, indptr.shape[0] - 1)
    check_range("page_size", page_size, 1)
    result, found = empty_like(kv_indptr, last.shape[0]), no_finding()
    lengths = integers_out("lengths", result, last.shape[0])
    _table_kernels()["sequence_lengths"](indptr, last, page_size, lengths, found)
    raise_finding(found, page_size=page_size)
    return result


def block_sparse_indices_to_vector_sparse_offsets(
    block_sparse_indices: Any,
    block_sparse_indptr: Any,
    vector_sparse_offsets: Any,
    vector_sparse_indptr: Any,
    kv_lens: Any,
    stride_block: int,
    stride_n: int,
    block_size: int,
) -> Any:
    """Spell a block-sparse table out: an offset for each position instead of an index a block.

    Position i of sequence b has the offset ``block_sparse_indices[block_sparse_indptr[b] + i //
    block_size] * stride_block + (i % block_size) * stride_n``, which is written to
    ``vector_sparse_offsets[vector_sparse_indptr[b] + i]``.

    Parameters
    ----------
    block_sparse_indices : ``[N]``
    block_sparse_indptr : ``[B + 1]``
    vector_sparse_offsets : int32 ``[M]``, written in place.
    vector_sparse_indptr : ``[B + 1]``
    kv_lens : ``[B]``
        Positions of each sequence.
    stride_block, stride_n : int
        From one block to the next, and from one position to the next within a block.
    block_size : int

    Returns
    -------
    `vector_sparse_offsets`
        Every block size takes this path. (FlashInfer returns other tensors for blocks of one.)
    """
    indices = integers("block_sparse_indices", block_sparse_indices)
    block_indptr = integers("block_sparse_indptr", block_sparse_indptr)
    num_sequences = block_indptr.shape[0] - 1
    offsets = integers_out("vector_sparse_offsets", vector_sparse_offsets)
    indptr = integers("vector_sparse_indptr", vector_sparse_indptr, num_sequences + 1)
    lens = integers("kv_lens", kv_lens, num_sequences)
    check_range("stride_block", stride_block, 0)
    check_range("stride_n", stride_n, 0)
    check_range("block_size", block_size, 1)
    found = no_finding()
    _table_kernels()["vector_sparse_offsets"](
        indices, block_indptr, offsets, indptr, lens, stride_block, stride_n, block_size, found
    )
    raise_finding(
        found,
        indptr="block_sparse_indptr",
        indices="block_sparse_indices",
        num_entries=indices.shape[0],
        entries="block_sparse_indices",
    )
    return vector_sparse_offsets


# --- from checked arguments to kernels ----------------------------------------------------------


def _table(kv_indices, kv_indptr, kv_last_page_len) -> tuple:
    indptr = integers("kv_indptr", kv_indptr)
    last = integers("kv_last_page_len", kv_last_page_len, indptr.shape[0] - 1)
    return integers("kv_indices", kv_indices), indptr, last


def _append_rows(sources, pools: Pools, batch_indices, positions, table: tuple) -> None:
    num_rows = sources[0].shape[0]
    batch_indices = integers("batch_indices", batch_indices, num_rows)
    positions = integers("positions", positions, num_rows)
    table = _table(*table)
    places, found = empty_places(num_rows), no_finding()
    sizes = (pools.num_pages, pools.page_size)
    _table_kernels()["row_places"](batch_indices, positions, *table, *sizes, places, found)
    raise_finding(
        found,
        page_size=pools.page_size,
        num_pages=pools.num_pages,
        num_entries=table[0].shape[0],
        num_sequences=table[2].shape[0],
    )
    _write(sources, pools, places)


def _write(sources, pools: Pools, places: tvm_ffi.Tensor) -> None:
    if 0 in (pools.num_pages, places.shape[0]):
        return
    k_dim, v_dim = (source.shape[-1] for source in sources)
    append = _append_kernel(
        k_dim, v_dim, str(sources[0].dtype), pools.dtype, pools.axes, pools.is_fused
    )
    append(*pools.tensors, *sources, places)


@functools.cache
def _append_kernel(k_dim, v_dim, dtype, kv_dtype, layout, is_fused):
    target = resolve_target()
    spec = PageLayerSpec(k_dim, v_dim, dtype, kv_dtype, layout, is_fused, vector_target(target))
    builders = {"append": functools.partial(page_layer.append, spec)}
    return load_kernels(builders, ("append", repr(spec)), target)["append"]


@functools.cache
def _table_kernels() -> Mapping:
    return load_kernels(page_table.BUILDERS, ("page table kernels",), resolve_target())
