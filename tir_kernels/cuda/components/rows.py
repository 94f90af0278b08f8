# SPDX-License-Identifier: Apache-2.0
"""Workers of kernels that move rows: the threads of a block do an item of work."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ...layout import QuantizedPages
from ...script import inline, opened
from ...semantics.partial_states import selected
from ...semantics.rope import base_inverse_frequencies, first_factor, inverse_frequencies, sin_cos
from ...spec import STORED_ITEMSIZE, KernelSpec
from .. import scalars
from ..elements import ACCESS_BYTES, copy_elements, load_floats, run_length, store_floats
from ..emit import F32, WARP, Registers, Variable, index_temp, launch, opaque, sync_block
from ..launcher import workspace
from ..warp import shuffle_xor
from .quantized_rows import QuantizedRows

THREADS = 128
WARPS = THREADS // WARP
MIN_BLOCKS = 10  # of a multiprocessor, which then has enough loads in flight
MAXIMUM_THREADS = 512


@T.meta_class
class Worker:
    """The threads of a block. It does one item, so nothing in shared memory is used twice.

    Parameters
    ----------
    spec : KernelSpec
    computed : sequence of buffers
        Those with rows of numbers that are blended.
    """

    arithmetic = scalars
    lanes = 1

    def __init__(self, spec: KernelSpec, computed: Sequence = ()):
        self.spec, self.computed = spec, computed
        self.thread = self.shared = None

    def items(self, count, item_bytes):
        """Launch a block for each of the items, which do not depend on each other."""
        blocks = T.cast(count, "int32")
        min_blocks = MIN_BLOCKS if self.spec.codec is None else 0
        (block,), self.thread = opened(launch([blocks], THREADS, min_blocks))
        if self.spec.codec is not None and self.spec.codec.bits == 4:
            # Cosines and sines, and behind them the row that each warp quantizes.
            size = max(1, self.spec.rope.rotary_dim // 2)
            self.shared = self._table(2 - (-WARPS * self.spec.qk_head_dim // size), size)
        item = T.cast(block, "int64")
        opened(T.If(item < T.cast(count, "int64")))
        opened(T.Then())
        return T.serial(item, item + 1)

    def sync(self) -> None:
        """Let all threads see what the others wrote."""
        sync_block()

    def table(self, rows: int, size: int):
        """Return a float32 array ``[rows, size]`` in shared memory; a block can have one."""
        return self._table(rows, size) if self.shared is None else self.shared

    def _table(self, rows: int, size: int):
        table = T.alloc_buffer((rows, size), F32, scope="shared.dyn", align=ACCESS_BYTES)
        return IRBuilder.name("table", table)

    def elements(self, size: int):
        """Loop over elements, which the threads share."""
        return T.serial(self.thread, size, step=THREADS)

    def rest(self, size: int) -> int:
        """Return how many elements lie behind whole vectors: a thread takes one at a time."""
        return 0

    def lane(self):
        """Return the thread's number in its warp."""
        return index_temp(T.truncmod(self.thread, WARP))

    def warp_rows(self, count):
        """Loop over rows that the warps take."""
        return T.serial(T.truncdiv(self.thread, WARP), T.cast(count, "int32"), step=WARPS)

    def warp_scratch(self) -> tuple:
        """Return room for a row of numbers of the thread's warp: a table, and where it begins."""
        begin = 2 * max(1, self.spec.rope.rotary_dim // 2)
        warp = T.truncdiv(self.thread, WARP)
        return self.shared, index_temp(begin + warp * self.spec.qk_head_dim)

    def largest(self, values, count):
        """Return the largest of `count` int32 values, at least -1.

        A kernel of one block finds it for all blocks of the next one: each of them would look at
        all values, and there is one for each value.
        """
        found = opened(workspace((1,), "largest"))
        with launch([1], MAXIMUM_THREADS) as (_, thread):
            num_warps = MAXIMUM_THREADS // WARP
            of_warps = T.alloc_buffer((num_warps,), "int32", scope="shared.dyn")
            largest, lane = Variable(T.int32(-1)), index_temp(T.truncmod(thread, WARP))

            def combine() -> None:
                for mask in (1, 2, 4, 8, 16):
                    largest.set(T.max(largest.get(), shuffle_xor(largest.get(), mask)))

            with T.serial(thread, T.cast(count, "int32"), step=MAXIMUM_THREADS) as i:
                largest.set(T.max(largest.get(), values[i]))
            combine()
            with T.If(lane == 0), T.Then():
                T.buffer_store(of_warps, largest.get(), [T.truncdiv(thread, WARP)])
            sync_block()
            largest.set(of_warps[T.truncmod(lane, num_warps)])
            combine()
            with T.If(thread == 0), T.Then():
                T.buffer_store(found, T.reinterpret(F32, largest.get()), [0])
        return T.reinterpret("int32", found[0])


@T.meta_class
class Teams:
    """Threads of a block in teams, which share the rows of an item.

    Parameters
    ----------
    worker : Worker
    num_runs : int
        Runs of elements of a row; a thread of a team takes one at a time.
    """

    def __init__(self, worker: Worker, num_runs: int):
        self.worker, self.num_runs = worker, num_runs
        turns = min(range(1, 9), key=lambda n: (-round(self._busy(n), 1), n))
        self.size = -(-num_runs // turns)  # of a team
        self.count = max(1, THREADS // self.size)

    def _busy(self, turns: int) -> float:
        """Return which part of the threads has something to do."""
        size = -(-self.num_runs // turns)
        return THREADS // size * self.num_runs / (THREADS * turns)

    def rows(self, count):
        """Loop over the rows of a team."""
        team = T.truncdiv(self.worker.thread, self.size)
        if isinstance(count, int) and count <= self.count:
            is_taken = T.if_then_else(team < count, 1, 0)
            return T.serial(team, team + (is_taken if count * self.size < THREADS else 1))
        count = T.cast(count, "int32")
        if self.size * self.count < THREADS:
            team = T.if_then_else(team < self.count, team, count)
        return T.serial(team, count, step=self.count)

    def runs(self, num_runs: int):
        """Loop over the runs of a row that the thread takes."""
        first = T.truncmod(self.worker.thread, self.size)
        if num_runs == self.size:
            return T.serial(first, first + 1)
        return T.serial(first, num_runs, step=self.size)


@T.meta_class
class RowCopy:
    """Copies rows of one array to rows of another, each at its indices less the last axis.

    Rows are quantized on their way into quantized pages, and dequantized on their way out. What is
    quantized already is copied bit for bit. A thread takes the same elements of every row.

    Parameters
    ----------
    worker : Worker
    source, sink : Buffer or QuantizedPages
    """

    def __init__(self, worker: Worker, source, sink):
        self.worker, self.source, self.sink = worker, source, sink
        self.reads_codes, self.writes_codes = (
            isinstance(pages, QuantizedPages) for pages in (source, sink)
        )
        self.has_teams = self.reads_codes == self.writes_codes
        if self.has_teams:
            arrays = [x.codes if self.reads_codes else x for x in (source, sink)]
            self.teams = Teams(worker, _num_runs(*arrays))
        else:
            self.quantized = QuantizedRows(sink if self.writes_codes else source)

    def rows(self, count):
        """Loop over the rows of an item, which teams of threads or warps share."""
        return self.teams.rows(count) if self.has_teams else self.worker.warp_rows(count)

    @inline
    def copy(self, source_row, sink_row):
        """Copy a row."""
        if self.reads_codes and self.writes_codes:
            copy_runs(self.teams, self.source.codes, source_row, self.sink.codes, sink_row, 0)
            copy_runs(self.teams, self.source.scales, source_row, self.sink.scales, sink_row, 0)
        elif self.reads_codes:
            self.quantized.dequantize(source_row, self.sink, sink_row, self.worker)
        elif self.writes_codes:
            self.quantized.quantize(sink_row, self, source_row, self.worker)
        else:
            copy_runs(self.teams, self.source, source_row, self.sink, sink_row, 0)

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load some numbers of a row."""
        return load_floats(self.source, (*row, column), count)


@inline
def copy_runs(teams, source, source_row, sink, sink_row, begin):
    """Copy elements `begin` to the end of a row; bit for bit where the types are the same."""
    length = T.meta_var(_run_length(source, sink, begin))
    if length > 0:
        for run in teams.runs(_num_runs(source, sink, begin)):
            column = begin + run * length
            copy_elements(sink, (*sink_row, column), source, (*source_row, column), length)


def _run_length(source, sink, begin: int = 0) -> int:
    """Return how many elements a thread copies at once; 0 where there is nothing to copy."""
    width, itemsize = int(sink.shape[-1]) - begin, STORED_ITEMSIZE[str(sink.dtype)]
    is_same = str(source.dtype) == str(sink.dtype)
    longest = ACCESS_BYTES // itemsize if is_same else 8
    if is_same and itemsize == 1:  # codes
        return math.gcd(width, longest)
    return run_length(width, begin, longest) if width else 0


def _num_runs(source, sink, begin: int = 0) -> int:
    return (int(sink.shape[-1]) - begin) // _run_length(source, sink, begin)


@T.meta_class
class CosSin:
    """The cosines and sines of one position, which a block computes together.

    Parameters
    ----------
    worker : Worker
    factors : Buffer, optional
        longrope: the long factors, then the short ones.
    """

    def __init__(self, worker: Worker, factors=None):
        self.worker, self.factors, self.rope = worker, factors, worker.spec.rope
        self.half = self.rope.rotary_dim // 2
        self.table = worker.table(2, self.half)

    @inline
    def fill(self, position, last_position=None):
        """Compute them for an int32 position of a sequence; longrope asks for its last one."""
        scaled = T.cast(position, "float32") * T.float32(self.rope.scale)
        for i in self.worker.elements(self.half):
            self._compute(i, scaled, last_position)
        self.worker.sync()

    def _compute(self, i, scaled, last_position) -> None:
        known = inverse_frequencies(self.rope)
        if self.factors is None:
            frequency = scalars.lookup(known.inv_freq, i)
        else:
            unscaled = scalars.lookup(base_inverse_frequencies(self.rope), i, "float64")
            factor = self.factors[first_factor(self.rope, last_position) + i]
            frequency = T.cast(unscaled / T.cast(factor, "float64"), F32)
        rotation = sin_cos(scaled * frequency, 1, scalars)
        for row, value in enumerate((rotation.cos, rotation.sin)):
            if known.attention_factor != 1.0:
                value = value * T.float32(known.attention_factor)
            T.buffer_store(self.table, value, [row, i])

    def at(self, i) -> tuple:
        """Return cosine and sine of a pair of dimensions."""
        return tuple(scalars.temp(self.table[row, i]) for row in range(2))


@T.meta_class
class RowRotation:
    """Copies rows of one array to rows of another, and rotates them on their way.

    Parameters
    ----------
    worker : Worker
    source : Buffer
    sink : Buffer or QuantizedPages
    """

    def __init__(self, worker: Worker, source, sink):
        self.worker, self.source, self.sink = worker, source, sink
        self.rotary_dim = worker.spec.rope.rotary_dim
        self.half = self.rotary_dim // 2
        self.length = run_length(self.half)
        self.writes_codes = isinstance(sink, QuantizedPages)
        if self.writes_codes:
            self.quantized = QuantizedRows(sink)
        else:
            self.teams = Teams(worker, self.half // self.length or _num_runs(source, sink))

    def rows(self, count):
        """Loop over the rows of an item, which teams of threads or warps share."""
        return self.worker.warp_rows(count) if self.writes_codes else self.teams.rows(count)

    @inline
    def write(self, cos_sin, is_rotated, source_row, sink_row):
        """Copy a row, whose leading columns are rotated where a condition holds."""
        if is_rotated:
            if self.writes_codes:
                rotated = T.meta_var(RotatedRows(self.source, cos_sin))
                self.quantized.quantize(sink_row, rotated, source_row, self.worker)
            else:
                for run in self.teams.runs(self.half // self.length):
                    self._rotate_run(cos_sin, run * self.length, source_row, sink_row)
                copy_runs(self.teams, self.source, source_row, self.sink, sink_row, self.rotary_dim)
        else:
            if self.writes_codes:
                self.quantized.quantize(sink_row, self, source_row, self.worker)
            else:
                copy_runs(self.teams, self.source, source_row, self.sink, sink_row, 0)

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load some numbers of a row."""
        return load_floats(self.source, (*row, column), count)

    def _rotate_run(self, cos_sin, start, source_row: Sequence, sink_row: Sequence) -> None:
        start = opaque(start)  # or cosines and sines stay in registers from row to row
        columns = (start, start + self.half)
        first, second = (load_floats(self.source, (*source_row, c), self.length) for c in columns)
        results = [Registers(self.length, F32, "rotated") for _ in range(2)]
        for e in range(self.length):
            cos, sin = cos_sin.at(start + e)
            results[0][e] = first[e] * cos - second[e] * sin
            results[1][e] = second[e] * cos + first[e] * sin
        for column, values in zip(columns, results, strict=True):
            store_floats(self.sink, (*sink_row, column), values)


class RotatedRows:
    """The numbers of rows, rotated while they are loaded."""

    def __init__(self, source, cos_sin: CosSin):
        self.source, self.cos_sin, self.half = source, cos_sin, cos_sin.half

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load some numbers of a row."""
        numbers = Registers(count, F32, "rotated")
        if self.half % count == 0:
            self._rotate(row, column, count, numbers)
            return numbers
        for i in range(count):  # some of the run may be of the other half, or not rotated
            one = Registers(1, F32, "one")
            self._rotate(row, column + i, 1, one)
            numbers[i] = one[0]
        return numbers

    def _rotate(self, row: Sequence, column, count: int, numbers: Registers) -> None:
        """Rotate a run of columns, all of which are of one half, or behind both."""
        half = self.half
        own = load_floats(self.source, (*row, column), count)
        for i in range(count):
            numbers[i] = own[i]
        with T.If(column < 2 * half), T.Then():
            is_first = index_temp(T.cast(column < half, "int32")) != 0
            partner = T.if_then_else(is_first, column + half, column - half)
            partner = load_floats(self.source, (*row, partner), count)
            start = index_temp(T.if_then_else(is_first, column, column - half))
            for i in range(count):
                cos, sin = self.cos_sin.at(start + i)
                sin = T.if_then_else(is_first, -sin, sin)
                numbers[i] = own[i] * cos + partner[i] * sin


@T.meta_class
class RowBlend:
    """Sums rows of the worker's `computed` buffers, times weights, into those of the first one.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker):
        width = int(worker.computed[0].shape[-1])
        self.buffers, self.length = worker.computed, run_length(width)
        self.teams = Teams(worker, width // self.length)

    def rows(self, count):
        """Loop over the rows of an item, which teams of threads share."""
        return self.teams.rows(count)

    @inline
    def blend(self, index, weights):
        """Blend the rows at `index`."""
        for run in self.teams.runs(self.teams.num_runs):
            self._blend_run((*index, run * self.length), weights)

    def _blend_run(self, index, weights: Sequence) -> None:
        loaded = [load_floats(buffer, index, self.length) for buffer in self.buffers]
        values = Registers(self.length, F32, "blended")
        for e in range(self.length):
            terms = [
                selected(x[e], weight, 1, scalars)
                for x, weight in zip(loaded, weights, strict=True)
            ]
            values[e] = functools.reduce(lambda a, b: a + b, terms)
        store_floats(self.buffers[0], index, values)
