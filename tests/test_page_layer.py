# SPDX-License-Identifier: Apache-2.0
"""Pages that the caller owns: every layout and stride, against the reference, and bad arguments.

Unused slots hold NaN, page tables are shuffled, and whole pools are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tir_kernels import page_layer, page_table
from tvm_pagedkv import page
from tvm_pagedkv.build import resolve_target, vector_target

from . import reference
from .test_page_kernels import assert_same_bits, normal

MANY_ROWS = 1500  # enough for every append below to take its parallel path


@dataclass(frozen=True)
class Case:
    num_heads: int
    dim: int
    dtype: str
    kv_dtype: str
    page_size: int


CASES = {
    "2x64-f32-p16": Case(2, 64, "float32", "float32", 16),
    "8x128-bf16-p16": Case(8, 128, "bfloat16", "bfloat16", 16),
    "25x96-f16-p1": Case(25, 96, "float16", "float16", 1),
    "1x7-f32-bf16-p5": Case(1, 7, "float32", "bfloat16", 5),
    "71x1-f16-f32-p3": Case(71, 1, "float16", "float32", 3),
    "3x576-bf16-f16-p7": Case(3, 576, "bfloat16", "float16", 7),
    "5x100-f32-f16-p256": Case(5, 100, "float32", "float16", 256),
}
parametrize_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
parametrize_layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])
parametrize_seeds = pytest.mark.parametrize("seed", [0])


@dataclass(frozen=True)
class Table:
    """A page table with shuffled pages, and the rows that a step appends to it."""

    num_pages: int
    indices: np.ndarray
    indptr: np.ndarray
    last_page_len: np.ndarray
    batch_indices: np.ndarray
    positions: np.ndarray

    @property
    def arguments(self) -> tuple:
        return self.indices, self.indptr, self.last_page_len


def make_table(rng, page_size: int, num_rows: int, num_sequences: int = 4) -> Table:
    """Sequences with a past, the second one empty where there are several."""
    counts = rng.multinomial(num_rows, np.ones(num_sequences) / num_sequences)
    lengths = counts + rng.integers(1, 3 * page_size, num_sequences)
    if num_sequences > 1:
        counts[0] += counts[1]
        lengths[0] += counts[1]
        counts[1] = lengths[1] = 0
    pages_each = -(-lengths // page_size)
    num_pages = int(pages_each.sum()) + 3
    indptr = np.concatenate([[0], np.cumsum(pages_each)]).astype(np.int32)
    batch_indices = np.repeat(np.arange(num_sequences), counts)
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    return Table(
        num_pages,
        rng.permutation(num_pages)[: indptr[-1]].astype(np.int32),
        indptr,
        ((lengths - 1) % page_size + 1).astype(np.int32),
        batch_indices.astype(np.int32),
        positions.astype(np.int32),
    )


def nan_pool(case: Case, num_pages: int, layout: str) -> np.ndarray:
    axes = {"N": case.page_size, "H": case.num_heads, "D": case.dim}
    return np.full((num_pages, 2, *(axes[axis] for axis in layout)), np.nan, case.kv_dtype)


def as_nhd(plane: np.ndarray, layout: str) -> np.ndarray:
    return plane if layout == "NHD" else plane.swapaxes(1, 2)


def appended(pool, k, v, table: Table, layout: str) -> np.ndarray:
    """`pool` as the reference leaves it."""
    pool = pool.copy()
    for plane, rows in enumerate((k, v)):
        view = as_nhd(pool[:, plane], layout)
        places = (table.batch_indices, table.positions, table.indices, table.indptr)
        view[...] = reference.append_at_positions(view, rows, *places)
    return pool


def rows_of(rng, case: Case, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (num_rows, case.num_heads, case.dim)
    return normal(rng, shape, case.dtype), normal(rng, shape, case.dtype)


@parametrize_seeds
@pytest.mark.parametrize("num_rows", [0, 1, 37, MANY_ROWS])
@parametrize_layouts
@parametrize_cases
def test_append_to_one_tensor(case, layout, num_rows, seed):
    rng = np.random.default_rng(seed)
    table = make_table(rng, case.page_size, num_rows)
    k, v = rows_of(rng, case, num_rows)
    table.batch_indices[1::5] = -1  # rows that are not written
    pool = nan_pool(case, table.num_pages, layout)
    expected = appended(pool, k, v, table, layout)
    page.append_paged_kv_cache(
        k, v, table.batch_indices, table.positions, pool, *table.arguments, kv_layout=layout
    )
    assert_same_bits(pool, expected)


@parametrize_seeds
@parametrize_layouts
@parametrize_cases
def test_append_to_strided_pools(case, layout, seed):
    """K and V pools that are parts of larger arrays, each with strides of its own."""
    rng = np.random.default_rng(seed)
    num_rows = 61
    table = make_table(rng, case.page_size, num_rows)
    whole = nan_pool(case, 2 * table.num_pages, layout)
    other = np.full((*as_nhd(whole[:, 0], layout).shape[:3], case.dim + 3), np.nan, case.kv_dtype)
    k_pool = whole[1::2, 1]
    v_pool = as_nhd(other, layout)[::-2, ..., 3:]
    rows = rows_of(rng, case, 2 * num_rows)
    k, v = rows[0][::2], rows[1][::-2]  # a step of two rows, and backwards
    places = (table.batch_indices, table.positions, table.indices, table.indptr)
    expected_whole, expected_other = whole.copy(), other.copy()
    for pool, source in (
        (expected_whole[1::2, 1], k),
        (as_nhd(expected_other, layout)[::-2, ..., 3:], v),
    ):
        view = as_nhd(pool, layout)
        view[...] = reference.append_at_positions(view, source, *places)
    page.append_paged_kv_cache(
        k,
        v,
        table.batch_indices,
        table.positions,
        (k_pool, v_pool),
        *table.arguments,
        kv_layout=layout,
    )
    assert_same_bits(whole, expected_whole, "k")
    assert_same_bits(other, expected_other, "v")


@parametrize_seeds
@pytest.mark.parametrize("num_sequences", [1, 3, 900])
@parametrize_layouts
@parametrize_cases
def test_append_for_decode(case, layout, num_sequences, seed):
    rng = np.random.default_rng(seed)
    num_sequences = min(num_sequences, 8000 // case.page_size)  # pools of some megabytes
    lengths = rng.integers(1, 2 * case.page_size + 1, num_sequences)
    pages_each = -(-lengths // case.page_size)
    indptr = np.concatenate([[0], np.cumsum(pages_each)])
    num_pages = int(indptr[-1]) + 2
    table = Table(
        num_pages,
        rng.permutation(num_pages)[: indptr[-1]],
        indptr,
        (lengths - 1) % case.page_size + 1,
        np.arange(num_sequences),
        lengths - 1,
    )
    k, v = rows_of(rng, case, num_sequences)
    pool = nan_pool(case, num_pages, layout)
    expected = appended(pool, k, v, table, layout)
    page.append_paged_kv_cache_decode(k, v, pool, *table.arguments, kv_layout=layout)
    assert_same_bits(pool, expected)


@parametrize_seeds
@pytest.mark.parametrize("num_rows", [0, 1, 37, MANY_ROWS])
@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "float32 float16"])
@pytest.mark.parametrize("dims", [(512, 64), (7, 1), (96, 32), (1, 130)], ids=str)
def test_append_mla(dims, dtypes, num_rows, seed):
    rng = np.random.default_rng(seed)
    dtype, kv_dtype = dtypes.split()
    table = make_table(rng, 16, num_rows)
    ckv, kpe = (normal(rng, (num_rows, dim), dtype) for dim in dims)
    # One pool, as the cache keeps it: the two are parts of its rows.
    pool = np.full((table.num_pages, 16, sum(dims)), np.nan, kv_dtype)
    places = (table.batch_indices, table.positions, table.indices, table.indptr)
    expected = reference.append_at_positions(pool, np.concatenate([ckv, kpe], 1), *places)
    page.append_paged_mla_kv_cache(
        ckv,
        kpe,
        table.batch_indices,
        table.positions,
        pool[..., : dims[0]],
        pool[..., dims[0] :],
        *table.arguments,
    )
    assert_same_bits(pool, expected)


@parametrize_seeds
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


@parametrize_seeds
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


@parametrize_seeds
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


def test_the_steps_of_an_append_fit_together():
    """Lengths, then positions, then the append, as FlashInfer's documentation chains them."""
    append_indptr = np.array([0, 45, 53, 78, 100], np.int32)
    kv_indptr, last = np.array([0, 3, 4, 6, 8]), np.array([13, 8, 9, 6])
    lengths = page.get_seq_lens(kv_indptr, last, 16)
    np.testing.assert_array_equal(lengths, [45, 8, 25, 22])
    batch_indices, positions = page.get_batch_indices_positions(append_indptr, lengths, 100)
    np.testing.assert_array_equal(positions, np.concatenate([np.arange(n) for n in lengths]))
    k = np.arange(100 * 2 * 8, dtype=np.float32).reshape(100, 2, 8)
    pool = np.zeros((10, 2, 16, 2, 8), np.float32)
    page.append_paged_kv_cache(k, -k, batch_indices, positions, pool, np.arange(8), kv_indptr, last)
    np.testing.assert_array_equal(pool[3, 0, :8], k[45:53])
    np.testing.assert_array_equal(pool[7, 1, :6], -k[94:])


# --- tensors of other libraries -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tvm_tensors(layout):
    case, rng = CASES["8x128-bf16-p16"], np.random.default_rng(0)
    table = make_table(rng, case.page_size, 30)
    k, v = rows_of(rng, case, 30)
    pool = nan_pool(case, table.num_pages, layout)
    expected = appended(pool, k, v, table, layout)
    pool = tvm.runtime.tensor(pool)
    arguments = (k, v, table.batch_indices, table.positions)
    k, v, batch_indices, positions = (tvm.runtime.tensor(x) for x in arguments)
    page.append_paged_kv_cache(
        k, v, batch_indices, positions, pool, *table.arguments, kv_layout=layout
    )
    assert_same_bits(pool.numpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    indptr, last = torch.tensor([0, 2, 3]), torch.tensor([1, 4], dtype=torch.int32)
    lengths = page.get_seq_lens(indptr, last, 4)
    assert lengths.dtype == torch.int32 and lengths.tolist() == [5, 4]
    append_indptr = torch.tensor([0, 5, 7], dtype=torch.int32)
    batch_indices, positions = page.get_batch_indices_positions(append_indptr, lengths, 7)
    assert positions.tolist() == [0, 1, 2, 3, 4, 2, 3]
    fused = torch.randn(7, 6, 8, dtype=getattr(torch, dtype), requires_grad=True)
    pool = torch.full((3, 4, 2, 2, 8), torch.nan, dtype=fused.dtype)
    k_pool, v_pool = pool.unbind(3)  # K beside V of each slot
    page.append_paged_kv_cache(
        fused[:, 2:4],
        fused[:, 4:],
        batch_indices,
        positions,
        (k_pool, v_pool),
        torch.tensor([2, 0, 1]),
        indptr,
        last,
    )
    rows = fused.detach()
    assert torch.equal(pool[2, :, :, 0], rows[:4, 2:4])
    assert torch.equal(pool[0, 0, :, 1], rows[4, 4:])
    assert torch.equal(pool[1, 2:, :, 1], rows[5:, 4:])
    assert pool[0, 1:].isnan().all() and pool[1, :2].isnan().all()


def test_what_is_only_read_may_be_read_only():
    k = np.broadcast_to(np.arange(8, dtype=np.float32), (3, 2, 8))
    assert not k.flags.writeable
    pool = np.zeros((1, 2, 4, 2, 8), np.float32)
    places = np.zeros(3, np.int32), np.arange(3)
    page.append_paged_kv_cache(k, k, *places, pool, np.zeros(1, int), np.arange(2), np.array([3]))
    np.testing.assert_array_equal(pool[0, 1, :3], k)


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64"])
def test_kernels_compile_for_other_cpus(cpu):
    spec = page_layer.PageLayerSpec(72, 40, is_fused=False, target=vector_target(cpu))
    functions = {"append": page_layer.append(spec)}
    functions |= {name: build() for name, build in page_table.BUILDERS.items()}
    module = tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})
    assert tvm.tirx.build(module, target=resolve_target(cpu))["append"]


# --- bad arguments ------------------------------------------------------------------------------


def good_append() -> dict:
    rng = np.random.default_rng(0)
    case = replace(CASES["2x64-f32-p16"], page_size=4)
    return {
        "append_key": normal(rng, (3, 2, 64), "float32"),
        "append_value": normal(rng, (3, 2, 64), "float32"),
        "batch_indices": np.array([0, 0, 1], np.int32),
        "positions": np.array([3, 4, 0], np.int32),
        "paged_kv_cache": nan_pool(case, 5, "NHD"),
        "kv_indices": np.array([4, 1, 0], np.int32),
        "kv_indptr": np.array([0, 2, 3], np.int32),
        "kv_last_page_len": np.array([1, 1], np.int32),
    }


def _ints(*values, dtype=np.int32):
    return np.array(values, dtype)


def _read_only():
    pool = np.zeros((5, 2, 4, 2, 64), np.float32)
    pool.flags.writeable = False
    return pool


_POOL = np.zeros((5, 4, 2, 64), np.float32)
BAD_APPENDS = {
    "no tensor": ("append_key", [1.0], TypeError, "append_key must be a tensor, got list"),
    "k rank": ("append_key", np.zeros((3, 64), "f4"), ValueError, r"append_key must have shape"),
    "k scalar": ("append_key", np.zeros((), "f4"), ValueError, r"append_key must have shape"),
    "v rows": ("append_value", np.zeros((2, 2, 64), "f4"), ValueError, r"\[3, 2, 64\], got \[2"),
    "v dtype": ("append_value", np.zeros((3, 2, 64), "f2"), ValueError, "float32 as append_key"),
    "k type": ("append_key", np.zeros((3, 2, 64), "f8"), ValueError, "must be float32, .*float64"),
    "k columns": ("append_key", np.zeros((3, 2, 128), "f4")[..., ::2], ValueError, "contiguous"),
    "pool columns": (
        "paged_kv_cache",
        np.zeros((5, 2, 4, 2, 128), "f4")[..., ::2],
        ValueError,
        "paged_kv_cache must have contiguous rows",
    ),
    "pool rank": ("paged_kv_cache", _POOL, ValueError, r"\[pages, 2, page_size, heads, dim\]"),
    "pool planes": (
        "paged_kv_cache",
        np.zeros((5, 3, 4, 2, 64), "f4"),
        ValueError,
        r"\[pages, 2, page_size, heads, dim\], got \[5, 3",
    ),
    "pool triple": ("paged_kv_cache", (_POOL,) * 3, ValueError, "or a pair, got 3"),
    "pool shapes": ("paged_kv_cache", (_POOL, _POOL[:4]), ValueError, r"cache\[1\] must have"),
    "pool types": (
        "paged_kv_cache",
        (_POOL, _POOL.astype("f2")),
        ValueError,
        "must be float32 as paged_kv_cache",
    ),
    "pool repeats": (
        "paged_kv_cache",
        np.lib.stride_tricks.as_strided(_POOL, (5, 2, 4, 2, 64), (0, 0, 512, 256, 4)),
        ValueError,
        "twice",
    ),
    "pool read-only": ("paged_kv_cache", _read_only(), ValueError, "must be writeable"),
    "pool empty page": (
        "paged_kv_cache",
        np.zeros((5, 2, 0, 2, 64), "f4"),
        ValueError,
        "axes of 1 to",
    ),
    "no pages": ("paged_kv_cache", np.zeros((0, 2, 4, 2, 64), "f4"), IndexError, "there are 0"),
    "layout": ("kv_layout", "NDH", ValueError, "kv_layout must be one of NHD, HND, got 'NDH'"),
    "mla layout": ("kv_layout", "XX", ValueError, "kv_layout must be one of"),
    "batch length": ("batch_indices", _ints(0, 0), ValueError, r"shape \[3\], got \[2\]"),
    "batch rank": ("batch_indices", np.zeros((3, 1), "i4"), ValueError, r"shape \[3\]"),
    "batch type": ("batch_indices", np.zeros(3, "f4"), ValueError, "int32 or int64, got float32"),
    "batch high": ("batch_indices", _ints(0, 0, 2), IndexError, r"\[2\] must be in \[-1, 2\), got"),
    "batch low": ("batch_indices", _ints(-2, 0, 1), IndexError, r"batch_indices\[0\] must be"),
    "batch wide": ("batch_indices", _ints(0, 0, 2**32, dtype=np.int64), ValueError, "fit in int32"),
    "position high": ("positions", _ints(3, 8, 0), IndexError, r"positions\[1\] must be in the pa"),
    "position low": ("positions", _ints(3, 4, -1), IndexError, r"positions\[2\].*got -1"),
    "position huge": ("positions", _ints(3, 2**31 - 1, 0), IndexError, r"positions\[1\]"),
    "page high": ("kv_indices", _ints(4, 1, 5), IndexError, r"kv_indices\[2\].*there are 5.*got 5"),
    "page low": ("kv_indices", _ints(-1, 1, 0), IndexError, r"kv_indices\[0\].*got -1"),
    "indices short": ("kv_indices", _ints(4, 1), ValueError, r"kv_indptr\[2\] must be at most 2"),
    "indptr falls": ("kv_indptr", _ints(0, 3, 2), ValueError, "must ascend .* got 2 at index 2"),
    "indptr negative": ("kv_indptr", _ints(-1, 2, 3), ValueError, "must ascend .* got -1"),
    "indptr length": ("kv_indptr", _ints(0, 3), ValueError, r"kv_last_page_len .* \[1\], got \[2"),
    "indptr empty": ("kv_indptr", _ints(), ValueError, "kv_"),
    "last long": ("kv_last_page_len", _ints(1, 5), ValueError, r"\[1\] must be in \[0, 4\], got 5"),
    "last negative": ("kv_last_page_len", _ints(-1, 1), ValueError, r"\[0\] must be in \[0, 4\]"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_bad_appends_change_nothing(name):
    argument, value, error, text = BAD_APPENDS[name]
    arguments = good_append()
    pool = arguments["paged_kv_cache"]
    before = pool.copy()
    if argument == "paged_kv_cache":
        pool = value
    with pytest.raises(error, match=text):
        page.append_paged_kv_cache(**(arguments | {argument: value}))
    if argument != "paged_kv_cache":
        assert_same_bits(pool, before)
        page.append_paged_kv_cache(**arguments)
        assert not np.isnan(pool[4, :, 3]).any()


def test_bad_decode_appends_change_nothing():
    arguments = good_append()
    del arguments["batch_indices"], arguments["positions"]
    pool = arguments["paged_kv_cache"]
    before = pool.copy()
    for changes, error, text in (
        ({}, ValueError, "a row for each of 2 sequences, got 3"),
        ({"kv_indptr": _ints(0, 1, 1, 3)}, ValueError, "kv_last_page_len must have shape"),
        (
            {"kv_indptr": _ints(0, 1, 1, 3), "kv_last_page_len": _ints(1, 1, 1)},
            ValueError,
            "sequence 1 has no page",
        ),
        (
            {"kv_indptr": _ints(0, 1, 2, 3), "kv_last_page_len": _ints(1, 0, 1)},
            ValueError,
            r"kv_last_page_len\[1\] must be in \[1, 4\], got 0",
        ),
        (
            {
                "kv_indptr": _ints(0, 1, 2, 3),
                "kv_last_page_len": _ints(1, 1, 1),
                "kv_indices": _ints(0, 1, 9),
            },
            IndexError,
            r"kv_indices\[2\]",
        ),
    ):
        with pytest.raises(error, match=text):
            page.append_paged_kv_cache_decode(**(arguments | changes))
        assert_same_bits(pool, before)


def test_bad_mla_appends():
    good = {
        "append_ckv": np.zeros((1, 8), "f4"),
        "append_kpe": np.zeros((1, 4), "f4"),
        "batch_indices": _ints(0),
        "positions": _ints(0),
        "ckv_cache": np.zeros((2, 4, 8), "f4"),
        "kpe_cache": np.zeros((2, 4, 4), "f4"),
        "kv_indices": _ints(1),
        "kv_indptr": _ints(0, 1),
        "kv_last_page_len": _ints(1),
    }
    page.append_paged_mla_kv_cache(**good)
    for name, value, text in (
        ("kpe_cache", np.zeros((3, 4, 4), "f4"), "kpe_cache must have shape"),
        ("kpe_cache", np.zeros((2, 4, 4), "f2"), "kpe_cache must be float32 as ckv_cache"),
        ("ckv_cache", np.zeros((2, 8), "f4"), r"shape \[pages, page_size, dim\]"),
        ("append_kpe", np.zeros((1, 8), "f4"), r"append_kpe must have shape \[1, 4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            page.append_paged_mla_kv_cache(**(good | {name: value}))
    with pytest.raises(TypeError, match="ckv_cache must be a tensor, got NoneType"):
        page.append_paged_mla_kv_cache(**(good | {"ckv_cache": None}))


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
