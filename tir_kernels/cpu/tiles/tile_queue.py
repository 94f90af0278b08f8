# SPDX-License-Identifier: Apache-2.0
"""The tiles of query rows of a batch, which tasks take from a queue."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..tasks import Queue


@T.meta_class
class TileQueue:
    """The tiles that a task takes: some tokens of a sequence, for one KV head.

    The heavy, late tiles of a causal triangle come first. A task does::

        tiles.begin()
        while tiles.has_next():
            ...
            tiles.advance()

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments
    queue : Queue
        Its items are the tiles of all KV heads, one sequence after the other.
    max_tokens : int32 expression
        Tokens of a tile.
    singles : Singles, optional
        Sequences that have no tiles.

    Attributes
    ----------
    sequence, head : int32 variables
    first_row, num_rows : int32 variables
        The sequence's rows of Q.
    first_token, num_tokens : int32 variables
        Tokens of the tile, counted from `first_row`.
    """

    def __init__(self, spec: KernelSpec, a, queue: Queue, max_tokens, singles=None):
        self.num_heads, self.a, self.queue = spec.num_kv_heads, a, queue
        self.max_tokens, self.singles = max_tokens, singles
        self.item = T.local_scalar("int64")
        self.first_item = T.local_scalar("int64")  # of the sequence
        self.end_item = T.local_scalar("int64")
        self.sequence = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.first_row = T.local_scalar("int32")
        self.num_rows = T.local_scalar("int32")
        self.first_token = T.local_scalar("int32")
        self.num_tokens = T.local_scalar("int32")

    @inline
    def begin(self):
        """Take the first tile."""
        self.sequence = -1
        self.end_item = T.int64(0)
        self.advance()

    def has_next(self):
        """Whether there is a tile to attend with."""
        return self.sequence < self.a.batch_size

    @inline
    def advance(self):
        """Take the next tile."""
        self.item = self.queue.take()
        while self.item >= self.end_item and self.sequence < self.a.batch_size:
            self.sequence += 1
            if self.sequence < self.a.batch_size:
                self._begin_sequence()
        if self.sequence < self.a.batch_size:
            index = T.cast(self.item - self.first_item, "int32")
            self.head = index % self.num_heads
            tile = self._num_tiles() - 1 - index // self.num_heads
            self.first_token = tile * self.max_tokens
            self.num_tokens = T.min(self.max_tokens, self.num_rows - self.first_token)

    @inline
    def _begin_sequence(self):
        self.first_item = self.end_item
        self.first_row = self.a.query_indptr[self.sequence]
        self.num_rows = self.a.query_indptr[self.sequence + 1] - self.first_row
        self.end_item += T.cast(self.num_heads * self._num_tiles(), "int64")
        if self.singles is not None:
            if self.singles.has(self.sequence):
                self.end_item = self.first_item

    def _num_tiles(self):
        """Tiles of the sequence for each KV head."""
        return (self.num_rows + self.max_tokens - 1) // self.max_tokens
