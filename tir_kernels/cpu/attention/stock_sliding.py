# SPDX-License-Identifier: Apache-2.0
"""`decode_sliding` and `prefill_sliding` as the cache inside apache-tvm calls them.

They are of layers with a window, and built for one. Their length_info is ``[3, B]``: valid slots of
the last page, slots of the first page that lie before the window, and slots of sinks, of which such
layers have none; ``k_rope_pos_offset[b]`` is the position of the first slot in the window. Columns
are the slots of the pages, so whole pages are read as everywhere, and the mask hides those before
the window.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...semantics.visibility import WindowMask
from ...signatures import DECODE, PREFILL, with_lengths
from ...spec import KernelSpec
from .decode.kernel import emit_decode
from .define import attention_kernel
from .prefill.kernel import emit_paged


class _Elements:
    """An array whose elements are computed where they are asked for."""

    def __init__(self, of):
        self.of = of

    def __getitem__(self, index):
        return self.of(index)


class _StockWindowMask(WindowMask):
    """The pages hold what comes before the rows: where causal, row r sees its last window - r - 1.

    Otherwise every row sees all that is in the window.
    """

    def __init__(self, causal, window: int, num_hidden: _Elements):
        super().__init__(causal, window)
        self.of_sequence = num_hidden

    def begin_sequence(self, sequence, kv_len) -> None:
        """Go on with another sequence."""
        self.num_hidden = self.of_sequence[sequence]

    def begin(self, row, num_rows, kv_len):
        """First column that `row` sees; never less for a later row."""
        num_seen = T.if_then_else(self.causal != 0, T.max(self.window - row - 1, 0), kv_len)
        return T.max(self.num_hidden, kv_len - num_seen)

    def end(self, row, num_rows, kv_len):
        """First column that `row` does not see."""
        return kv_len


def _describe(a, causal, window: int) -> None:
    """Give matched arguments what the skeletons ask for."""
    info, first_seen = a.window_matrix, a.k_rope_pos_offset
    a.length_info = _Elements(lambda b: info[0, b])
    a.k_rope_pos_offset = _Elements(lambda b: first_seen[b] - info[1, b])
    a.mask = _StockWindowMask(causal, window, _Elements(lambda b: info[1, b]))


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def decode_sliding(spec: KernelSpec, window: int):
    """Build `decode_sliding`: a row sees all that is in the window, its own position included.

    Its arguments are those of `decode`, but length_info, which is ``[3, B]``.
    """
    _check_window(window)

    def emit(a):
        _describe(a, T.int32(0), window)
        emit_decode(spec, a)

    return attention_kernel(spec, with_lengths(DECODE, "window_matrix"), emit)


def prefill_sliding(spec: KernelSpec, window: int):
    """Build `prefill_sliding`: where causal, row r sees the last ``window - r - 1`` positions.

    Its arguments are those of `prefill`, but length_info, which is ``[3, B]``. The pages hold what
    comes before the rows of the step, whose attention to each other is merged with this.
    """
    _check_window(window)

    def emit(a):
        _describe(a, a.causal, window)
        emit_paged(spec, a)

    return attention_kernel(spec, with_lengths(PREFILL, "window_matrix"), emit)
