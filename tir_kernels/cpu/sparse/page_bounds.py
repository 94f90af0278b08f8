# SPDX-License-Identifier: Apache-2.0
"""Bounds of the rows of K in a page, and the choice of pages by them, as in Quest.

The bounds of a page and a KV head are the maximum and the minimum of each column of K. With a row
of Q they bound its products with the rows: ``max(q, 0) . maxima + min(q, 0) . minima``. A decode
step attends only to the pages whose bounds are largest.
"""

from tvm.script import tirx as T

from ...define import attributes
from ...layout import K_PLANE, row_index, rows_of, view_pages
from ...script import inline, prim_func
from ...signatures.sparse import CHOOSE_PAGES, PAGE_BOUNDS, BoundsInputs
from ...spec import KernelSpec
from ..isa.simd import (
    F32,
    add,
    constant,
    for_chunks,
    import_llvm,
    load,
    reduce_lanes,
    require_half_conversion,
    store,
    temp,
)
from ..pages.kv_rows import load_row
from ..tasks import TASKS, cut, num_threads
from .top_k import OFFERED, TopK, TopKLists, keys_of, llvm_helpers

SERIAL_PAGES = 64  # pages and KV heads below which a launch costs more than it saves
MAX_ROWS = 8  # of Q, whose products are accumulated at once


def require_bounds(spec: KernelSpec) -> None:
    """Raise a ValueError if bounds of the rows in the pages say nothing of their logits."""
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    if spec.kind != "mha" or spec.has_two_widths:
        raise ValueError("bounds of pages are for layers with K and V of one width")
    if spec.alibi_slopes is not None:
        raise ValueError("bounds of pages are not possible with ALiBi")
    if spec.codec is not None and spec.codec.has_hadamard:
        raise ValueError("bounds of pages are not possible with codecs that rotate K")


def page_bounds(spec: KernelSpec):
    """Build the kernel `page_bounds`: the bounds of K of some pages.

    The rows of these pages in `bounds` are written: maxima, then minima.
    """
    require_bounds(spec)
    heads = spec.num_kv_heads

    @prim_func(arguments=PAGE_BOUNDS.of(spec))
    def page_bounds(a: BoundsInputs):
        T.func_attr(attributes(spec))
        k = T.meta_var(rows_of(view_pages(a.pages, spec), K_PLANE))
        n = T.meta_var(a.page_ids.shape[0])

        num_tasks = T.if_then_else(n * heads > SERIAL_PAGES, T.min(num_threads(), n), 1)
        for task in T.parallel(num_tasks, annotations=TASKS):
            columns = ColumnBounds(spec, k)
            for i in range(cut(n, task, num_tasks), cut(n, task + 1, num_tasks)):
                for head in range(heads):
                    columns.find(a.page_ids[i], head, a.page_lengths[i])
                    columns.put(a.bounds, a.page_ids[i], head)

    return page_bounds


@T.meta_class
class ColumnBounds:
    """The maximum and the minimum of each column of some rows of K.

    Parameters
    ----------
    spec : KernelSpec
    pages : what `rows_of` returns for K
    """

    def __init__(self, spec: KernelSpec, pages):
        self.pages, self.width, self.lanes = pages, spec.qk_head_dim, spec.target.lanes
        self.high = T.alloc_buffer((self.width,), F32)
        self.low = T.alloc_buffer((self.width,), F32)

    @inline
    def find(self, page, head, count):
        """Take the first slots of a page."""
        for_chunks(self.width, self.lanes, self._begin)
        for slot in range(count):
            for_chunks(self.width, self.lanes, lambda c, n: self._take(page, head, slot, c, n))

    @inline
    def put(self, bounds, page, head):
        """Store them as a row of `bounds`."""
        for_chunks(self.width, self.lanes, lambda c, n: self._put(bounds, page, head, c, n))

    def _begin(self, start: int, lanes: int) -> None:
        store(self.high, (start,), lanes, constant(float("-inf"), lanes))
        store(self.low, (start,), lanes, constant(float("inf"), lanes))

    def _take(self, page, head, slot, start: int, lanes: int) -> None:
        index = row_index(page, K_PLANE, head, slot, start)
        row = temp(load_row(self.pages, index, lanes), lanes)
        store(self.high, (start,), lanes, T.max(load(self.high, (start,), lanes), row))
        store(self.low, (start,), lanes, T.min(load(self.low, (start,), lanes), row))

    def _put(self, bounds, page, head, start: int, lanes: int) -> None:
        store(bounds, (page, head, start), lanes, load(self.high, (start,), lanes))
        store(bounds, (page, head, self.width + start), lanes, load(self.low, (start,), lanes))


@T.meta_class
class BoundProducts:
    """The bounds of the products of the rows of a KV head with pages.

    Parameters
    ----------
    spec : KernelSpec
    bounds : Buffer ``[num_pages, num_kv_heads, 2 * head_dim]``
    """

    def __init__(self, spec: KernelSpec, bounds):
        self.bounds, self.group, self.lanes = bounds, spec.group_size, spec.target.lanes
        self.width = spec.qk_head_dim
        self.num_sets = -(-self.group // MAX_ROWS)
        self.count = -(-self.group // self.num_sets)  # rows of a set
        self.rows = T.alloc_buffer((self.group, 2 * self.width), F32)
        self.sums = T.alloc_local((self.count, self.lanes), F32)
        self.total = T.local_scalar(F32)

    @inline
    def load_q(self, q, token, head):
        """Take the rows of a KV head: what is positive, then what is negative."""
        for row in range(self.group):
            for_chunks(self.width, self.lanes, lambda c, n: self._put(q, token, head, row, c, n))

    def _put(self, q, token, head, row, start: int, lanes: int) -> None:
        zero = constant(0.0, lanes)
        values = temp(load(q, (token, head * self.group + row, start), lanes), lanes)
        store(self.rows, (row, start), lanes, T.max(values, zero))
        store(self.rows, (row, self.width + start), lanes, T.min(values, zero))

    @inline
    def multiply(self, page, head):
        """Set `total` to the largest bound of the rows."""
        lanes = T.meta_var(self.lanes)
        self.total = T.float32(float("-inf"))
        for first in range(self.num_sets):
            for i in T.unroll(self.count):
                store(self.sums, (i, 0), lanes, constant(0.0, lanes))
            # Whole vectors: the head dim is a multiple of 8, so there are 16 columns of both.
            for c in range(2 * self.width // lanes):
                bound = T.meta_var(temp(load(self.bounds, (page, head, c * lanes), lanes), lanes))
                for i in T.unroll(self.count):
                    row = T.meta_var(self.row(first, i))
                    product = T.meta_var(load(self.rows, (row, c * lanes), lanes) * bound)
                    store(self.sums, (i, 0), lanes, load(self.sums, (i, 0), lanes) + product)
            for i in T.unroll(self.count):
                found = T.meta_var(reduce_lanes(load(self.sums, (i, 0), lanes), lanes, add))
                self.total = T.max(self.total, found)

    def row(self, first, i):
        """The i-th row of a set; the last set may repeat the last row."""
        return T.min(first * self.count + i, self.group - 1)


def choose_pages(spec: KernelSpec):
    """Build the kernel `choose_pages`: KV heads of rows choose the pages whose bounds are largest.

    The bound of a page is that of the largest product of the query heads of a KV head with a row of
    K in it. `q` has a rotated row for each sequence. `blocks` are written: up to W pages, by their
    number in the sequence, in order, then -1. The first and the last page are always chosen.
    """
    require_bounds(spec)
    heads, lanes = spec.num_kv_heads, spec.target.lanes

    @prim_func(arguments=CHOOSE_PAGES.of(spec))
    def choose_pages(a: BoundsInputs):
        T.func_attr(attributes(spec))
        indptr, num_rows = T.meta_var((a.page_indptr, a.batch_size))
        longest = T.int32(1)
        for row in range(num_rows):
            longest = T.max(longest, indptr[row + 1] - indptr[row])
        total = indptr[num_rows] * heads
        num_pairs = num_rows * heads
        num_tasks = T.if_then_else(total > SERIAL_PAGES, T.min(num_threads(), num_pairs), 1)
        lists = TopKLists(num_tasks, a.blocks.shape[2], longest)
        lists.begin()
        with import_llvm(llvm_helpers(lanes)):
            for task in T.parallel(num_tasks, annotations=TASKS):
                products, top = BoundProducts(spec, a.bounds), TopK(lists, lanes)
                scores = T.alloc_buffer((OFFERED,), F32)
                keys = T.alloc_buffer((OFFERED,), "int32")
                for pair in range(
                    cut(num_pairs, task, num_tasks), cut(num_pairs, task + 1, num_tasks)
                ):
                    row, head = pair // heads, pair % heads
                    num_held = indptr[row + 1] - indptr[row]
                    products.load_q(a.q, row, head)
                    lists.clear(task)
                    top.open(task)
                    for i in range((num_held + OFFERED - 1) // OFFERED):
                        first = i * OFFERED
                        num_offered = T.min(OFFERED, num_held - first)
                        for j in range(num_offered):
                            products.multiply(a.page_ids[indptr[row] + first + j], head)
                            is_kept = T.Or(first + j == 0, first + j == num_held - 1)
                            kept = T.float32(float("inf"))
                            scores[j] = T.Select(is_kept, kept, products.total)
                        for v in range(OFFERED // lanes):
                            found = T.meta_var(keys_of(load(scores, (v * lanes,), lanes), lanes))
                            store(keys, (v * lanes,), lanes, found, "int32")
                        top.offer(keys, 0, num_offered, lambda n: first + n)
                    top.choose(a.blocks, (row, head))
        lists.free()

    return choose_pages
