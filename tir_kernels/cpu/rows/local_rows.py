# SPDX-License-Identifier: Apache-2.0
"""One query row for some KV heads, the local heads of a task: its Q, its mask and its softmax.

The query heads of a KV head, its group, are rows of `q`, `scores` and `o`. Rows whose sums are in
registers at once are a row set; a group has one or more, the last of which may be padded. The rows
of `q` and `o` of a local head begin at ``local_head * blocking.padded_rows``; `scores` and
`weights` have those of one local head.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN, NOTHING_SEEN, sum_of_sink
from ...spec import LOG2E, KernelSpec
from ...vectors import ramp
from ..isa.simd import broadcast, constant, index_temp, load, store_row
from ..softmax.logits import AlibiBias, soft_cap
from ..softmax.online_softmax import OnlineSoftmax
from .kv_blocks import BLOCK

STATE_BYTES = 1 << 16  # of the rows of Q and O of a task, which stay in L2


@dataclass(frozen=True)
class Blocking:
    """Register blocking of the rows of a group and of positions.

    Parameters
    ----------
    rows : int
        Rows of a row set.
    row_sets : int
        Row sets of a group.
    positions : int
        Rows of K that are multiplied at once.
    vectors : int
        Vectors of a row of O that are in registers at once.
    """

    rows: int
    row_sets: int
    positions: int
    vectors: int

    @property
    def padded_rows(self) -> int:
        """Rows of the group's buffers."""
        return self.rows * self.row_sets

    @staticmethod
    def of(spec: KernelSpec) -> "Blocking":
        """Choose for a spec."""
        max_rows, accumulators = (8, 16) if spec.target.registers >= 32 else (4, 8)
        row_sets = -(-spec.group_size // max_rows)
        rows = -(-spec.group_size // row_sets)
        positions = 1 << ((accumulators + rows // 2) // rows).bit_length() - 1
        positions = min(positions, 8, spec.target.lanes)  # whose sums fill at most a vector
        return Blocking(rows, row_sets, positions, max(1, accumulators // rows))


def max_local_heads(spec: KernelSpec) -> int:
    """KV heads that a task attends to at once: all, or so many that their rows stay in L2."""
    row_bytes = 4 * (spec.qk_head_dim + spec.v_head_dim)
    max_heads = max(1, STATE_BYTES // (row_bytes * Blocking.of(spec).padded_rows))
    return -(-spec.num_kv_heads // -(-spec.num_kv_heads // max_heads))


def max_local_rows(spec: KernelSpec) -> int:
    """Rows of Q and O of a task."""
    return max_local_heads(spec) * Blocking.of(spec).padded_rows


@T.meta_class
class QueryLoader:
    """Loads rows of Q as elements that are multiplied, rotated if the call asks for it.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    rope : rotation object
    factor : float32
        Factor of the scores, which float32 rows take in.
    """

    def __init__(self, spec: KernelSpec, ops, rope, factor):
        self.spec, self.ops, self.rope, self.factor = spec, ops, rope, factor
        self.padded_rows = Blocking.of(spec).padded_rows

    @inline
    def load(self, source, token, head, q, local_head, position):
        """Load the rows of a KV head of a token into `q`; `position` is that of RoPE."""
        rope, ops, group = T.meta_var((self.rope, self.ops, self.spec.group_size))
        first, first_head = T.meta_var((local_head * self.padded_rows, head * group))
        if rope.rotates_q:
            rope.set_position(position)
            for row in range(group):
                rope.rotate(lambda c, n: load(source, (token, first_head + row, c), n))
                self._put(
                    q, first + row, lambda c, n: ops.load_rotated_q(rope.row, c, n, self.factor)
                )
        else:
            for row in range(group):
                at = T.meta_var((token, first_head + row))
                self._put(q, first + row, lambda c, n: ops.load_q(source, (*at, c), n, self.factor))
        for row in range(self.padded_rows - group):
            zeros = T.meta_var(lambda c, n: broadcast(T.cast(0, ops.dtype), n))
            self._put(q, first + group + row, zeros)

    def _put(self, q, row, elements) -> None:
        store_row(q, (row,), int(q.shape[1]), self.spec.target.lanes, elements, self.ops.dtype)


@T.meta_class
class ScoreMask:
    """Caps scores, adds their bias, and hides those of positions that the row does not see."""

    def __init__(self, spec: KernelSpec):
        self.spec, self.lanes = spec, spec.target.lanes
        self.padded_rows = Blocking.of(spec).padded_rows
        self.bias = AlibiBias.of(spec, max_local_rows(spec))

    @inline
    def begin_head(self, head, local_head, position):
        """Take the slopes of the query heads of a KV head, whose RoPE position is given."""
        group = T.meta_var(self.spec.group_size)
        if self.bias is not None:
            for row in range(self.padded_rows):
                slot = T.meta_var(local_head * self.padded_rows + row)
                self.bias.set_row(slot, head * group + T.min(row, group - 1), position)

    @inline
    def apply(self, scores, kv, k_offset):
        """Mask the scores of a local head and a block of positions.

        `k_offset` is the RoPE position of the sequence's first column.
        """
        padded = T.meta_var(self.padded_rows)
        if self.spec.logit_softcap is not None:
            for row in range(padded):
                capped = T.meta_var(
                    lambda c, n: soft_cap(load(scores, (row, c), n), self.spec.logit_softcap, n)
                )
                store_row(scores, (row,), BLOCK, self.lanes, capped)
        if self.bias is not None:
            for row in range(padded):
                position = T.meta_var(k_offset + kv.first)
                self.bias.add(kv.local_head * padded + row, scores, row, position, ramp)
        if kv.hides_some:
            for row in range(padded):
                seen = T.meta_var(
                    lambda c, n: T.Select(
                        kv.sees(c, n), load(scores, (row, c), n), constant(HIDDEN, n)
                    )
                )
                store_row(scores, (row,), BLOCK, self.lanes, seen)


@T.meta_class
class RowSoftmax:
    """The online softmax of the rows of the local heads.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        Whose elements weights are.
    """

    def __init__(self, spec: KernelSpec, ops):
        self.spec, self.ops, self.blocking = spec, ops, Blocking.of(spec)
        num_sets = max_local_heads(spec) * self.blocking.row_sets
        self.online = OnlineSoftmax(num_sets, self.blocking.rows, spec.target.lanes)

    @inline
    def clear(self, o, local_head):
        """Let the rows of a local head have seen nothing: their sums in `o` are zeros."""
        padded, row_sets = T.meta_var((self.blocking.padded_rows, self.blocking.row_sets))
        for row in range(padded):
            at, width = T.meta_var((local_head * padded + row, self.spec.v_head_dim))
            store_row(o, (at,), width, self.spec.target.lanes, lambda c, n: constant(0.0, n))
        for row_set in range(row_sets):
            self.online.reset(local_head * row_sets + row_set)

    @inline
    def begin_with_sinks(self, sink_logits, head, local_head):
        """Start the rows of a KV head from their learned sinks; after `clear`."""
        group, online = T.meta_var((self.spec.group_size, self.online))
        for row in range(group):
            state = T.meta_var(self._state(local_head * self.blocking.padded_rows + row))
            sink = sink_logits[head * group + row] * T.float32(LOG2E)
            top = T.max(sink, T.float32(NOTHING_SEEN))
            online.row_max[state] = top
            online.row_sum[state] = sum_of_sink(sink, top)

    @inline
    def update(self, scores, weights, local_head, row_set):
        """Turn the scores of a row set into weights, ``exp2(score - maximum)``."""
        row_sets, rows = T.meta_var((self.blocking.row_sets, self.blocking.rows))
        state = T.meta_var(local_head * row_sets + row_set)
        self.online.update(state, scores, row_set * rows, weights, self.ops)

    def rescale(self, row):
        """Factor of the sums that a row of O had before the last update."""
        return self.online.rescale[self._state(row)]

    def result(self, o, row) -> tuple:
        """Return `o`, the row in it of a query head of the local heads, its maximum and sum."""
        group, padded = self.spec.group_size, self.blocking.padded_rows
        row = index_temp(row if group == padded else row // group * padded + row % group)
        state = self._state(row)
        return o, row, self.online.row_max[state], self.online.row_sum[state]

    def _state(self, row):
        """Index of a row of O in the state of `online`."""
        rows = self.blocking.rows
        return row if rows == self.online.stride else self.online.index(row // rows, row % rows)
