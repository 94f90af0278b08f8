# SPDX-License-Identifier: Apache-2.0
"""Rows that a block copies, rotates and blends; rows of codes are quantized or dequantized."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tvm.script import tirx as T

from ...define import ACCESS_BYTES
from ...layout import K_PLANE, QuantizedPages, TwoWidths, rows_of
from ...script import inline
from ...semantics.softmax import selected
from ...spec import STORED_ITEMSIZE
from ..registers import F32, Registers, index_temp, run_length
from .cos_sin import CosSin
from .quantized_rows import QuantizedRows
from .worker import Teams, Worker


@T.meta_class
class RowCopy:
    """Copies rows of one array to rows of another, each at its indices less the last axis.

    Rows are quantized on their way into quantized pages, and dequantized on their way out. What is
    quantized already is copied bit for bit. A thread takes the same elements of every row.

    Parameters
    ----------
    worker : Worker
    source, sink : Buffer or QuantizedPages, or both `TwoWidths`
    scales : float32 Buffer, optional
        As `QuantizedRows` takes them.
    """

    def __init__(self, worker: Worker, source, sink, scales=None):
        self.worker, self.source, self.sink = worker, source, sink
        self.reads_codes, self.writes_codes = (
            isinstance(pages, QuantizedPages) for pages in (source, sink)
        )
        self.has_teams = self.reads_codes == self.writes_codes
        if self.has_teams:
            arrays = [x.codes if self.reads_codes else rows_of(x, K_PLANE) for x in (source, sink)]
            self.teams = Teams(worker, _num_runs(*arrays))
        else:
            self.quantized = QuantizedRows(sink if self.writes_codes else source, scales)

    def rows(self, count):
        """Loop over the rows of an item, which teams of threads or warps share."""
        return self.teams.rows(count) if self.has_teams else self.worker.warp_rows(count)

    @inline
    def copy(self, source_row, sink_row):
        """Copy a row."""
        if self.reads_codes and self.writes_codes:
            copy_runs(self.teams, self.source.codes, source_row, self.sink.codes, sink_row, 0)
            copy_runs(self.teams, self.source.scales, source_row, self.sink.scales, sink_row, 0)
        elif isinstance(self.sink, TwoWidths):
            if source_row[1] == K_PLANE:
                copy_runs(self.teams, self.source.k, source_row, self.sink.k, sink_row, 0)
            else:
                copy_runs(self.teams, self.source.v, source_row, self.sink.v, sink_row, 0)
        elif self.reads_codes:
            self.quantized.dequantize(source_row, self.sink, sink_row, self.worker)
        elif self.writes_codes:
            self.quantized.quantize(sink_row, self, source_row, self.worker)
        else:
            copy_runs(self.teams, self.source, source_row, self.sink, sink_row, 0)

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load some values of a row."""
        return self.worker.isa.load_floats(self.source, (*row, column), count)


@inline
def copy_runs(teams, source, source_row, sink, sink_row, begin):
    """Copy elements `begin` to the end of a row; bit for bit where the types are the same."""
    length = T.meta_var(_run_length(source, sink, begin))
    if length > 0:
        for run in teams.runs(_num_runs(source, sink, begin)):
            column = begin + run * length
            to, of = T.meta_var(((*sink_row, column), (*source_row, column)))
            teams.worker.isa.copy_elements(sink, to, source, of, length)


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
        self.worker, self.source, self.sink = worker, source, sink
        self.rotary_dim = worker.spec.rope.rotary_dim
        self.half = self.rotary_dim // 2
        self.length = run_length(self.half)
        self.writes_codes = isinstance(sink, QuantizedPages)
        if self.writes_codes:
            self.quantized = QuantizedRows(sink, scales)
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
        """Load some values of a row."""
        return self.worker.isa.load_floats(self.source, (*row, column), count)

    def _rotate_run(self, cos_sin, start, source_row: Sequence, sink_row: Sequence) -> None:
        isa = self.worker.isa
        start = isa.opaque(start)  # or cosines and sines stay in registers from row to row
        columns = (start, start + self.half)
        indices = ((*source_row, column) for column in columns)
        first, second = (isa.load_floats(self.source, i, self.length) for i in indices)
        results = [Registers(self.length, F32, "rotated") for _ in range(2)]
        for e in range(self.length):
            cos, sin = cos_sin.at(start + e)
            results[0][e] = first[e] * cos - second[e] * sin
            results[1][e] = second[e] * cos + first[e] * sin
        for column, values in zip(columns, results, strict=True):
            isa.store_floats(self.sink, (*sink_row, column), values)


class RotatedRows:
    """The values of rows, rotated while they are loaded."""

    def __init__(self, source, cos_sin: CosSin):
        self.source, self.cos_sin, self.half = source, cos_sin, cos_sin.half
        self.isa = cos_sin.worker.isa

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load some values of a row."""
        values = Registers(count, F32, "rotated")
        if self.half % count == 0:
            self._rotate(row, column, count, values)
            return values
        for i in range(count):  # some of the run may be of the other half, or not rotated
            one = Registers(1, F32, "one")
            self._rotate(row, column + i, 1, one)
            values[i] = one[0]
        return values

    def _rotate(self, row: Sequence, column, count: int, values: Registers) -> None:
        """Rotate a run of columns, all of which are of one half, or past both."""
        half = self.half
        own = self.isa.load_floats(self.source, (*row, column), count)
        for i in range(count):
            values[i] = own[i]
        with T.If(column < 2 * half), T.Then():
            is_first = index_temp(T.cast(column < half, "int32")) != 0
            partner = T.if_then_else(is_first, column + half, column - half)
            partner = self.isa.load_floats(self.source, (*row, partner), count)
            start = index_temp(T.if_then_else(is_first, column, column - half))
            for i in range(count):
                cos, sin = self.cos_sin.at(start + i)
                sin = T.if_then_else(is_first, -sin, sin)
                values[i] = own[i] * cos + partner[i] * sin


@T.meta_class
class RowBlend:
    """Sums rows of the worker's `computed` buffers, times weights, into those of the first one.

    Parameters
    ----------
    worker : Worker
    """

    def __init__(self, worker: Worker):
        width = int(worker.computed[0].shape[-1])
        self.worker = worker
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
        isa, length = self.worker.isa, self.length
        loaded = [isa.load_floats(buffer, index, length) for buffer in self.buffers]
        values = Registers(self.length, F32, "blended")
        for e in range(self.length):
            terms = [
                selected(x[e], weight, 1, isa) for x, weight in zip(loaded, weights, strict=True)
            ]
            values[e] = functools.reduce(lambda a, b: a + b, terms)
        isa.store_floats(self.buffers[0], index, values)
