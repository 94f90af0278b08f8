# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads.

A tile is some tokens of a sequence with all their heads, packed and multiplied as in `prefill`. The
positions of a tile are cut as well, so that a single row over a long context uses every thread.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import CausalMask, Span, WholeSequence
from ...signatures import latent
from ...signatures.inputs import AttentionInputs, PagedInputs
from ...spec import KernelSpec
from ..components.kv_operands import operands
from ..components.kv_rows import LatentRows
from ..components.online_softmax import OnlineSoftmax
from ..components.output import Output
from ..components.packed_kv import POSITIONS, PackedKv
from ..components.query_tile import QueryTile, Tiling
from ..components.register_tile import ColumnTiles
from ..components.row_bounds import RowBounds
from ..components.score_tile import ScoreTile
from ..components.tree_mask import TokenTrees, TreeMask
from ..simd import Register, index_temp, wide_temp
from .define import build
from .prefill import attend_positions
from .rotation import rotation_of
from .shared.split_tiles import CutTile, TileWork, emit_cut_tiles
from .shared.tile import SharedTile
from .shared.tiling import SharedStep


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


class _LatentTile:
    """The rows of a tile over some of the positions that they see.

    The heads of one token see the same positions, unless the token is the node of a tree.
    """

    def __init__(self, spec: KernelSpec, ops, a: AttentionInputs):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.mask = a.mask if a.tree is None else TreeMask(a, a.tree, POSITIONS)
        self.one_token = SharedTile(spec, ops, spec.num_qo_heads) if a.tree is None else None
        tiling, min_rows = Tiling.of(spec), self.one_token.num_rows if self.one_token else 0
        tiles = ColumnTiles(ops, tiling.rows, spec.v_head_dim, self.lanes)
        self.state = OnlineSoftmax(tiling.num_blocks, tiling.rows, self.lanes)
        self.rows = QueryTile(spec, ops, a, tiles, self.state, is_stored=False, min_rows=min_rows)
        self.rows.begin_task()
        self.kv = PackedKv(spec, ops, tiles)
        self.scores = ScoreTile(spec, ops, self.rows, tiles)
        self.o = self.rows.o
        if self.one_token:
            self.one_token.o = self.o

    def row_state(self, row):
        """Index of a row's state in `state.row_max` and `state.row_sum`."""
        return self.rows.state(row)

    def run_blocks(
        self, a: AttentionInputs, tile: _SequenceTile, rows: LatentRows, begin, end
    ) -> None:
        """Attend to the blocks of positions ``begin .. end - 1``, from a cleared state."""
        self.mask.begin_sequence(tile.sequence, tile.kv_len)
        last = T.min(end, (tile.end + POSITIONS - 1) // POSITIONS)
        end = index_temp(T.max(begin, last))
        self.rows.begin(tile.first_row + tile.first_token, tile.num_tokens, 0)
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

    @inline
    def _run_tokens(self, a, tile, source, begin, end):
        bounds = T.meta_var(
            RowBounds(
                mask=self.mask,
                span=Span.whole(tile.kv_len, 0),
                group=self.spec.num_qo_heads,
                first_token=tile.first_token,
                last_row=self.rows.num_rows - 1,
                num_rows=tile.num_rows,
                kv_len=tile.kv_len,
            )
        )
        self.rows.begin_span()
        rows, kv, scores = T.meta_var((self.rows, self.kv, self.scores))
        for i in range(begin, end):
            first = i * POSITIONS
            attend_positions(self.mask, source, rows, kv, scores, bounds, first)
        self.rows.end()


def emit_mla(spec: KernelSpec, ops, a: AttentionInputs) -> None:
    """Emit the body for inputs with a `mask`."""
    lengths = WholeSequence(spec, a.length_info, index_temp)
    a = replace(a, lengths=lengths, rope=rotation_of(spec, a))
    if a.tree_order is not None:
        a = replace(a, tree=TokenTrees(spec, a))
        a.tree.begin()

    def begin_task():
        a.rope.begin_task()
        return _LatentTile(spec, ops, a)

    def rows_of(tile):
        first = index_temp(a.page_indptr[tile.sequence])
        last = index_temp(a.page_indptr[tile.sequence + 1] - 1)
        rows = LatentRows(spec, a.pages, a.page_values, first, last, head=0)
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
        emit_mla(spec, operands(spec, spec.kv_dtype), replace(a, mask=CausalMask(1)))

    return build(spec, latent.mla_tree, attend)
