# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

A unit of work is a tile of a sequence's tokens with all query heads of one KV head. It walks over
tiles of positions: K is transposed and V copied into packed tiles once, and all rows of the unit
multiply with them, a few at a time through the registers. Tiles that no row may see are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import CausalMask, WholeSequence
from ..softmax import HIDDEN, OnlineSoftmax, inverse_total, log_sum
from ..spec import LOG2E, KernelSpec
from .arguments import index_array, page_pool, require_half_conversion, rows_array
from .bf16 import PairOperands
from .columns import chunks, for_columns
from .inline_rope import InlineRope, has_rope
from .matmul_tile import multiply_tile
from .operands import Float32Operands, pack_k
from .rows import PagedRows, RaggedRows
from .simd import F32, Register, broadcast, constant, index_temp, load, ramp, store, temp
from .tasks import num_threads

POSITIONS = 64  # of a tile of K and V
VECTORS = 2  # of a register tile


@dataclass(frozen=True)
class Tiling:
    """How the rows of a unit go through the caches and the registers.

    Parameters
    ----------
    tokens : int
        Tokens of a unit; times the group size, its rows.
    rows : int
        Rows of a register tile.
    """

    tokens: int
    rows: int
    group_size: int

    @property
    def num_blocks(self) -> int:
        """Register tiles of a full unit."""
        return -(-self.tokens * self.group_size // self.rows)

    @staticmethod
    def of(spec: KernelSpec) -> Tiling:
        """Choose so that Q and O of a unit take at most half a megabyte."""
        rows = max(32, min(256, 131072 // (spec.qk_head_dim + spec.v_head_dim)))
        tokens = max(1, min(128, rows // spec.group_size))
        return Tiling(tokens, 8 if spec.target.registers >= 32 else 6, spec.group_size)


class Unit:
    """The buffers of a task and what it does with them for one unit after another.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    """

    def __init__(self, spec: KernelSpec, ops):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.tiling = tiling = Tiling.of(spec)
        self.depth = spec.qk_head_dim // ops.numbers
        rows = tiling.num_blocks * tiling.rows
        self.q = T.alloc_buffer((rows, self.depth), ops.dtype)
        self.k = T.alloc_buffer((self.depth, POSITIONS), ops.dtype)
        self.v = T.alloc_buffer((POSITIONS // ops.numbers, spec.v_head_dim), ops.dtype)
        self.o = T.alloc_buffer((rows, spec.v_head_dim), F32)
        self.rotated_q = T.alloc_buffer((-(-spec.qk_head_dim // 32) * 32,), F32)
        self.scores = T.alloc_buffer((tiling.rows, POSITIONS), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((tiling.rows, POSITIONS // ops.numbers), ops.dtype)
        )
        self.state = OnlineSoftmax(tiling.num_blocks, tiling.rows, self.lanes)

    def run(self, a: SimpleNamespace, step: SimpleNamespace) -> None:
        """Attend and store.

        Parameters
        ----------
        a : the kernel's arguments.
        step : of the unit: `rows` source of K and V, `k_offset` of their positions, `head`, `first_row` of the sequence in Q,
            `num_rows` of it, `first_token` and `num_tokens` of the tile, `kv_len`.
        """
        tiling, group = self.tiling, self.spec.group_size
        num_rows = index_temp(step.num_tokens * group)
        num_blocks = index_temp((num_rows + tiling.rows - 1) // tiling.rows)
        factor = temp(a.sm_scale * T.float32(LOG2E))

        def end_of(row):
            """First position that a row of the unit does not see."""
            token = step.first_token + T.min(row, num_rows - 1) // group
            return a.mask.end(token, step.num_rows, step.kv_len)

        with T.serial(num_blocks * tiling.rows) as row:
            source = index_temp(T.min(row, num_rows - 1))
            token = index_temp(step.first_row + step.first_token + source // group)
            head = index_temp(step.head * group + source % group)
            self.load_q(a, row, token, head, factor)
        with T.serial(num_blocks) as block:
            self.state.reset(block)
        last = index_temp(end_of(num_rows - 1))
        with T.serial((last + POSITIONS - 1) // POSITIONS) as i:
            first = index_temp(i * POSITIONS)
            self.pack(a, step, first)
            with T.serial(num_blocks) as block:
                block_end = index_temp(end_of(block * tiling.rows + tiling.rows - 1))
                with T.If(first < block_end):
                    with T.Then():
                        self.attend(a, block, first, end_of, factor)
        with T.serial(num_rows) as row:
            token = step.first_row + step.first_token + row // group
            self.store_row(a, row, token, step.head * group + row % group)

    def load_q(self, a, row, token, head, factor) -> None:
        """Pack a row of Q and clear its sums."""
        parts, ops = chunks(self.depth, self.lanes), self.ops

        def plain():
            for c in parts:
                q = ops.load_q(a.q, (token, head, c.start), c.lanes, factor)
                store(self.q, (row, c.start), c.lanes, q, ops.dtype)

        def rotated():
            a.rope.set_position(a.q_rope_position[token])
            a.rope.rotate_row(
                lambda column, lanes: load(a.q, (token, head, column), lanes),
                lambda column, lanes, value: store(self.rotated_q, (column,), lanes, value),
            )
            for c in parts:
                q = ops.load_rotated_q(self.rotated_q, c.start, c.lanes, factor)
                store(self.q, (row, c.start), c.lanes, q, ops.dtype)

        a.rope.either(rotated, plain)
        for c in chunks(self.spec.v_head_dim, self.lanes):
            store(self.o, (row, c.start), c.lanes, constant(0.0, c.lanes))

    def pack(self, a, step, first) -> None:
        """Pack a tile of K and V; what lies beyond the sequence is left for the mask to hide."""
        lanes, ops = self.lanes, self.ops
        count = T.min(POSITIONS, step.kv_len - first)
        with T.serial((count + lanes - 1) // lanes) as i:
            pack_k(ops, step.rows, first + i * lanes, self.k, self.depth, i * lanes)
        a.rope.either(
            lambda: a.rope.rotate_tile(ops, self.k, POSITIONS, index_temp(step.k_offset + first)),
            lambda: None,
        )
        ops.pack_v(step.rows, first, step.kv_len, self.v, self.spec.v_head_dim, POSITIONS)

    def attend(self, a, block, first, end_of, factor) -> None:
        """Take a packed tile into the sums of a block of rows."""
        tiling, lanes, ops = self.tiling, self.lanes, self.ops
        first_row = index_temp(block * tiling.rows)

        def score_tile(start, parts):
            multiply_tile(
                lambda i, k: self.q[first_row + i, k],
                lambda k, c: (self.k, (k, start + c.start)),
                self.depth,
                rows=tiling.rows,
                parts=parts,
                start=lambda i, c: constant(0.0, c.lanes),
                finish=lambda i, c, value: store(
                    self.scores, (i, start + c.start), c.lanes,
                    value if ops.scale_in_q else value * broadcast(factor, c.lanes),
                ),
                ops=ops,
            )

        for_columns(POSITIONS, lanes, VECTORS, score_tile)
        with T.If(first + POSITIONS > end_of(first_row)):
            with T.Then():
                with T.serial(tiling.rows) as i:
                    end = index_temp(end_of(first_row + i))
                    for c in chunks(POSITIONS, lanes):
                        seen = a.mask.visible(ramp(first + c.start, lanes), broadcast(end, lanes))
                        score = load(self.scores, (i, c.start), lanes)
                        score = T.Select(seen, score, constant(HIDDEN, lanes))
                        store(self.scores, (i, c.start), lanes, score)
        self.state.update(
            block,
            POSITIONS // lanes,
            lambda i, v: load(self.scores, (i, v * lanes), lanes),
            ops.weight_sink(self.weights),
        )

        def output_tile(start, parts):
            multiply_tile(
                lambda i, k: self.weights[i, k],
                lambda k, c: (self.v, (k, start + c.start)),
                POSITIONS // ops.numbers,
                rows=tiling.rows,
                parts=parts,
                start=lambda i, c: load(self.o, (first_row + i, start + c.start), c.lanes)
                * broadcast(self.state.decay[i], c.lanes),
                finish=lambda i, c, value: store(
                    self.o, (first_row + i, start + c.start), c.lanes, value
                ),
                ops=ops,
            )

        for_columns(self.spec.v_head_dim, lanes, VECTORS, output_tile)

    def store_row(self, a, row, token, head) -> None:
        """Divide a row by its sum and store it."""
        state = self.state.index(row // self.tiling.rows, row % self.tiling.rows)
        total = temp(self.state.total[state])
        inverse = temp(inverse_total(total))
        for c in chunks(self.spec.v_head_dim, self.lanes):
            o = load(self.o, (row, c.start), c.lanes) * broadcast(inverse, c.lanes)
            store(a.o, (token, head, c.start), c.lanes, o)
        T.buffer_store(a.lse, log_sum(self.state.top[state], total), [token, head])


def emit_prefill(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit the body.

    Units are numbered with the heavy, late tiles of a sequence first and dealt to the tasks in
    turn, backwards in every other round, so that tasks get equal shares of a causal triangle.

    Parameters
    ----------
    ops : operands object
    a : the matched arguments by their names; `kv_rows` of it is ``(sequence, head) -> (rows,
        kv_len)``.
    """
    heads, tokens = spec.num_kv_heads, Tiling.of(spec).tokens
    num_tasks = num_threads()
    a.rope = InlineRope(spec, a)
    ops.begin([b for b in (a.q, *a.kv_buffers) if str(b.dtype) == "bfloat16"])
    with ops.scope(), T.parallel(num_tasks) as task:
        unit = Unit(spec, ops)
        a.rope.begin_task()
        round_ = Register(1, "int32", T.int32(0))
        before = Register(1, "int32", T.int32(0))  # units of earlier sequences

        def current():
            """The unit that the task does in this round."""
            turn = T.if_then_else(round_.get() % 2 == 0, task, num_tasks - 1 - task)
            return round_.get() * num_tasks + turn

        with T.serial(a.batch_size) as b:
            first_row = index_temp(a.q_indptr[b])
            num_rows = index_temp(a.q_indptr[b + 1] - first_row)
            num_tiles = index_temp((num_rows + tokens - 1) // tokens)
            with T.While(current() < before.get() + num_tiles * heads):
                index = index_temp(current() - before.get())
                head = index_temp(index % heads)
                first_token = index_temp((num_tiles - 1 - index // heads) * tokens)
                rows, kv_len = a.kv_rows(b, head)
                k_offset = index_temp(a.k_rope_pos_offset[b])
                a.rope.begin_sequence(k_offset + kv_len)
                unit.run(
                    a,
                    SimpleNamespace(
                        rows=rows,
                        kv_len=kv_len,
                        k_offset=k_offset,
                        head=head,
                        first_row=first_row,
                        num_rows=num_rows,
                        first_token=first_token,
                        num_tokens=index_temp(T.min(tokens, num_rows - first_token)),
                    ),
                )
                round_.set(round_.get() + 1)
            before.set(before.get() + num_tiles * heads)


def operands(spec: KernelSpec, kv_dtype: str):
    """Choose the operands for a spec and the type of K and V."""
    target = spec.target
    if target.has_bf16_dot and target.lanes == PairOperands.lanes:
        # Both numbers of a pair have to rotate alike.
        pairs = spec.rope.rotary_dim % 4 == 0 or not has_rope(spec)
        if spec.dtype == kv_dtype == "bfloat16" and pairs:
            return PairOperands()
    return Float32Operands(spec.target.lanes)


def prefill(spec: KernelSpec):
    """Build the kernel `prefill`: attention of several query rows per sequence over its pages.

    Its arguments are, with T rows, B sequences, P pages of the pool and N page table entries

    * q ``[T, Hq, D]``, dtype; q_indptr ``[B + 1]``, int32;
    * pages ``[P, 2, Hk, page, D]``, kv_dtype;
    * page_indptr ``[B + 1]``, page_values ``[N]``, length_info ``[B]``, k_rope_pos_offset ``[B]``
      and q_rope_position ``[T]``, int32; int32 arrays may start at any element;
    * o ``[T, Hq, D]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * causal, rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.

    Parameters
    ----------
    spec : KernelSpec

    Returns
    -------
    tvm.tirx.PrimFunc

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    heads, width = spec.num_qo_heads, spec.qk_head_dim
    ops = operands(spec, spec.kv_dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_prefill(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        batch_size = T.int32()
        num_rows = T.int32()
        num_entries = T.int32()
        emit_paged(
            spec,
            ops,
            SimpleNamespace(
                batch_size=batch_size,
                q=rows_array(q, (num_rows, heads, width), spec.dtype),
                q_indptr=index_array(q_indptr, batch_size + 1),
                pages=page_pool(pages, spec),
                page_indptr=index_array(page_indptr, batch_size + 1),
                page_values=index_array(page_values, num_entries),
                lengths=WholeSequence(spec, length_info, batch_size),
                k_rope_pos_offset=index_array(k_rope_pos_offset, batch_size),
                q_rope_position=index_array(q_rope_position, num_rows),
                o=rows_array(o, (num_rows, heads, width), spec.dtype),
                lse=rows_array(lse, (num_rows, heads), F32),
                mask=CausalMask(causal),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_prefill


def emit_paged(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit `prefill` with rows from pages."""

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)
        rows = PagedRows(
            spec, a.pages, a.page_values, first, first + num_pages - 1,
            head=head, slot_of=a.lengths.slot_of,
        )
        return rows, a.lengths.kv_len(sequence, num_pages)

    a.kv_rows, a.kv_buffers = kv_rows, [a.pages]
    emit_prefill(spec, ops, a)


def emit_ragged(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit `prefill_ragged` with rows from arrays."""

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)
        return RaggedRows(a.k, a.v, first, first + kv_len - 1, head=head), kv_len

    a.kv_rows, a.kv_buffers = kv_rows, [a.k, a.v]
    emit_prefill(spec, ops, a)


def prefill_ragged(spec: KernelSpec):
    """Build the kernel `prefill_ragged`: attention over K and V that are ragged arrays.

    Its arguments are, with T rows of Q and S of K and V in B sequences

    * q ``[T, Hq, Dqk]``, dtype; q_indptr ``[B + 1]``, int32;
    * k ``[S, Hk, Dqk]``, v ``[S, Hk, Dv]``, dtype; kv_indptr ``[B + 1]``, int32;
    * q_rope_position ``[T]``, k_rope_pos_offset ``[B]``, int32; int32 arrays may start at any
      element;
    * o ``[T, Hq, Dv]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * causal, rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.

    Parameters
    ----------
    spec : KernelSpec

    Returns
    -------
    tvm.tirx.PrimFunc

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype)
    num_qo_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
    ops = operands(spec, spec.dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_prefill_ragged(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        k_rope_pos_offset: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        batch_size = T.int32()
        num_rows = T.int32()
        num_columns = T.int32()
        emit_ragged(
            spec,
            ops,
            SimpleNamespace(
                batch_size=batch_size,
                q=rows_array(q, (num_rows, num_qo_heads, spec.qk_head_dim), spec.dtype),
                q_indptr=index_array(q_indptr, batch_size + 1),
                k=rows_array(k, (num_columns, num_kv_heads, spec.qk_head_dim), spec.dtype),
                v=rows_array(v, (num_columns, num_kv_heads, spec.v_head_dim), spec.dtype),
                kv_indptr=index_array(kv_indptr, batch_size + 1),
                q_rope_position=index_array(q_rope_position, num_rows),
                k_rope_pos_offset=index_array(k_rope_pos_offset, batch_size),
                o=rows_array(o, (num_rows, num_qo_heads, spec.v_head_dim), spec.dtype),
                lse=rows_array(lse, (num_rows, num_qo_heads), F32),
                mask=CausalMask(causal),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_prefill_ragged
