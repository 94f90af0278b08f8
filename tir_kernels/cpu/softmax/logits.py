# SPDX-License-Identifier: Apache-2.0
"""Changes of logits before the softmax: a soft-cap, then the bias of ALiBi."""

from functools import partial

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import soft_cap as soft_cap_of
from ...spec import LOG2E, KernelSpec
from ..isa import simd
from ..isa.simd import F32, broadcast, chunks, literal, load, store, store_row, vector_type

soft_cap = partial(soft_cap_of, arithmetic=simd)


@T.meta_class
class AlibiBias:
    """A bias of rows that is linear in the distance, with a slope of each head.

    Press, Smith and Lewis, Train Short, Test Long (2022).

    Parameters
    ----------
    spec : KernelSpec
        With `alibi_slopes`.
    num_rows : int
        Rows that a task works at.
    """

    def __init__(self, spec: KernelSpec, num_rows: int):
        self.lanes, slopes = spec.target.lanes, spec.alibi_slopes
        self.table = T.alloc_buffer((len(slopes),), F32)
        for start, lanes in chunks(len(slopes), self.lanes):
            values = [slope * LOG2E for slope in slopes[start : start + lanes]]
            store(self.table, (start,), lanes, literal(values))
        self.slope = T.alloc_buffer((num_rows,), F32)
        self.position = T.alloc_buffer((num_rows,), "int32")

    @staticmethod
    def of(spec: KernelSpec, num_rows: int):
        """The bias, or None where the spec has none."""
        return AlibiBias(spec, num_rows) if spec.alibi_slopes else None

    @inline
    def set_row(self, row, head, position):
        """Let `row` be the query of a head at a position."""
        self.slope[row] = self.table[head]
        self.position[row] = position

    @inline
    def add(self, row, scores, at, first_position, offsets):
        """Add to ``scores[at]``, all of its columns, the bias of `row`.

        Parameters
        ----------
        scores : float32 ``[rows, columns]``, logits times log2(e).
        first_position : position of the first column.
        offsets : ``(column, lanes) -> int32 vector``, positions relative to it.
        """
        slope = self.slope[row]
        begin = first_position - self.position[row]
        bias = T.meta_var(
            lambda c, n: (
                T.cast(broadcast(begin, n) + offsets(c, n), vector_type(F32, n))
                * broadcast(slope, n)
            )
        )
        store_row(
            scores,
            (at,),
            int(scores.shape[1]),
            self.lanes,
            lambda c, n: load(scores, (at, c), n) + bias(c, n),
        )

    def of_rows(self, row, lanes: int, position):
        """The bias of `lanes` rows from `row` on at one position: a vector."""
        distance = broadcast(position, lanes) - load(self.position, (row,), lanes, "int32")
        return T.cast(distance, vector_type(F32, lanes)) * load(self.slope, (row,), lanes)
