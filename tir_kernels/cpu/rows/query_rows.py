# SPDX-License-Identifier: Apache-2.0
"""One query row per head: its Q, its scores and weights, and its sums of V."""

from dataclasses import dataclass

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN, NOTHING_SEEN, sum_of_sink
from ...spec import LOG2E, KernelSpec
from ...vectors import ramp
from ..isa.simd import F32, broadcast, constant, index_temp, load, store_row
from ..softmax.logits import AlibiBias, soft_cap
from ..softmax.online_softmax import OnlineSoftmax
from .kv_blocks import BLOCK

STATE_BYTES = 1 << 16  # of the rows of Q and O of a task, which stay in L2


@dataclass(frozen=True)
class Blocking:
    """Register blocking of the rows of a group and the positions of a block.

    Parameters
    ----------
    rows : int
        Query heads whose accumulators are live at once.
    row_blocks : int
        Such sets in a group; the last one may be padded.
    positions : int
        Rows of K that are multiplied at once.
    vectors : int
        Vectors of an output row that are live at once.
    """

    rows: int
    row_blocks: int
    positions: int
    vectors: int

    @property
    def padded_rows(self) -> int:
        """Rows of the group's buffers."""
        return self.rows * self.row_blocks

    @staticmethod
    def of(spec: KernelSpec) -> "Blocking":
        """Choose for a spec."""
        max_rows, accumulators = (8, 16) if spec.target.registers >= 32 else (4, 8)
        row_blocks = -(-spec.group_size // max_rows)
        rows = -(-spec.group_size // row_blocks)
        positions = 1 << ((accumulators + rows // 2) // rows).bit_length() - 1
        positions = min(positions, 8, spec.target.lanes)  # whose sums fill at most a vector
        return Blocking(rows, row_blocks, positions, max(1, accumulators // rows))


def max_local_heads(spec: KernelSpec) -> int:
    """KV heads that a task attends to at once: all, or so many that their rows stay in L2."""
    row_bytes = 4 * (spec.qk_head_dim + spec.v_head_dim)
    max_heads = max(1, STATE_BYTES // (row_bytes * Blocking.of(spec).padded_rows))
    return -(-spec.num_kv_heads // -(-spec.num_kv_heads // max_heads))


@T.meta_class
class QueryRows:
    """The buffers of a task for one query row of some KV heads, its local heads.

    The rows of Q and O of a local head begin at ``local_head * blocking.padded_rows``.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `kv_operands.single_row_operands` chooses it.
    rope : rotation object
    sm_scale : float32
        Factor of the scores.

    Attributes
    ----------
    scores : float32 ``[row of a local head, BLOCK]``, logits times log2(e)
    weights : elements of `ops`, as `scores`
    """

    def __init__(self, spec: KernelSpec, ops, rope, sm_scale):
        self.spec, self.ops, self.rope, self.lanes = spec, ops, rope, spec.target.lanes
        self.blocking = Blocking.of(spec)
        self.elements = spec.qk_head_dim // ops.numbers  # of a row of Q
        self.sm_scale, self.factor = sm_scale, T.local_scalar(F32)
        padded, num_heads = self.blocking.padded_rows, max_local_heads(spec)
        self.q = T.alloc_buffer((num_heads * padded, self.elements), ops.dtype)
        self.o = T.alloc_buffer((num_heads * padded, spec.v_head_dim), F32)
        self.scores = T.alloc_buffer((padded, BLOCK), F32)
        self.weights = self.scores
        if ops.numbers > 1:
            self.weights = T.alloc_buffer((padded, BLOCK // ops.numbers), ops.dtype)
        row_blocks = num_heads * self.blocking.row_blocks
        self.softmax = OnlineSoftmax(row_blocks, self.blocking.rows, self.lanes)
        self.bias = AlibiBias.of(spec, num_heads * padded)

    @inline
    def begin(self):
        """Take the factor of the scores, for exp2."""
        self.factor = self.sm_scale * T.float32(LOG2E)

    @inline
    def load_q(self, q, token, head, local_head, position):
        """Take the query rows of a KV head, which are at a RoPE position."""
        rope, ops, group = T.meta_var((self.rope, self.ops, self.spec.group_size))
        padded = T.meta_var(self.blocking.padded_rows)
        first, first_head = T.meta_var((local_head * padded, head * group))
        if rope.rotates_q:
            rope.set_position(position)
            for row in range(group):
                rope.rotate(lambda c, n: load(q, (token, first_head + row, c), n))
                self._put_q(
                    first + row, lambda c, n: ops.load_rotated_q(rope.row, c, n, self.factor)
                )
        else:
            for row in range(group):
                at = T.meta_var((token, first_head + row))
                self._put_q(first + row, lambda c, n: ops.load_q(q, (*at, c), n, self.factor))
        if self.bias is not None:
            for row in range(padded):
                self.bias.set_row(first + row, first_head + T.min(row, group - 1), position)
        for row in range(padded - group):
            zeros = T.meta_var(lambda c, n: broadcast(T.cast(0, ops.dtype), n))
            self._put_q(first + group + row, zeros)

    @inline
    def clear(self, local_head):
        """Let the query rows of a KV head have seen nothing."""
        padded, row_blocks = T.meta_var((self.blocking.padded_rows, self.blocking.row_blocks))
        for row in range(padded):
            at, width = T.meta_var((local_head * padded + row, self.spec.v_head_dim))
            store_row(self.o, (at,), width, self.lanes, lambda c, n: constant(0.0, n))
        for block in range(row_blocks):
            self.softmax.reset(local_head * row_blocks + block)

    @inline
    def begin_with_sinks(self, sink_logits, head, local_head):
        """Start the softmax of a KV head's query rows from their learned sinks; after `clear`."""
        group, softmax = T.meta_var((self.spec.group_size, self.softmax))
        for row in range(group):
            state = T.meta_var(self.state(local_head * self.blocking.padded_rows + row))
            sink = sink_logits[head * group + row] * T.float32(LOG2E)
            top = T.max(sink, T.float32(NOTHING_SEEN))
            softmax.row_max[state] = top
            softmax.row_sum[state] = sum_of_sink(sink, top)

    def _put_q(self, row, elements) -> None:
        store_row(self.q, (row,), self.elements, self.lanes, elements, self.ops.dtype)

    @inline
    def mask(self, kv, k_offset):
        """Cap the scores of a block, add the bias, and hide what is not visible.

        `k_offset` is the RoPE position of the sequence's first column.
        """
        padded, scores = T.meta_var((self.blocking.padded_rows, self.scores))
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

    @inline
    def update_softmax(self, local_head, block):
        """Turn the scores of a set of rows of a local head into weights."""
        row_blocks, rows = T.meta_var((self.blocking.row_blocks, self.blocking.rows))
        state = T.meta_var(local_head * row_blocks + block)
        self.softmax.update(state, self.scores, block * rows, self.weights, self.ops)

    def state(self, row):
        """Index of a row of O in the state of `softmax`."""
        rows = self.blocking.rows
        return row if rows == self.softmax.stride else self.softmax.index(row // rows, row % rows)

    def result(self, row) -> tuple:
        """Return `o`, the row in it of a query head of the local heads, its maximum and sum."""
        group, padded = self.spec.group_size, self.blocking.padded_rows
        row = index_temp(row if group == padded else row // group * padded + row % group)
        state = self.state(row)
        return self.o, row, self.softmax.row_max[state], self.softmax.row_sum[state]
