# SPDX-License-Identifier: Apache-2.0
"""ALiBi: a bias of the logits, linear in the distance, with a slope of each head.

Press, Smith and Lewis, Train Short, Test Long (2022). The bias is added after a soft-cap.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...spec import LOG2E, KernelSpec
from ..simd import F32, broadcast, chunks, index_temp, literal, load, store, temp, vector_type


class AlibiBias:
    """The bias of the rows that a task works at.

    Parameters
    ----------
    spec : KernelSpec
        With `alibi_slopes`.
    num_rows : int
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
    def of(spec: KernelSpec, num_rows: int) -> AlibiBias | None:
        """The bias, or None where the spec has none."""
        return AlibiBias(spec, num_rows) if spec.alibi_slopes else None

    def set_row(self, row, head, position) -> None:
        """Let `row` be the query of a head at a position."""
        T.buffer_store(self.slope, self.table[head], [row])
        T.buffer_store(self.position, position, [row])

    def add(self, row, scores, at, first_position, offsets: Callable) -> None:
        """Add to ``scores[at]``, all of its columns, the bias of `row`.

        Parameters
        ----------
        scores : float32 ``[rows, columns]``, logits times log2(e).
        first_position : position of the first column.
        offsets : ``(column, lanes) -> int32 vector``, positions relative to it.
        """
        slope = temp(self.slope[row])
        begin = index_temp(first_position - self.position[row])
        for start, lanes in chunks(int(scores.shape[1]), self.lanes):
            distance = broadcast(begin, lanes) + offsets(start, lanes)
            bias = T.cast(distance, vector_type(F32, lanes)) * broadcast(slope, lanes)
            store(scores, (at, start), lanes, load(scores, (at, start), lanes) + bias)

    def of_rows(self, row, lanes: int, position):
        """The bias of `lanes` rows from `row` on at one position: a vector."""
        distance = broadcast(position, lanes) - load(self.position, (row,), lanes, "int32")
        return T.cast(distance, vector_type(F32, lanes)) * load(self.slope, (row,), lanes)
