# SPDX-License-Identifier: Apache-2.0
"""The walk of a query row over the positions of its sequence: visible spans, and blocks of them.

The loop over KV heads is inside the loop over blocks of positions, so that a page is read from
start to end: the heads of a page are adjacent, and sequential reads are faster (by a fifth, for
pages of 4 KiB per head).

A CPU drops prefetches while its miss queue is full, and a dropped line costs the whole latency when
it is needed. Every line is therefore prefetched several times: one head ahead (the same positions
of the next KV head), half a head ahead (lines of K while V is read, and of V while K is), and a few
rows ahead. On Zen 4 one thread reads a quarter more bytes per second in float32; data that is in
the caches already is processed up to 15 % slower.
"""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.sequence_gap import SequenceGap
from ...spec import KernelSpec
from ...vectors import ramp
from ..isa.simd import broadcast
from ..pages.kv_rows import PagedRows

BLOCK = 64  # positions of a softmax step
STRIP = 16  # rows of V that are read in all their columns before the next ones


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
    following : PagedRows
        K and V that come next, from position `following_first` on.
    """

    def __init__(self, spec: KernelSpec, a, kind: type = PagedRows):
        self.spec, self.page_indptr = spec, a.page_indptr
        for name in (
            *("first_entry", "last_entry", "first_head", "num_heads", "head", "following_head"),
            *("visible", "restart", "begin", "end", "last", "first", "count", "num_hidden"),
            *("next_head", "next_first", "local_head", "following_first"),
        ):
            setattr(self, name, T.local_scalar("int32"))
        table = a.pages, a.page_ids, self.first_entry, self.last_entry
        self.rows = kind(spec, *table, head=self.head)
        self.following = kind(spec, *table, head=self.following_head)

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

        The first one is aligned to a strip or a page: some may be hidden. The positions up to
        `last` are read next, so they are prefetched.
        """
        self.visible = span.begin
        self.restart = span.begin // STRIP * STRIP
        self.begin = T.max(begin, self.restart)
        self.end = T.max(self.begin, T.min(end, span.end))
        self.last = T.max(self.begin, T.min(last, span.end))

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
        # Behind the last position, prefetches take the next heads of the pages.
        is_last = T.meta_var(self.first + BLOCK >= self.last)
        self.next_first = T.if_then_else(is_last, self.restart, self.first + BLOCK)
        self.next_head = T.if_then_else(is_last, self.num_heads, 0)

    @inline
    def begin_head(self, local_head):
        """Select a local head in the same block."""
        last_head = T.meta_var(self.spec.num_kv_heads - 1)
        is_last = T.meta_var(local_head == self.num_heads - 1)
        self.local_head = local_head
        self.head = T.min(self.first_head + local_head, last_head)
        following = T.meta_var(T.if_then_else(is_last, self.next_head, local_head + 1))
        self.following_head = T.min(self.first_head + following, last_head)
        self.following_first = T.if_then_else(is_last, self.next_first, self.first)

    @property
    def hides_some(self):
        """Whether the row does not see all of a block's columns."""
        return T.Or(self.count < BLOCK, self.num_hidden > 0)

    def sees(self, column, lanes: int):
        """Whether the row sees each of `lanes` columns of the block."""
        columns = ramp(column, lanes)
        is_held = columns < broadcast(self.count, lanes)
        return T.And(is_held, columns >= broadcast(self.num_hidden, lanes))
