# SPDX-License-Identifier: Apache-2.0
"""Arithmetic with page tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tvm_ffi

from tir_kernels.cpu.page_ops import page_table

from ..compiler import load_kernels, resolve_target
from .arguments import (
    check_range,
    empty_like,
    integers,
    integers_out,
    no_finding,
    raise_finding,
)


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """Compute the sequence and the position of each appended row.

    Parameters
    ----------
    append_indptr : integer tensor ``[B + 1]``
        Rows ``append_indptr[b]`` to ``append_indptr[b + 1]`` belong to sequence b.
    seq_lens : integer tensor ``[B]``
        Lengths of the sequences, including the appended rows.
    nnz : int
        Number of rows. Rows beyond the last sequence get sequence -1 and position 0.
    batch_indices, positions : int32 tensors ``[nnz]``, optional
        Receive the results.

    Returns
    -------
    batch_indices, positions : int32 tensors ``[nnz]``
        Tensors of the same library as `append_indptr`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or a sequence is shorter than its appended rows.
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
    table_kernels()["batch_indices_positions"](indptr, lens, *tensors, found)
    raise_finding(found, indptr="append_indptr", num_entries=nnz, entries="nnz")
    return outputs[0][0], outputs[1][0]


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Compute the lengths of the sequences of a page table.

    Parameters
    ----------
    kv_indptr : integer tensor ``[B + 1]``
    kv_last_page_len : integer tensor ``[B]``
        Ignored for a sequence without pages, whose length is 0.
    page_size : int

    Returns
    -------
    int32 tensor ``[B]``
        A tensor of the same library as `kv_indptr`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    """
    indptr = integers("kv_indptr", kv_indptr)
    last = integers("kv_last_page_len", kv_last_page_len, indptr.shape[0] - 1)
    check_range("page_size", page_size, 1)
    result, found = empty_like(kv_indptr, last.shape[0]), no_finding()
    lengths = integers_out("lengths", result, last.shape[0])
    table_kernels()["sequence_lengths"](indptr, last, page_size, lengths, found)
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
    """Expand a block-sparse table to one offset per position.

    The offset of position i of sequence b is ``block_sparse_indices[block_sparse_indptr[b] + i //
    block_size] * stride_block + (i % block_size) * stride_n``. It is written to
    ``vector_sparse_offsets[vector_sparse_indptr[b] + i]``.

    Parameters
    ----------
    block_sparse_indices : integer tensor ``[N]``
    block_sparse_indptr : integer tensor ``[B + 1]``
    vector_sparse_offsets : int32 tensor ``[M]``
        Receives the offsets.
    vector_sparse_indptr : integer tensor ``[B + 1]``
    kv_lens : integer tensor ``[B]``
        Number of positions of each sequence.
    stride_block, stride_n : int
        Distance between blocks, and between positions within a block.
    block_size : int

    Returns
    -------
    tensor
        `vector_sparse_offsets`.

    Raises
    ------
    TypeError, ValueError, IndexError
        If an argument does not fit.

    Notes
    -----
    FlashInfer returns other tensors for a `block_size` of 1; this function does not.
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
    table_kernels()["vector_sparse_offsets"](
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


@functools.cache
def table_kernels() -> Mapping[str, tvm_ffi.Function]:
    """Return the kernels that compute with page tables, by name."""
    return load_kernels(page_table.BUILDERS, ("page table kernels",), resolve_target())
