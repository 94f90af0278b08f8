# SPDX-License-Identifier: Apache-2.0
"""The walk of a query row over the positions of its sequence, from its pages down to tiles.

Ranges of positions nest::

    segment   pages of a sequence, whose state is computed by itself (`page_schedule`)
      span    positions of a segment that the row sees: all, or those on a side of a gap
        block   `BLOCK` positions of a span: a step of the softmax
          tile    positions whose pages are looked up together: of K as many as are multiplied
                  at once, of V `TILE` or, where pages are smaller, those of a page

The loop over KV heads is inside the loop over blocks, so that a page is read from start to end: the
heads of a page are adjacent, and sequential reads are faster (by a fifth, for pages of 4 KiB per
head).
"""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.sequence_gap import SequenceGap
from ...spec import KernelSpec
from ...vectors import ramp
from ..isa.simd import broadcast
from ..pages.kv_rows import PagedRows
from .prefetch import NextRows

BLOCK = 64  # positions of a softmax step
TILE = 16  # positions of V that are read in all their columns before the next ones


@T.meta_class
class VisibleSpans:
    """The positions that the only row of a sequence sees: one span, or two around a gap.

    Between steps a sequence with a gap holds no more than its window, so its row sees all of that.

    Parameters
    ----------
    a : the kernel's arguments, with `mask` and `sequences`.

    Attributes
    ----------
    begin, end : int32
        Positions of the span.
    k_offset : int32
        RoPE position of column 0, if the span reached down to it.
    """

    def __init__(self, a):
        self.mask, self.k_offsets = a.mask, a.first_positions
        self.kv_len, self.first_position = T.local_scalar("int32"), T.local_scalar("int32")
        if self.mask.has_window:
            self.q_position = T.local_scalar("int32")
        self.gap, self.k_offset = SequenceGap(a.sequences), T.local_scalar("int32")
        self.begin, self.end = T.local_scalar("int32"), T.local_scalar("int32")

    @inline
    def begin_sequence(self, sequence, kv_len, q_position):
        """Load a sequence whose pages hold `kv_len` positions, and its row."""
        self.kv_len = kv_len
        if self.mask.has_window:
            self.q_position = q_position
        self.first_position = self.k_offsets[sequence]
        self.mask.begin_sequence(sequence, kv_len)
        self.gap.begin(sequence)

    @property
    def count(self):
        """Return the number of spans of the sequence: the window, then the sinks."""
        return self.gap.num_spans

    @property
    def length(self):
        """Positions of the sequence, those before its first page included."""
        return self.first_position + self.kv_len - self.gap.num_dropped

    @inline
    def take(self, i):
        """Take a span."""
        span = T.meta_var(self.gap.span(i, self.kv_len, self.first_position))
        self.end = span.end
        self.k_offset = span.k_offset
        if self.mask.has_window:
            mask = T.meta_var(self.mask.of_sequence(self.first_position, 0))
            self.begin = mask.begin_of_single(self.kv_len, self.q_position)
        elif span.begin is not None:
            self.begin = span.begin
        else:
            self.begin = 0


@T.meta_class
class KvBlocks:
    """Blocks of positions of a sequence, each of which some KV heads take, its local heads.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments: `pages` and their table.
    kind : type
        What finds rows of K and V by their positions.

    Attributes
    ----------
    first, count : int32
        First position of the block, and how many it has.
    num_hidden : int32
        Those at its start that the row does not see.
    local_head : int32
    rows : PagedRows
        K and V of the local head.
    next : NextRows
        K and V that come next.
    """

    def __init__(self, spec: KernelSpec, a, kind: type = PagedRows):
        self.spec, self.page_indptr = spec, a.page_indptr
        for name in (
            *("first_entry", "last_entry", "first_head", "num_heads", "head", "local_head"),
            *("visible", "restart", "begin", "end", "first", "count", "num_hidden"),
        ):
            setattr(self, name, T.local_scalar("int32"))
        table = a.pages, a.page_ids, self.first_entry, self.last_entry
        self.rows = kind(spec, *table, head=self.head)
        self.next = NextRows(self, lambda head: kind(spec, *table, head=head))

    @inline
    def begin_pair(self, sequence, first_head, num_heads):
        """Select some heads of a sequence."""
        self.first_entry = self.page_indptr[sequence]
        self.last_entry = self.page_indptr[sequence + 1] - 1
        self.first_head = first_head
        self.num_heads = num_heads

    @inline
    def begin_span(self, span, begin, end, last):
        """Select the positions of a span that are in ``begin .. end - 1``.

        The first one is aligned to a tile or a page: some may be hidden. The positions up to `last`
        are read next.
        """
        self.visible = span.begin
        self.restart = span.begin // TILE * TILE
        self.begin = T.max(begin, self.restart)
        self.end = T.max(self.begin, T.min(end, span.end))
        self.next.begin_span(T.max(self.begin, T.min(last, span.end)))

    @property
    def num_blocks(self):
        """Return the number of blocks of the span."""
        return (self.end - self.begin + BLOCK - 1) // BLOCK

    @inline
    def begin_block(self, i):
        """Select a block of the span."""
        self.first = self.begin + i * BLOCK
        self.count = T.min(BLOCK, self.end - self.first)
        self.num_hidden = self.visible - self.first
        self.next.begin_block(self.first + BLOCK)

    @inline
    def begin_head(self, local_head):
        """Select a local head in the same block."""
        self.local_head = local_head
        self.head = T.min(self.first_head + local_head, self.spec.num_kv_heads - 1)
        self.next.begin_head(local_head)

    @property
    def hides_some(self):
        """Whether the row does not see all of a block's columns."""
        return T.Or(self.count < BLOCK, self.num_hidden > 0)

    def sees(self, column, lanes: int):
        """Whether the row sees each of `lanes` columns of the block."""
        columns = ramp(column, lanes)
        is_held = columns < broadcast(self.count, lanes)
        return T.And(is_held, columns >= broadcast(self.num_hidden, lanes))
