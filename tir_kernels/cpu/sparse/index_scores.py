# SPDX-License-Identifier: Apache-2.0
"""Scores of positions by index keys: tiles of a few rows of Q, whose positions tasks share."""

from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...signatures.inputs import PagedInputs
from ...spec import KernelSpec
from ..pages.kv_rows import LatentRows
from ..rotation import NoRotation
from ..tasks import TASKS, cut
from ..tiles.kv_tile import POSITIONS
from ..tiles.lane_kv import LaneKv
from ..tiles.lane_products import LaneProducts
from ..tiles.lane_rows import LaneQueries, LaneView, RowBlocks

TILE_ROWS = 256  # rows of Q, with all their heads, that share packed keys
SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


def tile_tokens(spec: KernelSpec) -> int:
    """Tokens of a tile."""
    return max(1, min(64, TILE_ROWS // spec.num_qo_heads))


@T.meta_class
class TokenTile:
    """Some tokens of a sequence, with all their index heads.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs

    Attributes
    ----------
    first, num_tokens : int32
        The rows of Q of the tokens.
    first_page, last_page : int32
        Entries of the sequence in the page table.
    end : int32
        Positions that the last token sees.
    """

    def __init__(self, spec: KernelSpec, a: PagedInputs):
        self.spec, self.a, self.num_heads = spec, a, spec.num_qo_heads
        self.first, self.num_tokens, self.end = (T.local_scalar("int32") for _ in range(3))
        self.first_page, self.last_page = T.local_scalar("int32"), T.local_scalar("int32")
        self.kv_len, self.num_rows_of_sequence = T.local_scalar("int32"), T.local_scalar("int32")

    @inline
    def begin_sequence(self, sequence):
        """Load the rows and pages of a sequence."""
        a = T.meta_var(self.a)
        self.num_rows_of_sequence = a.query_indptr[sequence + 1] - a.query_indptr[sequence]
        self.first_page = a.page_indptr[sequence]
        self.last_page = a.page_indptr[sequence + 1] - 1
        full = (self.last_page - self.first_page) * self.spec.page_size
        self.kv_len = full + a.lengths[sequence]

    @property
    def count(self):
        """Return the number of tiles of the sequence."""
        most = tile_tokens(self.spec)
        return (self.num_rows_of_sequence + most - 1) // most

    @inline
    def begin(self, sequence, index):
        """Select a tile of the sequence."""
        most, num_rows = T.meta_var((tile_tokens(self.spec), self.num_rows_of_sequence))
        self.first = self.a.query_indptr[sequence] + index * most
        self.num_tokens = T.min(most, num_rows - index * most)
        self.end = self.kv_len - num_rows + index * most + self.num_tokens

    @property
    def num_rows(self):
        """Return the rows of the tile: tokens times heads."""
        return self.num_tokens * self.num_heads

    @property
    def is_large(self):
        """Return whether to score its positions is worth a launch."""
        work = T.cast(self.num_rows, "int64") * self.end * self.spec.qk_head_dim
        return work > SERIAL_WORK

    def token(self, row):
        """The row of Q of a row of the tile."""
        return self.first + row // self.num_heads

    def query_head(self, row):
        """The index head of a row of the tile."""
        return row % self.num_heads

    def num_seen(self, token):
        """Positions that a token of the tile sees, counted from its first one."""
        return self.end - self.num_tokens + token + 1


@inline
def score_tile(
    spec: KernelSpec, a: PagedInputs, ops, tile: TokenTile, num_tasks, multiple, make_sink: Callable
):
    """Score all positions of a tile's sequence up to its last token's.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With views of the pages.
    ops : operands object
    tile : TokenTile
    num_tasks : int32 expression
    multiple : int or int32 expression
        Positions that one task scores are a multiple of it.
    make_sink : callable
        Returns what takes the scores of a task. Its ``begin(task, tile)`` comes first;
        ``add(scores)`` takes those of a block of rows and a few positions, and ``take(task, tile,
        first, num_seen)`` follows for all rows.
    """
    count = (tile.end + multiple - 1) // multiple
    max_rows = T.meta_var(tile_tokens(spec) * spec.num_qo_heads)
    for task in T.parallel(num_tasks, annotations=TASKS):
        rope = T.meta_var(NoRotation())
        ops.begin_task()
        table = T.meta_var((tile.first_page, tile.last_page))
        rows = T.meta_var(LatentRows(spec, a.pages, a.page_ids, *table, head=0))
        q = LaneQueries(spec, ops, max_rows, a, rope, a.sm_scale)
        kv = LaneKv(spec, ops, rows)
        products, blocks = LaneProducts(spec, ops), RowBlocks(spec, ops)
        sink = T.meta_var(make_sink())

        @inline
        def score(block, first, num_seen):
            view = T.meta_var(LaneView(block, first, num_seen))
            scores = T.meta_var(products.qk(q, kv, view))  # S^T = K Q^T
            sink.add(scores)

        q.begin_task()
        kv.begin_task()
        blocks.begin(tile.num_rows)
        for vector in range(blocks.num_vectors):
            q.load(vector, tile)
        sink.begin(task, tile)
        begin = cut(count, task, num_tasks) * multiple
        end = T.min(cut(count, task + 1, num_tasks) * multiple, tile.end)
        for i in range((end - begin + POSITIONS - 1) // POSITIONS):
            first = begin + i * POSITIONS
            num_seen = T.min(POSITIONS, end - first)
            kv.pack(first, tile.end, rope, 0)
            for index in range(blocks.count):
                if index < blocks.num_wide:
                    score(blocks.wide(index), first, num_seen)
                else:
                    score(blocks.narrow(index), first, num_seen)
            sink.take(task, tile, first, num_seen)
        ops.end_task()
