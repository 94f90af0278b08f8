# SPDX-License-Identifier: Apache-2.0
"""Visibility of positions, and the sequences that `lengths` describes, at parse time.

A skeleton asks for lengths, slots and visible columns and knows nothing else about them, so a new
kind of window is a new object here and leaves the skeletons alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tvm.script import tirx as T

from ..signatures.inputs import Lengths, RaggedInputs
from ..vectors import broadcast, ramp

NO_LIMIT = (1 << 31) - 1


class WholeSequence:
    """Lengths where ``lengths[b]`` is the number of valid slots in the last page of b."""

    has_gaps = False

    def __init__(self, spec, lengths, index_temp: Callable):
        self.page_size, self.info, self.index_temp = spec.page_size, lengths, index_temp

    def kv_len(self, sequence, num_pages):
        """Positions that `sequence`, which has `num_pages` pages, holds."""
        length = (num_pages - 1) * self.page_size + self.info[sequence]
        return self.index_temp(T.if_then_else(num_pages > 0, length, 0))

    def gap(self, sequence) -> NoGap | Gap:
        """Return what `sequence` has dropped: nothing."""
        return NoGap()


class RaggedSequence(WholeSequence):
    """Lengths of sequences whose K and V are rows of the call."""

    def __init__(self):
        pass

    def kv_len(self, sequence, num_rows):
        """Positions that `sequence`, which has `num_rows` rows of K and V, holds."""
        return num_rows


class NoGap:
    """The gap of a sequence that keeps all of its positions: there is none."""

    num_spans = 1
    num_dropped = 0

    def span(self, i, kv_len, k_offset) -> Span:
        """Return the only span: all columns."""
        return Span(None, kv_len, k_offset, None, None, is_last=T.bool(True))


@dataclass(frozen=True)
class Gap:
    """The slots ``sinks .. begin - 1`` of its pages that a sequence with a window has dropped.

    Parameters
    ----------
    sinks, begin : int32 expressions
    back : int32 expression
        Positions that a row sees besides the sinks and itself, those right before it.
    index_temp : callable
        Materialises an int32 value.
    """

    sinks: object
    begin: object
    back: object
    index_temp: Callable

    @property
    def num_spans(self):
        """Return the number of spans to look at."""
        return T.if_then_else(self.sinks > 0, 2, 1)

    @property
    def num_dropped(self):
        """Return the number of positions that the sequence has dropped."""
        return self.begin - self.sinks

    def span(self, i, kv_len, k_offset) -> Span:
        """Return span i: the columns after the gap first, then the sinks.

        Every row sees the sinks right before what it sees of the others, so for them the rows of a
        chunk that is longer than the window all stand at its end.
        """

        def choose(window, sinks):
            return self.index_temp(T.if_then_else(i == 0, window, sinks))

        return Span(
            begin=choose(self.begin, 0),
            end=choose(kv_len, T.min(self.sinks, kv_len)),
            k_offset=choose(k_offset + self.sinks - self.begin, k_offset),
            back=choose(self.back, NO_LIMIT),
            last_position=choose(NO_LIMIT, self.sinks + self.back),
            is_last=i == self.num_spans - 1,
        )


@dataclass(frozen=True)
class Span:
    """Columns ``begin .. end - 1`` of a sequence, all that a pass over its pages looks at.

    Parameters
    ----------
    begin, end : int32 expressions
        A `begin` of None: all columns of a sequence that has dropped none.
    k_offset : int32 expression
        RoPE position of column 0, if the span reached down to it.
    back : int32 expression
        A row sees as many columns before its own; None without `begin`.
    last_position : int32 expression
        RoPE positions of rows beyond it are taken for it; None without `begin`.
    is_last : bool expression
        Whether no span of the sequence follows.
    """

    begin: object
    end: object
    k_offset: object
    back: object
    last_position: object
    is_last: object

    def first_seen(self, own):
        """The first column that the row at column `own` sees, where there is a `begin`.

        A row before column 0 sees nothing; without a limit, its first column would wrap around.
        """
        return T.max(self.begin, T.max(own, 0) - self.back)


class GappedSequence(WholeSequence):
    """Lengths of sequences that may have dropped positions behind their first ones.

    Parameters
    ----------
    a : the kernel's arguments, of them `lengths`: with `Lengths.WINDOWS` rows of B numbers

        * slots in use of the last page; this row may be the only one;
        * the slot, counted from the first page, behind the dropped positions;
        * the number of sinks before them;
        * positions that a row sees besides these and itself; without this row: all.

        With `Lengths.MATRIX` the first three rows as a matrix. Slots between sinks and the second
        number hold nothing.
    """

    has_gaps = True

    def __init__(self, spec, a, index_temp: Callable):
        self.batch_size = a.batch_size
        self.matrix = a.lengths if a.length_form is Lengths.MATRIX else None
        super().__init__(spec, None if self.matrix is not None else a.lengths, index_temp)
        if self.matrix is None:
            size = self.info.shape[0]
            known = T.Or(size == 3 * a.batch_size, size == 4 * a.batch_size)
            message = "lengths must have 1, 3 or 4 numbers for each sequence"
            with T.Assert(T.Or(size == a.batch_size, known), message, "ValueError"):
                T.evaluate(0)

    def _number(self, row: int, sequence, default):
        if self.matrix is not None:
            return self.matrix[row, sequence] if row < 3 else default
        if row == 0:
            return self.info[sequence]
        has_row = self.info.shape[0] > row * self.batch_size
        return T.if_then_else(has_row, self.info[row * self.batch_size + sequence], default)

    def kv_len(self, sequence, num_pages):
        """Slots that `sequence`, which has `num_pages` pages, takes, the hidden ones included."""
        length = (num_pages - 1) * self.page_size + self._number(0, sequence, 0)
        return self.index_temp(T.if_then_else(num_pages > 0, length, 0))

    def gap(self, sequence) -> Gap:
        """Return what `sequence` has dropped."""
        begin = self.index_temp(self._number(1, sequence, T.int32(0)))
        sinks = self.index_temp(self._number(2, sequence, T.int32(0)))
        back = self.index_temp(self._number(3, sequence, NO_LIMIT - sinks))
        return Gap(sinks, begin, back, self.index_temp)


def sequences_of(spec, a, index_temp: Callable) -> WholeSequence:
    """The sequences, with their lengths, that the arguments of a kernel tell.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments.
    index_temp : callable
        Materialises an int32 value.
    """
    if isinstance(a, RaggedInputs):
        return RaggedSequence()
    if a.length_form is Lengths.LAST_PAGE:
        return WholeSequence(spec, a.lengths, index_temp)
    return GappedSequence(spec, a, index_temp)


@dataclass(frozen=True)
class CausalMask:
    """Row r of the `num_rows` of a step sees the columns below ``kv_len - num_rows + r + 1``.

    Other masks derive from it. One that hides columns between the bounds of a row has a method
    ``sees(own, columns, lanes)``: which of the columns, an int32 vector of `lanes` elements, the
    row whose own column is `own`, a vector of the same element, sees. It is asked for every tile.

    Parameters
    ----------
    causal : int32 expression; 0 lets every row see every column.
    reach : callable, optional
        How many columns behind its own a row of the sequence sees.
    """

    causal: object
    reach: Callable | None = field(default=None, kw_only=True)

    # Whether rows do not see some first columns either: then there is `begin`.
    has_window = False
    sees = None

    def end(self, row, num_rows, kv_len):
        """First column that `row` does not see; never less for a later row."""
        bound = kv_len - num_rows + row + 1
        if self.reach is not None:
            bound += self.reach(T.min(row, num_rows - 1))
        bound = T.max(T.min(bound, kv_len), 0)
        return T.if_then_else(self.causal != 0, bound, kv_len)

    def own(self, row, num_rows, kv_len):
        """The column of `row` itself."""
        return kv_len + row - T.if_then_else(self.causal != 0, num_rows, 0)

    def shared_end(self, end):
        """All columns before it are seen by a row with this `end` and by later ones."""
        return end if self.sees is None else T.int32(0)

    def shared_begin(self, begin):
        """All columns from it on are seen by a row with this `begin` and by earlier ones."""
        return begin

    def row(self, end):
        """Return what `visible` needs of the row with this `end`."""
        return end

    def visible(self, first, start: int, lanes: int, row):
        """Return which of `lanes` columns from ``first + start`` on the `row` sees."""
        return ramp(first + start, lanes) < broadcast(row, lanes)

    def offsets(self, start, lanes: int):
        """RoPE positions of columns of a tile, relative to its first column's."""
        return ramp(start, lanes)

    def prepare(self, a) -> None:
        """Nothing to prepare for a call."""

    def begin_task(self) -> None:
        """Nothing to make for a task."""

    def begin_sequence(self, sequence, kv_len) -> None:
        """Nothing to know of a sequence."""

    def of_sequence(self, k_offset, first_row) -> CausalMask:
        """Return the mask of a sequence.

        Parameters
        ----------
        k_offset : int32 expression
            Position of its column 0.
        first_row : int32 expression
            The first of its rows among those of the step.
        """
        if self.reach is None:
            return self
        reach = self.reach
        return replace(self, reach=lambda row: reach(first_row + row))

    def begin_tile(self, first, rope) -> None:
        """Nothing to know of a tile of columns."""


def mask_of(a) -> CausalMask:
    """Return the mask that the arguments of a kernel tell, of all sequences.

    Rows of a span that is attended to in both directions see to its end; a window still says where
    they begin to see.
    """
    reach = None if a.row_reach is None else lambda row: a.row_reach[row]
    if a.window is None:
        return CausalMask(a.causal, reach=reach)
    return WindowMask(a.causal, a.window, reach=reach)


def first_in_window(window, position):
    """Return the first position that the row at `position` sees.

    Parameters
    ----------
    window : int32 expression
        At least 0: the row sees the last `window` positions, its own included. Negative: rows see
        from the start of the chunk of ``-window`` positions that they are in.
    position : int32 expression
    """
    in_chunk = T.truncmod(position, T.max(-window, 1))
    return T.if_then_else(window < 0, position - in_chunk, position + 1 - window)


@dataclass(frozen=True)
class WindowMask(CausalMask):
    """A `CausalMask` in which a row sees what `first_in_window` says, up to its own position.

    Parameters
    ----------
    causal : int32 expression; 0 when the rows of the step follow the columns.
    window : int32 expression
    k_offset : int32 expression
        Position of column 0; chunks depend on it.
    """

    window: object
    k_offset: object = 0
    has_window = True

    def of_sequence(self, k_offset, first_row) -> CausalMask:
        """Return the mask of a sequence, as `CausalMask.of_sequence` does."""
        return replace(super().of_sequence(k_offset, first_row), k_offset=k_offset)

    def begin(self, row, num_rows, kv_len):
        """First column that `row` sees; never less for a later row."""
        return self.begin_of(self.own(row, num_rows, kv_len))

    def begin_of(self, own):
        """First column that the row whose own column is `own` sees."""
        return T.max(first_in_window(self.window, own + self.k_offset) - self.k_offset, 0)

    def begin_of_single(self, kv_len, q_position):
        """First column that the only row of a sequence sees, which is at `q_position`.

        In decode the columns may end before the row; then `window` leaves out its own position,
        but a chunk still begins where the row's does.
        """
        own = T.if_then_else(self.window < 0, q_position - self.k_offset, self.own(0, 1, kv_len))
        return self.begin_of(own)

    def row(self, end, begin):
        """Return what `visible` needs of the row with these bounds."""
        return end, begin

    def visible(self, first, start: int, lanes: int, row):
        """Return which of `lanes` columns from ``first + start`` on the `row` sees."""
        columns, (end, begin) = ramp(first + start, lanes), row
        return T.And(columns >= broadcast(begin, lanes), columns < broadcast(end, lanes))
