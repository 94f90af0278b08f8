# SPDX-License-Identifier: Apache-2.0
"""Few tiles of rows, with the columns that each sees split among the blocks that a GPU holds.

How many blocks split a tile follows from the shapes of the arguments: nothing is planned.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...signatures.inputs import AttentionInputs
from ...spec import KernelSpec
from ..components.kv_rows import as_int64
from ..emit import I32, WARP, index_temp, launch
from ..launcher import resident_blocks
from ..splits.partial_states import MERGED_ROWS, MIN_BLOCKS_OF_MERGE, PartialStates
from ..tiles.tiling import Tiling
from .query_tile import QueryTile

MIN_COLUMNS = 256  # that a block takes: loading Q, keeping states and merging them costs as much


def splits_of(tiling: Tiling, num_tiles, num_positions):
    """Return how many blocks split the columns of each tile, at least one.

    Parameters
    ----------
    tiling : Tiling
    num_tiles : int32 expression
    num_positions : integer expression
        No sequence has more of them.
    """
    resident = resident_blocks(tiling.num_bytes, tiling.min_blocks)
    max_splits = T.cast(T.truncdiv(num_positions + MIN_COLUMNS - 1, MIN_COLUMNS), I32)
    splits = T.max(T.min(T.truncdiv(resident, T.max(num_tiles, 1)), max_splits), 1)
    return T.bind(splits, var=tirx.Var("splits", I32))


class FixedSplitStates(PartialStates):
    """A state of each row for each block that splits its columns.

    Parameters
    ----------
    spec : KernelSpec
    splits : int32 expression
        With 1, blocks see all and there is no state.
    num_rows : int32 expression
        Of Q.
    """

    def __init__(self, spec: KernelSpec, splits, num_rows):
        self.splits = splits
        num_states = T.if_then_else(splits > 1, splits, 0)
        super().__init__(spec, (num_states, T.cast(num_rows, I32), spec.num_qo_heads))

    def launch_merge(self, a: AttentionInputs, num_rows) -> None:
        """Merge the states of the rows ``0 .. num_rows - 1``; `num_rows` is on the device."""
        blocks = T.ceildiv(T.cast(a.q.shape[0], I32) * self.spec.num_qo_heads, MERGED_ROWS)
        with T.If(self.splits > 1), T.Then():
            with launch([blocks], MERGED_ROWS * WARP, MIN_BLOCKS_OF_MERGE) as ((block,), thread):
                lane = index_temp(T.truncmod(thread, WARP))
                at = index_temp(block * MERGED_ROWS + T.truncdiv(thread, WARP))
                row = index_temp(T.truncdiv(at, self.spec.num_qo_heads))
                head = index_temp(T.truncmod(at, self.spec.num_qo_heads))
                with T.If(row < num_rows()), T.Then():
                    output = as_int64(row), head
                    self.merge(a, lambda i: (i, *output), self.splits, output, lane)


class FixedSplitTile(QueryTile):
    """Per-block state for one split of a tile's visible positions, with a fixed step."""

    def _split_of(self, start, end) -> tuple:
        positions = self.tiling.positions
        start = index_temp(T.min(start, end))  # it may be as large as numbers are
        tiles = T.ceildiv(end - start, positions)
        size = T.truncdiv(tiles + self.step.states.splits - 1, self.step.states.splits)
        size = index_temp(T.max(size * positions, MIN_COLUMNS))
        own = index_temp(start + self.step.split * size)
        return own, index_temp(T.min(end, own + size))

    def _state_index(self, row) -> tuple:
        return (self.step.split, *self.output_row(row))
