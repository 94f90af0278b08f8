# SPDX-License-Identifier: Apache-2.0
"""Pages that the caller owns: every layout and stride, against the reference.

Unused slots hold NaN, page tables are shuffled, and whole pools are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tir_kernels.cpu.page_ops import page_layer, page_table
from tvm_pagedkv import page
from tvm_pagedkv.compiler.build import resolve_target, vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import normal

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
    reference.assert_same_bits(pool, expected)


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
    reference.assert_same_bits(whole, expected_whole, "k")
    reference.assert_same_bits(other, expected_other, "v")


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
    reference.assert_same_bits(pool, expected)


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
    reference.assert_same_bits(pool, expected)


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
    reference.assert_same_bits(pool.numpy(), expected)


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
    built = tvm.tirx.build(module, target=resolve_target(cpu))
    assert all(f"{name}:" in built.inspect_source("s") for name in functions)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
