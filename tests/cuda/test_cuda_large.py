# SPDX-License-Identifier: Apache-2.0
"""Pools and batches beyond 32 bits on GPUs, emulated: memory that is not touched takes no room."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

from tir_kernels.cuda.launches import launch
from tir_kernels.define import I32, attributes
from tir_kernels.gpu.isa import isa_of
from tir_kernels.gpu.registers import as_count
from tir_kernels.gpu.tiles.decode_tiling import DecodeTiling
from tir_kernels.gpu.work.page_schedule import PageSchedule
from tir_kernels.gpu.work.work_items import ItemSearch
from tir_kernels.script import prim_func
from tvm_pagedkv.compiler.cuda.source import cuda_source

from .. import reference
from ..support.cases.kernels.attention_cases import compiled, cuda_text, tensors_for
from ..support.cases.kernels.cuda_cases import F16, make_spec
from ..support.emulators.cuda_emulator import emulated, mutated

SPEC = make_spec((2, 1), 64)
PAGE_ELEMENTS = 2 * SPEC.page_size * SPEC.qk_head_dim
NUM_PAGES = 2**31 // PAGE_ELEMENTS + 8
LAST = NUM_PAGES - 1 - np.arange(4)  # pages whose elements are all beyond 2^31


def large_pages() -> np.ndarray:
    """A pool of more than 2^31 elements; the system gives it memory where it is written."""
    return np.empty((NUM_PAGES, 2, 1, SPEC.page_size, SPEC.qk_head_dim), F16)


def shared(array: np.ndarray):
    """A tensor on the same memory."""
    return tvm_ffi.from_dlpack(array)


def written(pages: np.ndarray, rng) -> np.ndarray:
    """Write rows to the last pages; what they hold."""
    rows = rng.standard_normal((len(LAST), *pages.shape[1:]), np.float32).astype(F16)
    pages[LAST] = rows
    return rows


def table(*arrays) -> list:
    return [tensors_for(SPEC)(np.array(x, np.int32)) for x in arrays]


def attend(kernel, name: str, pages: np.ndarray, rows: np.ndarray) -> float:
    """The error of attention to the last pages."""
    rng, num_rows = np.random.default_rng(1), 1 if name == "decode" else 3
    tensor = tensors_for(SPEC)
    q = rng.standard_normal((num_rows, 2, 64), np.float32).astype(F16)
    o, lse = (
        tensor(np.zeros(s, d)) for s, d in (((num_rows, 2, 64), F16), ((num_rows, 2), "float32"))
    )
    length = len(LAST) * SPEC.page_size
    query_indptr = [] if name == "decode" else table([0, num_rows])
    causal = [] if name == "decode" else [1]
    positions = table(
        [0, len(LAST)], LAST, [SPEC.page_size], [0], length - num_rows + np.arange(num_rows)
    )
    kernel(tensor(q), *query_indptr, shared(pages), *positions, o, lse, *causal, 0, 1.0, 1e4, 0.125)
    k, v = (np.concatenate(list(rows[:, plane, 0]))[:, None] for plane in range(2))
    expected = reference.attention(q, k, v, reference.causal_mask(num_rows, length), 0.125)
    return float(np.abs(o.numpy().astype(np.float64) - expected[0]).max())


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_attention_to_the_last_pages_of_a_large_pool(name):
    pages = large_pages()
    rows = written(pages, np.random.default_rng(0))
    assert attend(compiled(name, SPEC), name, pages, rows) < 2e-3


def test_the_last_pages_are_written_and_copied():
    rng, pages = np.random.default_rng(0), large_pages()
    tensor = tensors_for(SPEC)
    rows = written(pages, rng)
    k, v = (rng.standard_normal((3, 1, 64), np.float32).astype(F16) for _ in range(2))
    slots = LAST[0] * SPEC.page_size + np.arange(3)
    compiled("transpose_append", SPEC)(shared(pages), tensor(k), tensor(v), *table(slots))
    rows[0, 0, 0, :3], rows[0, 1, 0, :3] = k[:, 0], v[:, 0]
    reference.assert_same_bits(pages[LAST], rows)

    compiled("copy_single_page", SPEC)(shared(pages), int(LAST[0]), int(LAST[1]), 5)
    rows[1, :, :, :5] = rows[0, :, :, :5]
    compiled("copy_pages", SPEC)(shared(pages), *table([[LAST[1]], [LAST[2]], [7]]))
    rows[2, :, :, :7] = rows[1, :, :, :7]
    slots = [[LAST[2] * 16 + 1], [LAST[3] * 16 + 9]]
    compiled("compact_copy", SPEC)(shared(pages), *table([0, 1], slots), 1)
    rows[3, :, :, 9] = rows[2, :, :, 1]
    reference.assert_same_bits(pages[LAST], rows)

    out = [tensor(np.zeros((1, 2, 1, 64), F16)) for _ in range(2)]
    slots = LAST[3] * 16 + np.array([9, 3])
    compiled("debug_get_kv", SPEC)(shared(pages), *table(slots), *out, 0)
    for plane in range(2):
        reference.assert_same_bits(out[plane].numpy()[0, :, 0], rows[3, plane, 0, [9, 3]])


def test_an_offset_of_32_bits_is_caught():
    """It would reach 8 GiB before the pool: `LAST` is shortened to what is there."""
    pages = large_pages()
    rows = written(pages, np.random.default_rng(0))
    pages[LAST - NUM_PAGES // 2] = 0
    text = cuda_text("decode", SPEC)
    # The page's number modulo a half, as if the highest bit of the offset were lost.
    page = "(int64_t)kv_rows_page_ptr["
    short = mutated(text, f"({page}", f"((int64_t)-{NUM_PAGES // 2} + {page}")
    assert attend(emulated(short).get_function("decode"), "decode", pages, rows) > 2e-3


# --- counts of work -----------------------------------------------------------------------------


def _results(function, *arrays) -> np.ndarray:
    out = tvm.runtime.tensor(np.zeros(8, np.int64))
    source = cuda_source({"count": function})
    emulated(source).get_function("count")(*(tvm.runtime.tensor(x) for x in arrays), out)
    return out.numpy()


def test_decode_splits_more_kv_tiles_than_32_bits_count():
    """Table entries times KV heads: sequences that share a prefix have the same pages."""
    spec = make_spec((256, 256), 8, page=1)
    indptr = np.array([0, 5, 12_000_000, 20_000_000], np.int32)
    at = 19_000_000 * 256 + 77
    size = -(-20_000_000 * 256 // 264)

    @prim_func
    def kernel(page_indptr: T.handle, entry: T.handle, out: T.handle):
        T.func_attr(attributes(spec))
        indptr = T.match_buffer(page_indptr, (4,), elem_offset=T.int32(), **I32)
        at = T.match_buffer(entry, (1,), elem_offset=T.int32(), **I32)
        found = T.match_buffer(out, (8,), "int64", align=8)
        with launch([1], 32) as (blocks, thread):
            work = PageSchedule(
                spec, indptr, T.int32(3), T.int32(264), DecodeTiling.of(spec).block_positions
            )
            kv_tile = as_count(at[0]) * 256 + 77
            work.measure()
            work.find_sequence(kv_tile, thread)
            work.find_head(kv_tile)
            if thread == 0:
                found[0] = work.total
                found[1] = work.split_size
                found[2] = as_count(work.sequence)
                found[3] = as_count(work.head)
                found[4] = as_count(work.first)
                found[5] = as_count(work.num_kv_tiles)

    head = (at - 12_000_000 * 256) // 8_000_000
    first = at - 12_000_000 * 256 - head * 8_000_000
    expected = [20_000_000 * 256, size, 2, head, first, 8_000_000]
    found = _results(kernel, indptr, np.array([19_000_000], np.int32))
    assert found[:6].tolist() == expected


def test_tiles_are_split_beyond_32_bits():
    """Tiles of rows times tiles of positions."""
    counts = np.array([2**30, 3, 2**30, 2**30], np.int32)

    @prim_func
    def kernel(count: T.handle, out: T.handle):
        T.func_attr(attributes(SPEC))
        counts = T.match_buffer(count, (4,), elem_offset=T.int32(), **I32)
        found = T.match_buffer(out, (8,), "int64", align=8)
        with launch([1], 32) as (blocks, thread):
            search = ItemSearch(isa_of(SPEC.target), "int64")
            count_of = T.meta_var(lambda i: as_count(counts[i]))
            search.find(as_count(counts[0]) * 3, T.int32(4), count_of, thread)
            if thread == 0:
                found[0] = as_count(search.item)
                found[1] = search.index
                found[2] = search.count

    assert _results(kernel, counts)[:3].tolist() == [3, 2**30 - 3, 2**30]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
