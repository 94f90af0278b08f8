# SPDX-License-Identifier: Apache-2.0
"""Copies of columns of a row, on any target, and rotated ones, on CPUs."""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.cpu.isa.simd import broadcast, load, store
from tir_kernels.script import inline


@inline
def copy_columns(v, source, source_row, begin, sink, sink_row, to, scale=None):
    """Copy columns of a row, times a factor where there is one.

    Parameters
    ----------
    v : Vectors
        They cover the columns.
    source, sink : Buffer
    source_row, sink_row : tuple
        Indices of the rows, without the last axis.
    begin, to : int64 expression
        The first columns.
    scale : float32 expression, optional
    """
    for column in v.columns():
        if scale is None:
            v.store(sink, (*sink_row, column + to), v.load(source, (*source_row, column + begin)))
        else:
            value = T.meta_var(v.load(source, (*source_row, column + begin)) * v.filled(scale))
            v.store(sink, (*sink_row, column + to), value)


def rotate_columns(
    cos_sin: CosSin, source, source_row: tuple, begin, sink, sink_row: tuple, to, scale=None
) -> None:
    """Copy the columns that `cos_sin` rotates; the other parameters are those of `copy_columns`."""

    def read(column, lanes):
        return load(source, (*source_row, column + begin), lanes)

    def write(column, lanes, value):
        value = value if scale is None else value * broadcast(scale, lanes)
        store(sink, (*sink_row, column + to), lanes, value)

    cos_sin.rotate(read, write)
