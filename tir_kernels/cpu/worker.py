# SPDX-License-Identifier: Apache-2.0
"""Workers of kernels that move rows: a thread of a CPU does an item of work, with vectors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm.script import tirx as T

from ..layout import K_PLANE, QuantizedPages, TwoWidths
from ..script import inline
from ..semantics.rope import base_inverse_frequencies, first_factor
from ..semantics.softmax import selected
from ..spec import STORED_ITEMSIZE, KernelSpec
from .isa import simd
from .isa.cos_sin import CosSin as _CosSin
from .isa.row_vectors import RowNumbers
from .pages.quantized_rows import QuantizedRows

# Annotates the parallel loop over items with the bytes that one of them reads and writes. With
# fewer than these (20 us or so) in all, `compiler.lowering` lets the caller's thread do the loop.
ITEM_BYTES = "pagedkv.item_bytes"
SERIAL_BELOW_BYTES = 512 * 1024
MAX_UNROLLED = 160  # vectors of a row; those of a longer one are copied in a loop


def items(count, item_bytes):
    """Loop over items that do not depend on each other; a thread takes a contiguous range."""
    return T.parallel(count, annotations={ITEM_BYTES: item_bytes})


@T.meta_class
class Worker:
    """A thread, which has all rows and columns of an item to itself.

    Parameters
    ----------
    spec : KernelSpec
    computed : sequence of buffers
        Those with rows of numbers that are loaded to be blended or rotated, or stored after that.
    """

    arithmetic = simd

    def __init__(self, spec: KernelSpec, computed: Sequence = ()):
        self.spec, self.lanes, self.computed = spec, spec.target.lanes, computed
        self.numbers = RowNumbers(spec.target, computed)
        self.numbers.open_scope()

    def items(self, count, item_bytes):
        """Loop over items; see `items`."""
        return items(count, item_bytes)

    def sync(self) -> None:
        """A thread does not wait for itself."""

    def table(self, rows: int, size: int):
        """Allocate a float32 array ``[rows, size]``."""
        return T.alloc_buffer((rows, size), simd.F32)

    def elements(self, size: int):
        """Loop over the first elements of vectors, of `lanes` elements each."""
        return T.unroll(0, size - size % self.lanes, step=self.lanes)

    def rest(self, size: int) -> int:
        """Return how many elements lie behind these vectors."""
        return size % self.lanes

    def largest(self, values, count):
        """Return the largest of `count` int32 values, at least -1."""
        largest = simd.Register(1, "int32", T.int32(-1))
        with T.serial(count) as i:
            largest.set(T.max(largest.get(), values[i]))
        return simd.index_temp(largest.get())


@inline
def copy_row(source, source_row, sink, sink_row, lanes, begin):
    """Copy elements `begin` to the end of a row; bit for bit where the types are the same."""
    end = T.meta_var(int(source.shape[-1]))
    wide = T.meta_var(_copied_at_once(source, sink, lanes))
    rest = T.meta_var((end - begin) % wide)
    loop = T.meta_var(T.unroll if end - begin <= MAX_UNROLLED * wide else T.serial)
    for column in loop(begin, end - rest, step=wide):
        _copy_vector(source, (*source_row, column), sink, (*sink_row, column), wide)
    if rest > 0:
        _copy_vector(source, (*source_row, end - rest), sink, (*sink_row, end - rest), rest)


def _through(source, sink) -> str:
    """Return the type that elements have on their way."""
    return str(source.dtype) if str(source.dtype) == str(sink.dtype) else simd.F32


def _copied_at_once(source, sink, lanes: int) -> int:
    return lanes * 4 // STORED_ITEMSIZE[_through(source, sink)]


def _copy_vector(source, source_index, sink, sink_index, lanes: int) -> None:
    through = _through(source, sink)
    value = simd.load(source, source_index, lanes, to=through)
    simd.store(sink, sink_index, lanes, value, source=through)


@T.meta_class
class RowCopy:
    """Copies rows of one array to rows of another, each at its indices less the last axis.

    Rows are quantized on their way into quantized pages, and dequantized on their way out. What is
    quantized already is copied bit for bit.

    Parameters
    ----------
    worker : Worker
    source, sink : Buffer or QuantizedPages, or both `TwoWidths`
    scales : float32 Buffer, optional
        As `QuantizedRows` takes them.
    """

    def __init__(self, worker: Worker, source, sink, scales=None):
        self.source, self.sink, self.lanes = source, sink, worker.lanes
        self.reads_codes, self.writes_codes = (
            isinstance(pages, QuantizedPages) for pages in (source, sink)
        )
        pages = sink if self.writes_codes else source
        if self.reads_codes or self.writes_codes:
            self.quantized, self.width = QuantizedRows(pages, scales), pages.spec.qk_head_dim

    def rows(self, count):
        """Loop over the rows of an item."""
        return T.serial(count)

    @inline
    def copy(self, source_row, sink_row):
        """Copy a row."""
        if self.reads_codes and self.writes_codes:
            if self.source.v is None:
                self._copy_codes(self.source, source_row, sink_row)
            elif source_row[1] == 0:
                self._copy_codes(self.source, source_row, sink_row)
            else:
                self._copy_codes(self.source.v, source_row, sink_row)
        elif isinstance(self.sink, TwoWidths):
            if source_row[1] == K_PLANE:
                copy_row(self.source.k, source_row, self.sink.k, sink_row, self.lanes, 0)
            else:
                copy_row(self.source.v, source_row, self.sink.v, sink_row, self.lanes, 0)
        elif self.reads_codes:
            self.quantized.dequantize(source_row, self.sink, sink_row, self.lanes)
        elif self.writes_codes:
            numbers = T.alloc_buffer((self.width,), "float32")
            copy_row(self.source, source_row, numbers, (), self.lanes, 0)
            self.quantized.quantize(numbers, sink_row, self.lanes)
        else:
            copy_row(self.source, source_row, self.sink, sink_row, self.lanes, 0)

    @inline
    def _copy_codes(self, pages, source_row, sink_row):
        copy_row(pages.codes, source_row, pages.codes, sink_row, self.lanes, 0)
        copy_row(pages.scales, source_row, pages.scales, sink_row, self.lanes, 0)


@T.meta_class
class CosSin:
    """The cosines and sines of one position, in the order in which rows of numbers are loaded.

    Parameters
    ----------
    worker : Worker
    factors : Buffer, optional
        longrope: the long factors, then the short ones.
    """

    def __init__(self, worker: Worker, factors=None):
        self.rope, self.numbers, self.factors = worker.spec.rope, worker.numbers, factors
        self.angles = _CosSin(self.rope, worker.lanes)

    def fill(self, position, last_position=None) -> None:
        """Compute them for an int32 position of a sequence; longrope asks for its last one."""
        frequencies = None
        if self.factors is not None:
            first = simd.index_temp(first_factor(self.rope, last_position))
            frequencies = functools.partial(self._scaled, first)
        self.angles.fill(position, frequencies)
        self.angles.reorder(self.numbers)

    def _scaled(self, first, start: int, lanes: int):
        """Return inverse frequencies that are divided by factors from `first` on."""
        wide, narrow = (simd.vector_type(t, lanes) for t in ("float64", simd.F32))
        base = simd.literal(base_inverse_frequencies(self.rope)[start : start + lanes], "float64")
        factors = T.cast(simd.load(self.factors, (first + start,), lanes), wide)
        return T.cast(base / factors, narrow)


@T.meta_class
class RowRotation:
    """Copies rows of one array to rows of another, and rotates them on their way.

    Parameters
    ----------
    worker : Worker
    source : Buffer
    sink : Buffer or QuantizedPages
    scales : float32 Buffer, optional
        As `QuantizedRows` takes them.
    """

    def __init__(self, worker: Worker, source, sink, scales=None):
        self.source, self.sink, self.lanes = source, sink, worker.lanes
        self.numbers, self.rotary_dim = worker.numbers, worker.spec.rope.rotary_dim
        self.quantized = QuantizedRows(sink, scales) if isinstance(sink, QuantizedPages) else None
        self.width = worker.spec.qk_head_dim

    def rows(self, count):
        """Loop over the rows of an item."""
        return T.serial(count)

    @inline
    def write(self, cos_sin, is_rotated, source_row, sink_row):
        """Copy a row, whose leading columns are rotated where a condition holds."""
        if self.quantized is None:
            self._write(cos_sin, is_rotated, source_row, self.sink, sink_row)
        else:
            numbers = T.alloc_buffer((self.width,), "float32")
            self._write(cos_sin, is_rotated, source_row, numbers, ())
            self.quantized.quantize(numbers, sink_row, self.lanes)

    @inline
    def _write(self, cos_sin, is_rotated, source_row, sink, sink_row):
        if is_rotated:
            half = T.meta_var(self.rotary_dim // 2)
            rest = T.meta_var(half % self.numbers.wide)
            for column in T.unroll(0, half - rest, step=self.numbers.wide):
                self._rotate_chunk(cos_sin, column, self.numbers.wide, source_row, sink, sink_row)
            if rest > 0:
                self._rotate_chunk(cos_sin, half - rest, rest, source_row, sink, sink_row)
            copy_row(self.source, source_row, sink, sink_row, self.lanes, self.rotary_dim)
        else:
            copy_row(self.source, source_row, sink, sink_row, self.lanes, 0)

    def _rotate_chunk(self, cos_sin, column, count: int, source_row, sink, sink_row) -> None:
        cos_sin.angles.rotate_chunk(
            self.numbers, column, count, (self.source, source_row), (sink, sink_row)
        )


@T.meta_class
class RowBlend:
    """Sums rows of the worker's `computed` buffers, times weights, into those of the first one.

    A row of weight zero counts for nothing, whatever it holds.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker):
        self.buffers, self.numbers = worker.computed, worker.numbers
        self.width = int(worker.computed[0].shape[-1])
        self.rest = self.width % self.numbers.wide

    def rows(self, count):
        """Loop over the rows of an item."""
        return T.serial(count)

    @inline
    def blend(self, index, weights):
        """Blend the rows at `index`; the case of no weight that is zero is much cheaper."""
        if self._are_positive(weights):
            self._blend(index, weights, False)
        else:
            self._blend(index, weights, True)

    @inline
    def _blend(self, index, weights, has_zero):
        for column in T.unroll(0, self.width - self.rest, step=self.numbers.wide):
            self._blend_chunk((*index, column), self.numbers.wide, weights, has_zero)
        if self.rest > 0:
            self._blend_chunk((*index, self.width - self.rest), self.rest, weights, has_zero)

    def _are_positive(self, weights: Sequence):
        return functools.reduce(T.And, [weight > T.float32(0) for weight in weights])

    def _blend_chunk(self, index, count: int, weights: Sequence, has_zero: bool) -> None:
        lanes = self.numbers.lanes_of(count)

        def scaled(value, weight):
            if has_zero:
                return selected(value, weight, lanes, simd)
            return value * simd.broadcast(weight, lanes)

        total = None
        for buffer, weight in zip(self.buffers, weights, strict=True):
            vectors = [scaled(x, weight) for x in self.numbers.load(buffer, index, count)]
            total = (
                vectors if total is None else [a + b for a, b in zip(total, vectors, strict=True)]
            )
        self.numbers.store(self.buffers[0], index, count, total)
