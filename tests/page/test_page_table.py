# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on page tables that the caller owns, against the reference, and bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tvm_pagedkv import page

from .. import reference


def _ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("num_sequences, num_rows", [(0, 0), (1, 1), (5, 40), (3, 200_000)])
def test_batch_indices_and_positions(num_sequences, num_rows, seed):
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(0, num_rows + 1, num_sequences + 1))
    counts = np.diff(bounds)
    seq_lens = counts + rng.integers(0, 100, num_sequences)
    expected_batch = np.full(num_rows, -1)
    expected_positions = np.zeros(num_rows, int)
    for b, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        expected_batch[begin:end] = b
        expected_positions[begin:end] = np.arange(seq_lens[b] - (end - begin), seq_lens[b])
    actual = page.get_batch_indices_positions(bounds, seq_lens, num_rows)
    given = tvm.runtime.empty((num_rows,), "int32"), np.empty(num_rows, np.int32)
    returned = page.get_batch_indices_positions(bounds.astype("int32"), seq_lens, num_rows, *given)
    assert returned[0] is given[0] and returned[1] is given[1]
    for batch_indices, positions in (actual, (given[0].numpy(), given[1])):
        assert batch_indices.dtype == positions.dtype == np.int32
        np.testing.assert_array_equal(batch_indices, expected_batch)
        np.testing.assert_array_equal(positions, expected_positions)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("num_sequences", [0, 1, 300])
def test_seq_lens(num_sequences, page_size, seed):
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 4, num_sequences))])
    last = rng.integers(0, page_size + 1, num_sequences)
    last[np.diff(indptr) == 0] = -9  # of no meaning
    expected = reference.table_lengths(indptr, last, page_size)
    np.testing.assert_array_equal(page.get_seq_lens(indptr, last, page_size), expected)
    result = page.get_seq_lens(tvm.runtime.tensor(indptr.astype("int32")), last, page_size)
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_sequences, longest", [(0, 1), (1, 1), (6, 90), (3, 60_000)])
def test_vector_sparse_offsets(num_sequences, longest, block_size, seed):
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(0, longest + 1, num_sequences)
    num_blocks = -(-kv_lens // block_size) + rng.integers(0, 2, num_sequences)
    block_indptr = np.concatenate([[0], np.cumsum(num_blocks)])
    room = kv_lens + rng.integers(0, 3, num_sequences)
    indptr = 2 + np.concatenate([[0], np.cumsum(room)])
    blocks = rng.integers(0, 1000, block_indptr[-1] + 1)
    out = np.full(indptr[-1] + 2, -7, np.int32)
    strides = (37 * block_size, 3)
    expected = out.copy()
    offsets = reference.vector_sparse_offsets(blocks, block_indptr, kv_lens, *strides, block_size)
    for first, values in zip(indptr, offsets, strict=False):
        expected[first : first + len(values)] = values
    result = page.block_sparse_indices_to_vector_sparse_offsets(
        blocks, block_indptr, out, indptr, kv_lens, *strides, block_size
    )
    assert result is out
    np.testing.assert_array_equal(out, expected)


def test_bad_index_arithmetic():
    positions = page.get_batch_indices_positions
    lens = page.get_seq_lens
    offsets = page.block_sparse_indices_to_vector_sparse_offsets
    out = np.full(4, -7, np.int32)
    table = (_ints(3, 1), _ints(0, 1, 2), out, _ints(0, 2, 4), _ints(2, 2))
    big = (_ints(2**30, 1), *table[1:])
    for error, text, call in (
        (ValueError, "seq_lens must have shape", lambda: positions(_ints(0, 2), _ints(2, 3), 2)),
        (ValueError, r"seq_lens\[0\] is 1", lambda: positions(_ints(0, 2), _ints(1), 2)),
        (ValueError, "at most 1 .*nnz", lambda: positions(_ints(0, 2), _ints(2), 1)),
        (ValueError, "append_indptr must asc", lambda: positions(_ints(2, 0), _ints(2), 2)),
        (ValueError, "nnz must be in", lambda: positions(_ints(0, 2), _ints(2), -1)),
        (TypeError, "nnz must be an int", lambda: positions(_ints(0, 2), _ints(2), 2.0)),
        (ValueError, "contiguous int32", lambda: positions(_ints(0), _ints(), 2, np.zeros(2))),
        (ValueError, r"shape \[2\]", lambda: positions(_ints(0), _ints(), 2, _ints(1))),
        (ValueError, "page_size must be in", lambda: lens(_ints(0, 1), _ints(1), 0)),
        (ValueError, r"\[0\] must be in \[0, 4\]", lambda: lens(_ints(0, 1), _ints(5), 4)),
        (ValueError, "below 2", lambda: lens(_ints(0, 2**30), _ints(5), 16)),
        (ValueError, "kv_indptr must ascend", lambda: lens(_ints(3, 1), _ints(1), 4)),
        (ValueError, "block_size must be", lambda: offsets(*table, 8, 1, 0)),
        (ValueError, "stride_n must be", lambda: offsets(*table, 8, -1, 2)),
        (ValueError, "below 2", lambda: offsets(*big, 8, 1, 2)),
        (ValueError, r"kv_lens\[0\]", lambda: offsets(*table, 8, 1, 1)),
        (ValueError, "room for 1", lambda: offsets(*table[:3], _ints(0, 1, 4), table[4], 8, 1, 2)),
        (ValueError, "beyond", lambda: offsets(*table[:3], _ints(0, 2, 5), table[4], 8, 1, 2)),
        (ValueError, "vector_sparse_indptr must asc", lambda: offsets(
            *table[:3], _ints(0, 3, 2), table[4], 8, 1, 2)),
        (IndexError, "block_sparse_indices", lambda: offsets(_ints(3, -1), *table[1:], 8, 1, 2)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    assert (out == -7).all()
    offsets(*table, 8, 1, 2)
    np.testing.assert_array_equal(out, [24, 25, 8, 9])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
