# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of `backend` on GPUs: an item of work is done by the threads of one block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ..layout import QuantizedPages, Slot
from ..semantics.rope import inverse_frequencies, sin_cos
from ..spec import STORED_ITEMSIZE, KernelSpec
from . import scalars
from .elements import ACCESS_BYTES, copy_elements, load_floats, run_length, store_floats
from .emit import F32, WARP, Registers, Variable, index_temp, launch, sync_block
from .launcher import workspace
from .quantized_rows import dequantize_row, quantize_row
from .warp import shuffle_xor

THREADS = 128
WARPS = THREADS // WARP
MAXIMUM_THREADS = 512


def for_items(
    spec: KernelSpec, count, bytes_each: Callable, body: Callable, *, computed=(), once=tuple
) -> None:
    """Run ``body(i, worker, known)`` for ``i < count``, a block for each.

    Parameters
    ----------
    bytes_each, computed : ignored
    once : callable
        Emits what all items need to know, and gives `known`; every block does it anew.
    """
    with launch([T.cast(count, "int32")], THREADS) as ((block,), thread):
        i = T.cast(block, "int64")
        worker = Worker(spec, thread)
        with T.If(i < T.cast(count, "int64")), T.Then():
            body(i, worker, once())


@contextmanager
def maximum(values, count):
    """Find the largest of `count` int32 values, at least -1; `once` reads it by what is yielded.

    A kernel of one block finds it for all blocks of the next one: each of them would look at all
    values, and there is one for each value.
    """
    with workspace((1,), "maximum") as found:
        with launch([1], MAXIMUM_THREADS) as (_, thread):
            num_warps = MAXIMUM_THREADS // WARP
            of_warps = T.alloc_buffer((num_warps,), "int32", scope="shared.dyn")
            largest, lane = Variable(T.int32(-1)), index_temp(T.truncmod(thread, WARP))

            def combine() -> None:
                for mask in (1, 2, 4, 8, 16):
                    largest.set(T.max(largest.get(), shuffle_xor(largest.get(), mask)))

            with T.serial(T.ceildiv(T.cast(count, "int32"), MAXIMUM_THREADS)) as turn:
                i = index_temp(turn * MAXIMUM_THREADS + thread)
                with T.If(i < T.cast(count, "int32")), T.Then():
                    largest.set(T.max(largest.get(), values[i]))
            combine()
            with T.If(lane == 0), T.Then():
                T.buffer_store(of_warps, largest.get(), [T.truncdiv(thread, WARP)])
            sync_block()
            largest.set(of_warps[T.truncmod(lane, num_warps)])
            combine()
            with T.If(thread == 0), T.Then():
                T.buffer_store(found, T.reinterpret(F32, largest.get()), [0])
        yield lambda: index_temp(T.reinterpret("int32", found[0]))


def read_index(value):
    """Materialise an int32 value."""
    return index_temp(value)


def variable(value) -> Variable:
    """An int32 variable, with `get` and `set`."""
    return Variable(value)


class Worker:
    """The threads of a block.

    Parameters
    ----------
    spec : KernelSpec
    thread : int32 expression
    """

    arithmetic = scalars

    def __init__(self, spec: KernelSpec, thread):
        self.spec, self.thread = spec, thread
        self.shared = None
        if spec.codec is not None and spec.codec.bits == 4:
            # Cosines and sines, and behind them the row that each warp quantizes.
            size = max(1, spec.rope.rotary_dim // 2)
            self.scratch_begin = 2 * size
            rows = 2 + -(-WARPS * spec.qk_head_dim // size)
            self.shared = self._table(rows, size)

    def slot(self, slot) -> Slot:
        """Return the location of a slot's rows."""
        return Slot(slot, self.spec, scalars.temp)

    def sync(self) -> None:
        """Let all threads see what the others wrote."""
        sync_block()

    def table(self, rows: int, size: int):
        """A float32 array ``[rows, size]`` of the worker; it can have one."""
        return self._table(rows, size) if self.shared is None else self.shared

    @staticmethod
    def _table(rows: int, size: int):
        table = T.alloc_buffer((rows, size), F32, scope="shared.dyn", align=ACCESS_BYTES)
        return IRBuilder.name("table", table)

    def _scratch(self) -> tuple:
        """Room for a row of float32 numbers of the thread's warp: a table, and where it begins."""
        warp = T.truncdiv(self.thread, WARP)
        return self.shared, index_temp(self.scratch_begin + warp * self.spec.qk_head_dim)

    def for_elements(self, size: int, body: Callable) -> None:
        """Emit ``body(i, 1)`` for ``i < size``, shared out to the threads."""
        with T.serial(T.ceildiv(size, THREADS)) as turn:
            i = index_temp(turn * THREADS + self.thread)
            with T.If(i < size), T.Then():
                body(i, 1)

    def constants(self, values: Sequence[float], start, lanes: int, dtype: str = F32):
        """A constant out of a table."""
        return scalars.lookup(values, start, dtype)

    def _for_runs(self, count, width: int, length: int, body: Callable) -> None:
        """Emit ``body(row, start)`` for runs of `length` elements of `count` rows."""
        runs = width // length
        with T.serial(T.ceildiv(T.cast(count, "int32") * runs, THREADS)) as turn:
            item = index_temp(turn * THREADS + self.thread)
            with T.If(item < T.cast(count, "int32") * runs), T.Then():
                row, run = T.truncdiv(item, runs), T.truncmod(item, runs)
                body(scalars.temp(T.cast(row, "int64"), 1, "int64"), index_temp(run * length))

    def copy_rows(self, count, source: Callable, sink: Callable, begin: int = 0) -> None:
        """Copy elements `begin` to the end of rows, which both are ``i -> (buffer, indices)``.

        A thread takes the same elements in every call with as many rows.
        """
        to, of = (rows(T.int64(0))[0] for rows in (sink, source))
        is_quantized = [isinstance(pages, QuantizedPages) for pages in (to, of)]
        if all(is_quantized):
            for part in ("codes", "scales"):
                self.copy_rows(count, _part_of(source, part), _part_of(sink, part))
            return
        if is_quantized[0]:
            self.quantize_rows(count, lambda i: _loader(*source(i)), sink)
            return
        if is_quantized[1]:
            self._dequantize_rows(count, source, sink)
            return
        width = int(to.shape[-1]) - begin
        if width == 0:
            return
        same = str(to.dtype) == str(of.dtype)
        itemsize = STORED_ITEMSIZE[str(to.dtype)]
        max_run = ACCESS_BYTES // itemsize if same else 8

        def copy(i, start):
            start = begin + start
            (_, to_row), (_, of_row) = sink(i), source(i)
            copy_elements(to, (*to_row, start), of, (*of_row, start), length)

        length = run_length(width, begin, max_run)
        if same and itemsize == 1:  # codes
            length = math.gcd(width, max_run)
        self._for_runs(count, width, length, copy)

    def _for_rows_of_warps(self, count, body: Callable) -> None:
        """Emit ``body(row, lane)`` for rows, which warps share out."""
        lane = index_temp(T.truncmod(self.thread, WARP))
        with T.serial(T.ceildiv(T.cast(count, "int32"), WARPS)) as turn:
            row = index_temp(turn * WARPS + T.truncdiv(self.thread, WARP))
            with T.If(row < T.cast(count, "int32")), T.Then():
                body(scalars.temp(T.cast(row, "int64"), 1, "int64"), lane)

    def quantize_rows(self, count, load_run_of: Callable, sink: Callable) -> None:
        """Quantize rows; ``load_run_of(i)(column, n)`` loads numbers of row i."""

        def quantize(i, lane):
            pages, row = sink(i)
            quantize_row(pages, row, load_run_of(i), lane, self._scratch)

        self._for_rows_of_warps(count, quantize)

    def _dequantize_rows(self, count, source: Callable, sink: Callable) -> None:
        def dequantize(i, lane):
            (pages, row), (to, to_row) = source(i), sink(i)

            def store_run(column, numbers):
                store_floats(to, (*to_row, column), numbers)

            dequantize_row(pages, row, store_run, lane)

        self._for_rows_of_warps(count, dequantize)

    def cos_sin(self, rope):
        """Cosines and sines of one position."""
        return CosSin(rope, self)


def _part_of(rows: Callable, part: str) -> Callable:
    """Rows of the codes or of the scales of quantized rows."""

    def row_of(i):
        pages, row = rows(i)
        return getattr(pages, part), row

    return row_of


def _loader(buffer, row) -> Callable:
    """``(column, n)`` -> n numbers of a row."""
    return lambda column, n: load_floats(buffer, (*row, column), n)


class CosSin:
    """The cosines and sines of one position, which a worker computes together.

    Parameters
    ----------
    rope : RopeSpec
    worker : Worker
    """

    def __init__(self, rope, worker: Worker):
        self.rope, self.worker, self.half = rope, worker, rope.rotary_dim // 2
        self.table = worker.table(2, self.half)

    def fill(self, position, inv_freq: Callable | None = None) -> None:
        """Compute the row for an int32 position; `inv_freq` is ``(i, lanes) -> float32``."""
        known = inverse_frequencies(self.rope)
        scaled = T.cast(position, F32)
        if self.rope.scale != 1.0:
            scaled = scaled * T.float32(self.rope.scale)
        scaled = scalars.temp(scaled)

        def compute(i, lanes):
            of = inv_freq or (lambda i, lanes: self.worker.constants(known.inv_freq, i, lanes))
            rotation = sin_cos(scaled * of(i, lanes), lanes, scalars)
            for row, value in enumerate((rotation.cos, rotation.sin)):
                if known.attention_factor != 1.0:
                    value = value * T.float32(known.attention_factor)
                T.buffer_store(self.table, value, [row, i])

        self.worker.for_elements(self.half, compute)
        self.worker.sync()

    def rotate_rows(self, count, source: Callable, sink: Callable) -> None:
        """Rotate the rows `source` into the rows `sink`, both ``i -> (buffer, indices)``."""
        half = self.half
        if isinstance(sink(T.int64(0))[0], QuantizedPages):
            self.worker.quantize_rows(count, lambda i: self._rotated_loader(*source(i)), sink)
            return
        length = run_length(half)

        def rotate(i, start):
            (to, to_row), (of, of_row) = sink(i), source(i)
            first, second = (load_floats(of, (*of_row, start + base), length) for base in (0, half))
            results = [Registers(length, F32, "rotated") for _ in range(2)]
            for e in range(length):
                cos, sin = (scalars.temp(self.table[row, start + e]) for row in range(2))
                results[0][e] = first[e] * cos - second[e] * sin
                results[1][e] = second[e] * cos + first[e] * sin
            for base, values in zip((0, half), results, strict=True):
                store_floats(to, (*to_row, start + base), values)

        self.worker._for_runs(count, half, length, rotate)
        self.worker.copy_rows(count, source, sink, self.rope.rotary_dim)

    def _rotated_loader(self, buffer, row) -> Callable:
        """``(column, n)`` -> n numbers of a rotated row."""
        load, half = _loader(buffer, row), self.half

        def load_run(column, count: int) -> Registers:
            numbers = Registers(count, F32, "rotated")
            if half % count == 0:
                self._rotate_run(load, column, count, numbers)
                return numbers
            for i in range(count):  # some of the run may be of the other half, or not rotated
                one = Registers(1, F32, "one")
                self._rotate_run(load, column + i, 1, one)
                numbers[i] = one[0]
            return numbers

        return load_run

    def _rotate_run(self, load: Callable, column, count: int, numbers: Registers) -> None:
        """Rotate a run of columns, all of which are of one half, or behind both."""
        half = self.half
        own = load(column, count)
        for i in range(count):
            numbers[i] = own[i]
        with T.If(column < 2 * half), T.Then():
            is_first = index_temp(T.cast(column < half, "int32"))
            partner = load(T.if_then_else(is_first != 0, column + half, column - half), count)
            start = index_temp(T.if_then_else(is_first != 0, column, column - half))
            for i in range(count):
                cos, sin = (scalars.temp(self.table[side, start + i]) for side in range(2))
                sin = T.if_then_else(is_first != 0, -sin, sin)
                numbers[i] = own[i] * cos + partner[i] * sin
