# SPDX-License-Identifier: Apache-2.0
"""Pools of more than 2**31 elements: the kernels' offsets into them need 64 bits.

The memory is mapped and, but for a few pages, never touched. As many addresses lie before a pool as
an offset of 32 bits would miss it by: a kernel that computes such offsets reads zeros there and
writes what no test finds, and so fails a test instead of the process.
"""

from __future__ import annotations

import mmap

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm_ffi
from tvm.script import tirx as T

from tir_kernels.cpu.page_ops import page_layer
from tir_kernels.layout import page_shape
from tvm_pagedkv.compiler.build import resolve_target
from tvm_pagedkv.compiler.lowering import compile_kernel

from .. import reference
from ..support.cases.kernels.attention_cases import (
    PagedBatch,
    altered_kernels,
    compiled,
    normal,
    tensor,
)
from ..support.cases.kernels.kernel_specs import F16, NATIVE, make_spec
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.tree_cases import PagedTrees
from .test_shared_prefix_kernel import SharedBatch

LIMIT = 2**31  # elements
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's: no promise of memory or swap
EXTRA_PAGES = 64  # beyond the limit
SPEC = make_spec((4, 2), 64, (F16, F16))
MLA_SPEC = make_mla_spec(4, (48, 16), (F16, F16))
NUM_LAYERS, LAYER = 2, 1


def sparse_zeros(*shape: int) -> np.ndarray:
    """float16 zeros, as many of them before the first one as 32 bits would be off by."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * (LIMIT + int(np.prod(shape))), flags=flags)
    return np.frombuffer(memory, F16)[LIMIT:].reshape(shape)


class LargePool:
    """A sparse pool of float16 zeros; its pages from `first` on lie beyond the limit."""

    def __init__(self, spec):
        shape = page_shape(spec)
        page_elements = int(np.prod(shape))
        self.first = LIMIT // page_elements
        self.array = sparse_zeros(self.first + EXTRA_PAGES, *shape)
        self.tensor = tvm_ffi.from_dlpack(self.array)

    def slots(self, rng, count: int) -> np.ndarray:
        """Return some slots beyond the limit."""
        page_size = self.array.shape[-2]
        last = rng.permutation(EXTRA_PAGES * page_size)[:count]
        return (self.first * page_size + last).astype(np.int32)

    def fill(self, rng) -> None:
        """Random numbers into the pages beyond the limit."""
        pages = self.array[self.first :]
        pages[...] = normal(rng, pages.shape, F16)

    def take(self, case) -> None:
        """Move the pages of a batch behind the limit, last page first."""
        num_pages = len(case.pages)
        assert num_pages <= EXTRA_PAGES
        self.array[-num_pages:] = case.pages
        case.pages = self.array
        case.page_ids += np.int32(len(self.array) - num_pages)
        place = case.tensor if hasattr(case, "tensor") else tensor
        case.tensor = lambda x: self.tensor if x is self.array else place(x)


@pytest.fixture
def pool():
    return LargePool(SPEC)


@pytest.fixture
def latent_pool():
    return LargePool(MLA_SPEC)


def rows_of(pool: LargePool, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and V at some slots."""
    return reference.gather_slots(pool.array, slots)


@pytest.mark.parametrize("name", ["decode", "decode_sliding", "prefill", "prefill_sliding"])
def test_attention(pool, name):
    lengths = [(1, 40), (1, 300), (1, 5)] if "decode" in name else [(20, 40), (1, 300), (5, 5)]
    case = PagedBatch(SPEC, lengths, 0)
    pool.take(case)
    window = 30 if "sliding" in name else None
    getattr(case, name.split("_")[0])(window=window)
    case.verify(window=window)


def test_inline_rope(pool):
    case = PagedBatch(SPEC, [(1, 40), (1, 300)], 0)
    pool.take(case)
    case.decode(inline=True)
    case.verify(inline=True)


def test_tree_paged(pool):
    case = PagedTrees(SPEC, [(3, 70, [-1, 0, 0]), (4, 9, [])], 0)
    pool.take(case)
    case.run()
    case.verify()


def test_mla_prefill(latent_pool):
    case = LatentBatch(MLA_SPEC, [(3, 200), (1, 500)], 0)
    latent_pool.take(case)
    case.run()
    case.verify()


@pytest.mark.parametrize("spec", [SPEC, MLA_SPEC], ids=["mha", "mla"])
def test_shared_prefixes(spec, monkeypatch):
    pool = LargePool(spec)
    case = SharedBatch(spec, [(9, 3), (2, 40)], 0)
    pool.take(case)
    place = case.tensor
    monkeypatch.setattr("tests.kernels.test_shared_prefix_kernel.tensors_for", lambda spec: place)
    case.check()


def test_transpose_append(pool):
    rng = np.random.default_rng(0)
    slots = pool.slots(rng, 100)
    k, v = (normal(rng, (len(slots), 2, 64), F16) for _ in range(2))
    compiled("transpose_append", SPEC)(pool.tensor, tensor(k), tensor(v), tensor(slots))
    for got, want in zip(rows_of(pool, slots), (k, v), strict=True):
        reference.assert_same_bits(got, want)


def test_rope_append(pool):
    rng = np.random.default_rng(0)
    slots = pool.slots(rng, 100)
    qkv = normal(rng, (len(slots), 8, 64), F16)
    indptr, positions = np.array([0, len(slots)], np.int32), np.arange(len(slots), dtype=np.int32)
    q = tensor(np.zeros((len(slots), 4, 64), F16))
    arrays = (tensor(x) for x in (qkv, indptr, positions, slots))
    compiled("rope_append", SPEC)(*arrays, q, pool.tensor, 0)
    for got, want in zip(rows_of(pool, slots), (qkv[:, 4:6], qkv[:, 6:]), strict=True):
        reference.assert_same_bits(got, want)


def test_debug_get_kv(pool):
    rng = np.random.default_rng(0)
    pool.fill(rng)
    slots = pool.slots(rng, 100)
    k, v = (tensor(np.zeros((NUM_LAYERS, len(slots), 2, 64), F16)) for _ in range(2))
    compiled("debug_get_kv", SPEC)(pool.tensor, tensor(slots), k, v, LAYER)
    for got, want in zip((k, v), rows_of(pool, slots), strict=True):
        reference.assert_same_bits(got.numpy()[LAYER], want)


def test_latent_rows(latent_pool):
    """transpose_append_mla and debug_get_kv_mla."""
    rng = np.random.default_rng(0)
    slots = latent_pool.slots(rng, 100)
    rows = normal(rng, (len(slots), 64), F16)
    compiled("transpose_append_mla", MLA_SPEC)(latent_pool.tensor, tensor(rows), tensor(slots))
    page_size = MLA_SPEC.page_size
    reference.assert_same_bits(latent_pool.array[slots // page_size, slots % page_size], rows)
    kv = tensor(np.zeros((NUM_LAYERS, len(slots), 64), F16))
    compiled("debug_get_kv_mla", MLA_SPEC)(latent_pool.tensor, tensor(slots), kv, LAYER)
    reference.assert_same_bits(kv.numpy()[LAYER], rows)


@pytest.mark.parametrize("spec", [SPEC, MLA_SPEC], ids=["mha", "mla"])
@pytest.mark.parametrize("name", ["copy_single_page", "copy_pages", "compact_copy"])
def test_copies(spec, name):
    pool, rng = LargePool(spec), np.random.default_rng(0)
    pool.fill(rng)
    kernel = compiled(name, spec)
    last = pool.array[pool.first :]
    want = last.copy()
    if name == "compact_copy":
        slots = pool.slots(rng, 60).reshape(2, -1)
        kernel(pool.tensor, tensor(np.array([0, slots.shape[1]], np.int32)), tensor(slots), 1)
        page_size = spec.page_size
        for source, destination in (slots - pool.first * page_size).T:
            row = want[source // page_size, ..., source % page_size, :]
            want[destination // page_size, ..., destination % page_size, :] = row
    else:
        copies = np.array([[5, 9], [6, 40], [3, 16]])  # source, destination, slots of each
        for source, destination, length in copies.T:
            want[destination, ..., :length, :] = want[source, ..., :length, :]
        copies[:2] += pool.first
        if name == "copy_pages":
            kernel(pool.tensor, tensor(copies.astype(np.int32)))
        else:
            for copy in copies.T:
                kernel(pool.tensor, *(int(x) for x in copy))
    reference.assert_same_bits(last, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_layer_append(layout):
    """Pages that the caller owns, K and V in one tensor."""
    axes = {"NHD": (16, 2, 64), "HND": (2, 16, 64)}[layout]
    pool, rng = LargePool(SPEC), np.random.default_rng(0)
    pages = pool.array.reshape(-1, 2, *axes)
    spec = page_layer.PageLayerSpec(64, 64, F16, F16, layout, is_fused=True, target=NATIVE)
    kernel = compile_kernel(page_layer.append(spec), "append", resolve_target("native"))["append"]
    slots = pool.slots(rng, 100)
    places = np.stack([slots // 16, slots % 16], axis=1).astype(np.int32)
    rows = [normal(rng, (len(slots), 2, 64), F16) for _ in range(2)]
    kernel(tvm_ffi.from_dlpack(pages), *(tensor(x) for x in (*rows, places)))
    for plane, want in enumerate(rows):
        page, offset = places.T
        got = pages[page, plane, offset] if layout == "NHD" else pages[page, plane, :, offset]
        reference.assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["decode", "copy_pages"])
def test_offsets_of_32_bits_are_found_out(name, monkeypatch):
    """Kernels whose buffers start at an int32 offset fail; the other tests rely on that."""
    wide = T.int64
    monkeypatch.setattr(T, "int64", lambda *value: wide(*value) if value else T.int32())
    spec = make_spec((4, 2), 64, (F16, F16), 8)
    with altered_kernels(), pytest.raises(AssertionError):
        if name == "copy_pages":
            test_copies(spec, name)
        else:
            case = PagedBatch(spec, [(1, 40)], 0)
            LargePool(spec).take(case)
            case.decode()
            case.verify()


def test_rows_of_a_step_beyond_the_limit():
    """Q and O of a step may be as large: only the last row is touched."""
    spec = SPEC
    num_rows = LIMIT // (4 * 64) + 5
    q, o = (sparse_zeros(num_rows, 4, 64) for _ in range(2))
    lse = np.zeros((num_rows, 4), np.float32)
    case = PagedBatch(spec, [(2, 40)], 0)
    q[-2:] = case.q
    query_indptr = np.array([num_rows - 2, num_rows], np.int32)
    q_positions = np.zeros(num_rows, np.int32)
    table = [tensor(x) for x in (case.page_indptr, case.page_ids, case.last_page_len)]
    compiled("prefill", spec)(
        tvm_ffi.from_dlpack(q),
        tensor(query_indptr),
        tensor(case.pages),
        *table,
        tensor(case.k_offsets),
        tensor(q_positions),
        tvm_ffi.from_dlpack(o),
        tvm_ffi.from_dlpack(lse),
        *case.scalars(causal=True, inline=False),
    )
    case.o, case.lse = (tensor(np.array(x[-2:])) for x in (o, lse))
    case.verify()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
