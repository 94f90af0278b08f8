# SPDX-License-Identifier: Apache-2.0
"""`decode_sliding` and `prefill_sliding` as the cache inside apache-tvm calls them.

They are of layers with a window, and built for one. Their `lengths` are ``[3, B]``: valid slots of
the last page, slots of the first page that lie before the window, and slots of sinks, of which such
layers have none; ``first_positions[b]`` is the position of the first slot in the window. Columns
are the slots of the pages, so whole pages are read as everywhere, and the mask hides those before
the window.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T

from ...semantics.visibility import WindowMask
from ...signatures.attention import DECODE_WINDOWED, PREFILL_WINDOWED
from ...signatures.inputs import Elements, Lengths, PagedInputs
from ...spec import KernelSpec
from .decode import decode
from .prefill import paged


class _StockWindowMask(WindowMask):
    """The pages hold what comes before the rows: where causal, row r sees its last window - r - 1.

    Otherwise every row sees all that is in the window.
    """

    def __init__(self, causal, window: int, num_hidden: Elements):
        super().__init__(causal, window)
        self.num_hidden_of = num_hidden

    def of_sequence(self, k_offset, first_row) -> WindowMask:
        """Return the mask of a sequence: a window does not depend on where its column 0 is."""
        return self

    def begin_sequence(self, sequence, kv_len) -> None:
        """Load the number of hidden columns of a sequence."""
        self.num_hidden = self.num_hidden_of[sequence]

    def begin(self, row, num_rows, kv_len):
        """First column that `row` sees; never less for a later row."""
        num_seen = T.if_then_else(self.causal != 0, T.max(self.window - row - 1, 0), kv_len)
        return T.max(self.num_hidden, kv_len - num_seen)

    def begin_of_single(self, kv_len, q_position):
        """First column that the only row of a sequence sees."""
        return self.begin(0, 1, kv_len)

    def end(self, row, num_rows, kv_len):
        """First column that `row` does not see."""
        return kv_len


def _described(a: PagedInputs, causal, window: int) -> PagedInputs:
    """The inputs as the skeletons ask for them."""
    info, first_seen = a.lengths, a.first_positions
    return replace(
        a,
        lengths=Elements(lambda b: info[0, b]),
        length_form=Lengths.LAST_PAGE,
        first_positions=Elements(lambda b: first_seen[b] - info[1, b]),
        mask=_StockWindowMask(causal, window, Elements(lambda b: info[1, b])),
    )


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def decode_sliding(spec: KernelSpec, window: int):
    """Build `decode_sliding`: a row sees all that is in the window, its own position included.

    Its arguments are those of `decode`, but `lengths`, which are ``[3, B]``.
    """
    _check_window(window)
    return decode(spec, DECODE_WINDOWED)


def prefill_sliding(spec: KernelSpec, window: int):
    """Build `prefill_sliding`: where causal, row r sees the last ``window - r - 1`` positions.

    Its arguments are those of `prefill`, but `lengths`, which are ``[3, B]``. The pages hold what
    comes before the rows of the step, whose attention to each other is merged with this.
    """
    _check_window(window)

    return paged(
        spec,
        PREFILL_WINDOWED,
        prepare=lambda a: _described(a, a.causal, window),
    )
