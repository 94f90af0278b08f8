# SPDX-License-Identifier: Apache-2.0
"""Query heads of one KV head over a split of one sequence's positions: what a block does at a time.

The warps of a block form groups. With G groups, each takes every G-th tile of positions, runs a
softmax of its own and waits for no other; the partial states of the groups are merged in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ...semantics.visibility import Span
from ...spec import LOG2E, KernelSpec
from ..components.code_pipeline import kv_pipeline
from ..components.inline_rope import InlineRope
from ..components.kv_rows import PagedRows, as_int64
from ..components.logits import Logits
from ..components.pipeline import ThreadGroup, commit, copy_rows, wait, zero_padding
from ..components.softmax import OnlineSoftmax, products_of
from ..emit import F32, WARP, Registers, index_temp, sync_block, sync_warp
from ..scalars import temp
from ..splits.page_schedule import Pair
from ..splits.partial_states import RUN, weigh
from ..tiles.decode_tiling import DecodeTiling
from ..tiles.fma import MultiplyAdds
from ..tiles.group_scales import GroupScales
from ..tiles.hadamard import hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.mma import TensorCores
from ..tiles.mma_codes import (
    CodeTensorCores,
    PackedCodeTensorCores,
    interleave_columns,
)
from ..tiles.shared_tiles import SharedTiles

MAX_KEPT = 128  # elements of a row of Q in registers: tiles of few positions leave room for them


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The query rows of a (sequence, KV head) pair, and where its K and V are.

    Parameters
    ----------
    pair : Pair
    rows : PagedRows
    length : int32 expression
        Positions of the sequence, the dropped ones included; longrope depends on it.
    """

    pair: Pair
    rows: PagedRows
    length: object


class DecodeSplit:
    """Per-block state and work, one pair after the other.

    Parameters
    ----------
    spec : KernelSpec
    tiling : DecodeTiling
    a : the kernel's arguments.
    slice_id : int32 expression
        Which slice of the query heads of a KV head, times that of the columns of V.
    thread : int32 expression
    """

    def __init__(self, spec: KernelSpec, tiling: DecodeTiling, a, slice_id, thread):
        self.spec, self.tiling, self.a = spec, tiling, a
        lane = self.lane = index_temp(T.truncmod(thread, WARP))
        group = index_temp(T.truncdiv(thread, tiling.num_group_threads))
        group_thread = index_temp(T.truncmod(thread, tiling.num_group_threads))
        self.warp_row = index_temp(T.truncdiv(group_thread, WARP) * tiling.warp_rows)
        self.block = ThreadGroup(thread, tiling.num_threads, sync_block)
        sync = sync_warp if tiling.row_warps == 1 else sync_block
        self.threads = ThreadGroup(
            group_thread, tiling.num_group_threads, sync, group, tiling.kv_groups
        )
        self.first_row = index_temp(T.truncdiv(slice_id, tiling.slices) * tiling.rows)
        self.slice = index_temp(T.truncmod(slice_id, tiling.slices))
        self.v_begin = index_temp(self.slice * tiling.columns)
        memory = T.alloc_buffer((tiling.num_bytes,), "uint8", scope="shared.dyn", align=128)
        IRBuilder.name("shared", memory)
        self.q = SharedTiles(memory, 0, tiling.q)
        self.states = SharedTiles(memory, self.q.end, tiling.state, tiling.kv_groups)
        self.own_rows = [
            self.warp_row + T.truncdiv(lane, 4) + 8 * h for h in range(tiling.rows_of_thread)
        ]
        self.softmax = OnlineSoftmax(tiling.columns, tiling.rows_of_thread)
        self.scores = products_of(tiling.positions, tiling.rows_of_thread)
        self.logits = Logits(spec, tiling.rows_of_thread, lane)
        self.q_blocks, self.o_blocks = hadamard_blocks(tiling)
        self.pipeline = kv_pipeline(spec, tiling, memory, self.q.end, self.threads, self.slice)
        self.k, self.v, self.scales = self.pipeline.k, self.pipeline.v, self.pipeline.scales
        self.has_codes = tiling.codes is not None and not tiling.codes.is_widened
        self.products = self._products()

    def _products(self) -> TensorCores | MultiplyAdds:
        tiling, operands = self.tiling, (self.tiling, self.q, self.warp_row, self.lane)
        if not tiling.is_tensor:
            return MultiplyAdds(*operands)
        if not self.has_codes:
            return TensorCores(*operands, max_kept=MAX_KEPT, unrolled=1)
        if tiling.codes.codec.bits == 8:
            return CodeTensorCores(*operands, max_kept=MAX_KEPT)
        self.scales = GroupScales(self.pipeline, self.lane, tiling.dtype)
        products = PackedCodeTensorCores(*operands, max_kept=MAX_KEPT)
        products.scales = self.scales
        return products

    def reset(self) -> None:
        """Forget all that was attended to."""
        self.softmax.reset()
        if self.scales:
            self.scales.range.reset()

    def _row_in_group(self, row):
        """Row of the tile -> query head of the KV head; rows past the end repeat the last one."""
        return T.min(self.first_row + row, self.spec.group_size - 1)

    def attend(self, step: DecodeStep, span: Span, begin, end) -> None:
        """Attend to the columns ``begin .. end - 1``, which are of a span."""
        a, spec, tiling, pair = self.a, self.spec, self.tiling, step.pair
        own = a.q_rope_position[pair.sequence]
        own = index_temp(own if span.begin is None else T.min(own, span.last_position))
        first_head = index_temp(pair.head * spec.group_size)
        rope = InlineRope(spec, a.rotary_mode)
        rope.begin(step.length)
        if self.logits.has_alibi:
            for h, row in enumerate(self.own_rows):
                self.logits.set_row(h, first_head + self._row_in_group(row), own)
        factor = temp(a.sm_scale * T.float32(LOG2E))
        chunks = spec.qk_head_dim // self.q.layout.per_chunk

        def q_pointer(row, chunk):
            index = (as_int64(pair.sequence), first_head + self._row_in_group(row))
            return a.q.ptr_to([*index, chunk * self.q.layout.per_chunk])

        def take_q(groups_left: int):
            wait(groups_left)
            sync_block()
            rope.rotate(self.q, 0, tiling.rows, self.block, lambda row: own)
            if self.q_blocks:
                rotate_rows(self.q, 0, tiling.rows, self.q_blocks, self.block)
                sync_block()
            if self.has_codes:
                interleave_columns(self.q, tiling.rows, self.block)
                sync_block()
            self.products.begin()

        def visit(first, tile):
            def k_position(column):
                return span.k_offset + first + column

            rope.rotate(self.k, tile, tiling.positions, self.threads, k_position)
            if self.scales:
                self.scales.begin_tile(first)
            self.products.scores(self.scores, self.k, tile)
            if self.scales:
                self.scales.scale_scores(self.scores, tile, self.lane)
            self.logits.scale(self.scores, factor, k_position)
            with T.If(first + tiling.positions > end), T.Then():
                self.logits.hide(self.scores, lambda h, column: first + column < end)
            self.softmax.update(self.scores)
            if self.scales:
                self.scales.scale_weights(self.scores, self.softmax.output, tile, self.lane)
            self.products.accumulate(self.softmax.output, self.scores, self.v, tile)

        with T.If(begin < end), T.Then():
            sync_block()  # none reads any more what lies there
            for tiles in (self.q, self.k):
                zero_padding(tiles, spec.qk_head_dim, self.block.thread, self.block.num_threads)
            # Rows behind the group's may hold anything: no other row sees them.
            copy_rows(self.q, min(tiling.rows, spec.group_size), chunks, self.block, q_pointer)
            commit()
            self.pipeline.for_tiles(step.rows, begin, end, visit, take_q)

    def store(self, put: Callable, put_lse: Callable) -> None:
        """Merge the partial states of the groups, and pass the rows of all to `put`.

        Parameters
        ----------
        put : ``(query head of the KV head, column, values)`` of `RUN` columns.
        put_lse : ``(query head of the KV head, lse)``
        """
        tiling, threads, states = self.tiling, self.threads.index, self.states
        self.softmax.finish()
        lse, output = self.softmax.lse, self.softmax.output
        if self.scales:
            self.scales.range.finish(output)
            rotate_accumulators(output, self.o_blocks, self.lane)
        sync_block()  # none reads K and V any more
        for h, row in enumerate(self.own_rows):
            with T.unroll(output.shape[0]) as n:
                states.store_pair(threads, row, *self.products.output_pair(output, n, h))
            with T.If(T.truncmod(self.lane, 4) == 0), T.Then():
                states.store_float(threads, row, tiling.columns, lse[h])
        sync_block()
        runs, logs = tiling.columns // RUN, Registers(tiling.kv_groups, F32, "weights")
        sums = Registers(RUN, F32, "sums")
        with T.serial(T.ceildiv(tiling.rows * runs, tiling.num_threads)) as turn:
            item = index_temp(turn * tiling.num_threads + self.block.thread)
            row, column = (
                index_temp(x) for x in (T.truncdiv(item, runs), T.truncmod(item, runs) * RUN)
            )
            head = index_temp(self.first_row + row)
            is_row = T.And(row < tiling.rows, head < self.spec.group_size)
            is_inside = T.And(is_row, self.v_begin + column < self.spec.v_head_dim)
            with T.If(is_inside), T.Then():
                for i in range(tiling.kv_groups):
                    logs[i] = states.load_float(i, row, tiling.columns)
                merged = weigh(logs)
                with T.If(T.And(column == 0, self.slice == 0)), T.Then():
                    put_lse(head, merged)
                sums.fill(T.float32(0))
                for i in range(tiling.kv_groups):
                    values = states.load_floats(i, row, column, RUN)
                    for e in range(RUN):
                        sums[e] = sums[e] + logs[i] * values[e]
                put(head, self.v_begin + column, sums)
