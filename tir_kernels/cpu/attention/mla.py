# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads.

A tile is some tokens of a sequence with all their heads, packed and multiplied as in `prefill`. The
positions of a tile are cut as well, so that a single row over a long context uses every thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask, Span, WholeSequence
from ...signatures import latent
from ...signatures.inputs import AttentionInputs, PagedInputs
from ...spec import LOG2E, KernelSpec
from ..components.output import Output
from ..simd import Register, index_temp, temp, wide_temp
from .define import build
from .kv_operands import operands
from .kv_rows import LatentRows
from .prefill.row_bounds import RowBounds
from .prefill.tile import PrefillTile
from .prefill.tiling import POSITIONS, Tiling
from .rotation import rotation_of
from .shared.split_tiles import CutTile, TileWork, emit_cut_tiles
from .shared.tile import SharedTile
from .shared.tiling import SharedStep
from .tree_mask import TreeMask


@dataclass(frozen=True, kw_only=True)
class _SequenceTile(CutTile):
    """Tokens of a sequence with all their heads; a tile that sees nothing costs one block.

    Parameters
    ----------
    sequence : int32 expression
    first_row, num_rows : int32 expressions
        The sequence's rows of Q.
    first_token : int32 expression
        Counted from `first_row`.
    kv_len : int32 expression
        Positions of the sequence.
    end : int32 expression
        First position that no token sees.
    """

    sequence: object
    first_row: object
    num_rows: object
    first_token: object
    kv_len: object
    end: object


def _for_tiles(spec: KernelSpec, a: AttentionInputs, body: Callable[[_SequenceTile], None]):
    """Emit ``body(tile)`` for every tile of the batch; returns the cost of all."""
    tokens = Tiling.of(spec).tokens
    before = Register(1, "int64", T.int64(0))
    with T.serial(a.batch_size) as b:
        first_row = index_temp(a.q_indptr[b])
        num_rows = index_temp(a.q_indptr[b + 1] - first_row)
        num_pages = index_temp(a.page_indptr[b + 1] - a.page_indptr[b])
        kv_len = a.lengths.kv_len(b, num_pages)
        with T.serial((num_rows + tokens - 1) // tokens) as i:
            first_token = index_temp(i * tokens)
            num_tokens = index_temp(T.min(tokens, num_rows - first_token))
            end = index_temp(a.mask.end(first_token + num_tokens - 1, num_rows, kv_len))
            num_blocks = T.max((end + POSITIONS - 1) // POSITIONS, 1)
            cost = wide_temp(T.cast(num_blocks, "int64") * num_tokens)
            body(
                _SequenceTile(
                    sequence=b,
                    first_row=first_row,
                    num_rows=num_rows,
                    first_token=first_token,
                    num_tokens=num_tokens,
                    kv_len=kv_len,
                    end=end,
                    before=wide_temp(before.get()),
                    cost=cost,
                )
            )
            before.set(before.get() + cost)
    return wide_temp(before.get())


class _LatentTile(PrefillTile):
    """The rows of a tile over some of the positions that they see.

    The heads of one token see the same positions, unless the token is the node of a tree.
    """

    def __init__(self, spec: KernelSpec, ops, mask: CausalMask):
        self.one_token = None
        if not isinstance(mask, TreeMask):
            self.one_token = SharedTile(spec, ops, spec.num_qo_heads)
        super().__init__(spec, ops, self.one_token.num_rows if self.one_token else 0)
        if self.one_token:
            self.one_token.o = self.o

    def row_state(self, row):
        """Index of a row's state in `state.row_max` and `state.row_sum`."""
        return self.state.index(row // self.tiling.rows, row % self.tiling.rows)

    def run_blocks(
        self, a: AttentionInputs, tile: _SequenceTile, rows: LatentRows, begin, end
    ) -> None:
        """Attend to the blocks of positions ``begin .. end - 1``, from a cleared state."""
        last = T.min(end, (tile.end + POSITIONS - 1) // POSITIONS)
        end = index_temp(T.max(begin, last))
        if not self.one_token:
            self._run_tokens(a, tile, rows, begin, end)
            return
        with T.If(tile.num_tokens == 1):
            with T.Then():
                self._run_token(a, tile, rows, begin, end)
            with T.Else():
                self._run_tokens(a, tile, rows, begin, end)

    def _run_token(self, a, tile: _SequenceTile, rows: LatentRows, begin, end) -> None:
        """Attend where all rows see the same."""
        token = index_temp(tile.first_row + tile.first_token)
        step = SharedStep(
            num_rows=T.int32(self.spec.num_qo_heads),
            row_of=lambda head: (token, head),
            kv_len=tile.end,
            begin=begin,
            end=end,
            k_offset=0,
        )
        self.one_token.run(a, rows, step)
        state = self.one_token.state
        with T.serial(self.spec.num_qo_heads) as head:
            row = index_temp(self.row_state(head))
            T.buffer_store(self.state.row_max, state.row_max[self.one_token.row_state(head)], [row])
            T.buffer_store(self.state.row_sum, state.row_sum[self.one_token.row_state(head)], [row])

    def _run_tokens(self, a, tile: _SequenceTile, rows: LatentRows, begin, end) -> None:
        tiling, group = self.tiling, self.spec.num_qo_heads
        num_rows = index_temp(tile.num_tokens * group)
        num_blocks = index_temp((num_rows + tiling.rows - 1) // tiling.rows)
        factor = temp(a.sm_scale * T.float32(LOG2E))

        def end_of(row):
            token = tile.first_token + T.min(row, num_rows - 1) // group
            return a.mask.end(token, tile.num_rows, tile.kv_len)

        with T.serial(num_blocks * tiling.rows) as row:
            source = index_temp(T.min(row, num_rows - 1))
            token = index_temp(tile.first_row + tile.first_token + source // group)
            self.load_q(a, row, token, index_temp(source % group), factor)
        with T.serial(num_blocks) as block:
            self.state.reset(block)
        span = Span.whole(tile.kv_len, 0)
        bounds = RowBounds(a.mask, span, end_of, None)
        with T.serial(begin, end) as i:
            first = index_temp(i * POSITIONS)
            self.kv.pack(a, rows, first, span)
            self.attend(a, first, num_blocks, bounds, factor)


def emit_mla(spec: KernelSpec, ops, a: AttentionInputs) -> None:
    """Emit the body for inputs with a `mask`."""
    lengths = WholeSequence(spec, a.length_info, index_temp)
    a = replace(a, lengths=lengths, rope=rotation_of(spec, a))
    a.mask.prepare(a)

    def begin_task():
        worker = _LatentTile(spec, ops, a.mask)
        a.rope.begin_task()
        a.mask.begin_task()
        return worker

    def rows_of(tile):
        first = index_temp(a.page_indptr[tile.sequence])
        last = index_temp(a.page_indptr[tile.sequence + 1] - 1)
        rows = LatentRows(spec, a.pages, a.page_values, first, last, head=0)
        a.mask.begin_sequence(tile.sequence, tile.kv_len)
        return rows

    def at(tile, row):
        group = spec.num_qo_heads
        return tile.first_row + tile.first_token + row // group, row % group

    tiles = TileWork(
        group=spec.num_qo_heads,
        positions=POSITIONS,
        for_tiles=functools.partial(_for_tiles, spec, a),
        begin_task=begin_task,
        rows_of=rows_of,
        at=at,
        output=lambda: Output(spec, a.o, a.lse),
    )
    emit_cut_tiles(spec, ops, a, tiles)


def mla_prefill(spec: KernelSpec):
    """Build the kernel `mla_prefill`; its arguments are those of `signatures.latent.mla_prefill`.

    The spec is of kind "mla".
    """

    def attend(a: PagedInputs) -> None:
        emit_mla(spec, operands(spec, spec.kv_dtype), replace(a, mask=CausalMask(a.causal)))

    return build(spec, latent.mla_prefill, attend)


def mla_tree(spec: KernelSpec):
    """Build the kernel `mla_tree`; its arguments are those of `signatures.latent.mla_tree`."""

    def attend(a: PagedInputs) -> None:
        emit_mla(spec, operands(spec, spec.kv_dtype), replace(a, mask=TreeMask(a, POSITIONS)))

    return build(spec, latent.mla_tree, attend)
