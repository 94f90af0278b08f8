# SPDX-License-Identifier: Apache-2.0
"""The division of recurrent states among tasks: heads, or tiles where heads are few."""

from tvm.script import tirx as T

from ...script import inline
from ..tasks import Splits, num_threads

FEW_TOKENS = 10  # of a sequence: more are worth a copy of the state to the L1 cache
STATE_TOKENS = 3  # that take as long as to read and write the state
SPLIT_TOKENS = 8 * (STATE_TOKENS + 1)  # of a head: as much as eight heads take that decode
PREFILL_HEADS = 4  # of a thread, or tasks share heads, so that they finish together


@T.meta_class
class StateWork:
    """The items of all sequences, in order, and their splits by cost.

    A split has items that follow each other. Where two tasks took turns, each would ask the memory
    for what the other one has.

    Parameters
    ----------
    num_heads, tiles : int
        Heads of a sequence, and tiles of a head.
    segment_indptr, row_indptr : Buffer, int32
    num_sequences, num_tokens : int32 expression

    Attributes
    ----------
    num_parts : int32
        Items of a head: one, or its tiles.
    num_tasks : int32
    """

    def __init__(self, num_heads, tiles, segment_indptr, row_indptr, num_sequences, num_tokens):
        self.num_heads, self.tiles = num_heads, tiles
        self.segment_indptr, self.row_indptr = segment_indptr, row_indptr
        self.num_sequences, self.num_tokens = num_sequences, num_tokens
        self.num_parts, self.num_tasks = (T.local_scalar("int32") for _ in range(2))
        self.total = T.local_scalar("int64")
        self.splits = Splits(self.total, self.num_tasks)

    @inline
    def begin(self, is_small):
        """Choose the items and cut them; `is_small`: for one task."""
        heads = T.meta_var(T.cast(self.num_sequences, "int64") * self.num_heads)
        has_few_tokens = T.meta_var(self.num_tokens < FEW_TOKENS * self.num_sequences)
        threads = T.cast(num_threads(), "int64")
        wanted = T.meta_var(T.if_then_else(has_few_tokens, threads, threads * PREFILL_HEADS))
        self.num_parts = T.if_then_else(heads >= wanted, 1, self.tiles)
        most = T.meta_var(T.min(heads * self.num_parts, threads))
        self.num_tasks = T.if_then_else(is_small, 1, T.cast(most, "int32"))
        self.total = self.first(self.num_sequences)
        self.splits.begin(SPLIT_TOKENS)

    @property
    def per_sequence(self):
        """Return the number of items of a sequence."""
        return self.num_parts * self.num_heads

    def row(self, sequence):
        """Return the first token of a sequence."""
        return self.row_indptr[self.segment_indptr[sequence]]

    def first(self, sequence):
        """Return the cost of all items before a sequence."""
        tokens = self.row(sequence) + T.cast(sequence, "int64") * STATE_TOKENS
        return tokens * self.per_sequence


@T.meta_class
class StateItems:
    """The item that a task is at, one after another.

    Attributes
    ----------
    sequence, item : int32
        The item of the sequence: a head, or a tile of a head.
    """

    def __init__(self, work: StateWork):
        self.work = work
        self.sequence, self.item = (T.local_scalar("int32") for _ in range(2))
        self.position, self.cost, self.end = (T.local_scalar("int64") for _ in range(3))

    @inline
    def begin(self, split):
        """Find the first item that begins in a split."""
        work = T.meta_var(self.work)
        self.position = work.splits.first_item(split)
        self.end = work.splits.first_item(split + 1)
        self.sequence = 0
        while work.first(self.sequence + 1) <= self.position:
            self.sequence += 1
        self._enter()
        before = work.first(self.sequence)
        self.item = T.cast(T.ceildiv(self.position - before, self.cost), "int32")
        self.position = before + self.item * self.cost
        self._leave()

    @property
    def num_tokens(self):
        """Return the tokens of the sequence."""
        return self.cost - STATE_TOKENS

    def has_next(self):
        """Whether the split has another item."""
        return self.position < self.end

    @inline
    def advance(self):
        """Advance to the next item."""
        self.position += self.cost
        self.item += 1
        self._leave()

    @inline
    def _leave(self):
        """Advance to the next sequence after the last item of one."""
        if self.item == self.work.per_sequence:
            self.item = 0
            self.sequence += 1
            if self.sequence < self.work.num_sequences:
                self._enter()

    @inline
    def _enter(self):
        tokens = T.meta_var(self.work.row(self.sequence + 1) - self.work.row(self.sequence))
        self.cost = T.cast(tokens + STATE_TOKENS, "int64")
