# SPDX-License-Identifier: Apache-2.0
"""The register-blocked product: a few rows by a few vectors of columns, summed in registers."""

from tvm.script import tirx as T

from ....script import inline
from ....spec import VectorTarget
from ..simd import F32, broadcast, constant, load, store
from .steps import STEPS

UNROLL = 2  # elements of a sum that one step takes


def round_up(count, step: int):
    """Return the smallest multiple of a step that is not less than a count."""
    return (count + step - 1) // step * step


@T.meta_class
class Panels:
    """A matrix whose columns lie in panels, as wide as register tiles are.

    A product so reads memory in order. Rows of the whole matrix would lie a power of two apart, and
    the panel would keep all of a few sets of the L1 cache.
    """

    def __init__(self, rows: int, columns: int, width: int, dtype: str):
        self.width, self.num_columns = width, columns
        self.buffer = T.alloc_buffer((-(-columns // width), rows, width), dtype)

    def at(self, row, column) -> tuple:
        """Return buffer and index of an element."""
        return self.buffer, (column // self.width, row, column % self.width)


@T.meta_class
class RegisterTile:
    """float32 sums of products, in ``rows * vectors`` registers: ``C += A B`` for a part of C.

    It serves every product of attention: of rows of Q and columns of K, of weights and columns of
    V, and, where rows lie along the lanes, of rows of K and columns of Q. A caller starts with
    `clear` or `load_scaled`, calls `multiply`, and stores the sums with `put`, or reads `sums`
    after `take_sums`. `amx_tile.AmxTile` has the same methods.

    Parameters
    ----------
    ops : operands object
    rows, vectors, lanes : int
        Rows, and vectors of `lanes` columns; besides the sums a row of vectors has to fit the
        registers.

    Attributes
    ----------
    step : int
        Elements of a sum that a step takes.
    column_step : int
        Columns of a matrix that `put` may write, a multiple of them.
    """

    step = UNROLL
    column_step = 1

    @staticmethod
    def shape(target: VectorTarget) -> tuple[int, int]:
        """Rows and vectors of a wide tile."""
        return target.tile_rows, target.tile_vectors

    def __init__(self, ops, rows: int, vectors: int, lanes: int):
        self.ops, self.rows, self.vectors, self.lanes = ops, rows, vectors, lanes
        self.width = vectors * lanes
        self.sums = T.alloc_local((rows, self.width), F32)
        self.columns = T.alloc_local((self.width,), ops.dtype)

    def at(self, i, j) -> tuple:
        """Return the index of vector j of row i in `sums`."""
        return i, T.ramp(j * self.lanes, 1, self.lanes)

    @inline
    def clear(self):
        """Start from zeros."""
        for i in T.unroll(self.rows):
            for j in T.unroll(self.vectors):
                self.sums[self.at(i, j)] = constant(0.0, self.lanes)

    @inline
    def load_scaled(self, matrix, row, column, scales, first):
        """Start from rows of a float32 matrix, times ``scales[first]`` and the ones behind it."""
        for i in T.unroll(self.rows):
            for j in T.unroll(self.vectors):
                value = T.meta_var(load(matrix, (row + i, column + j * self.lanes), self.lanes))
                scale = T.meta_var(broadcast(scales[first + i], self.lanes))
                self.sums[self.at(i, j)] = value * scale

    def take_sums(self) -> None:
        """Prepare `sums` for readers: they are there."""

    @inline
    def put(self, matrix, row, column):
        """Store the sums to rows of a float32 matrix."""
        for i in T.unroll(self.rows):
            for j in T.unroll(self.vectors):
                at = T.meta_var((row + i, column + j * self.lanes))
                store(matrix, at, self.lanes, self.sums[self.at(i, j)])

    @inline
    def multiply(self, a, row, b, column, depth, prefetch=None):
        """Add ``a[row : row + rows, :depth] @ b[:depth, column : column + width]``.

        Parameters
        ----------
        a : Buffer ``[row, k]`` of elements, or a view that is indexed like one.
        b : `Panels`, or a view with an ``at(k, column)`` that gives buffer and index.
        depth : int or int32 expression
            Length of the sum in elements, a multiple of `step`.
        prefetch : callable, optional
            ``(step)``, called in each of the ``depth // UNROLL`` steps.
        """
        steps = T.meta_var(STEPS.get(self.ops.steps))
        if steps is not None:
            steps.begin(self)
        for step in range(depth // UNROLL):
            if prefetch is not None:
                prefetch(step)
            if steps is not None:
                steps.add(self, a, row, b, column, range(UNROLL), step * UNROLL)
            else:
                for u in T.unroll(UNROLL):
                    k = T.meta_var(step * UNROLL + u)
                    for j in T.unroll(self.vectors):
                        vector = T.meta_var(b.at(k, column + j * self.lanes))
                        self.columns[T.ramp(j * self.lanes, 1, self.lanes)] = load(
                            *vector, self.lanes, self.ops.dtype
                        )
                    for i in T.unroll(self.rows):
                        self.add_products(i, a[row + i, k])
        if steps is not None:
            steps.end(self)

    @inline
    def add_products(self, i, element):
        """Add the products of an element, loaded from a buffer, and `columns` to row i."""
        if self.ops.broadcasts_from_memory and self.width == self.ops.lanes:
            self.sums[self.at(i, 0)] = self.ops.fma_element(
                self.sums[self.at(i, 0)], element, self.columns[T.ramp(0, 1, self.lanes)]
            )
        else:
            scalar = element
            for j in T.unroll(self.vectors):
                self.sums[self.at(i, j)] = self.ops.fma(
                    self.sums[self.at(i, j)],
                    broadcast(scalar, self.lanes),
                    self.columns[T.ramp(j * self.lanes, 1, self.lanes)],
                    self.lanes,
                )


@T.meta_class
class ColumnTiles:
    """Register tiles for the columns of a matrix: wide ones, a single vector, and a part of one.

    Parameters
    ----------
    ops : operands object
    target : VectorTarget
        It decides the shape of a wide tile.
    width : int
        Columns in all, a multiple of 8.
    tile : type, optional
        What multiplies: by default what `ops` asks for.

    Attributes
    ----------
    in_registers : ColumnTiles
        These, or the same columns in register tiles, for sums that are no matrix product.
    """

    def __init__(self, ops, target: VectorTarget, width: int, tile: type | None = None):
        make, lanes = tile or ops.product_tile or RegisterTile, target.lanes
        rows, vectors = make.shape(target)
        self.step, self.column_step = make.step, make.column_step
        self.wide = make(ops, rows, vectors, lanes)
        self.single = make(ops, rows, 1, lanes)
        self.num_wide, rest = divmod(width, self.wide.width)
        self.num_single, narrow = rest // lanes, width % lanes
        self.has_narrow = narrow > 0
        self.first_single, self.first_narrow = width - rest, width - narrow
        if narrow:
            self.narrow = make(ops, rows, 1, narrow)
        self.in_registers = (
            self if make is RegisterTile else ColumnTiles(ops, target, width, RegisterTile)
        )

    @inline
    def each(self, body):
        """Call ``body(tile, first_column)`` for each tile."""
        for i in range(self.num_wide):
            body(self.wide, i * self.wide.width)
        if self.num_single == 1:
            body(self.single, self.first_single)
        if self.num_single > 1:
            for i in range(self.num_single):
                body(self.single, self.first_single + i * self.single.lanes)
        if self.has_narrow:
            body(self.narrow, self.first_narrow)
