# SPDX-License-Identifier: Apache-2.0
"""The rows of a token that update a head's state: q, k and the decay as float32 columns."""

from tvm.script import tirx as T

from ...ingredients import Ingredients
from ...layout import slot_offset, slot_page
from ...recurrent_spec import RecurrentSpec
from ...script import inline
from ...semantics.decay import exp
from ..isa import simd
from ..isa.simd import (
    F32,
    INTO_L1,
    broadcast,
    chunks,
    elements_per_line,
    index_temp,
    load,
    prefetch,
    store,
    temp,
)
from .state_numbers import safe


@T.meta_class
class RecurrentToken:
    """Query, key and decay of two consecutive tokens, as one head takes them.

    While a token updates a state, the next one recalls: they take turns, 0 and 1.

    Parameters
    ----------
    spec : RecurrentSpec
    q : Buffer ``[row, key head, key channel]``
    kept : Ingredients
    scale : float32 expression
        Factor on q.
    """

    def __init__(self, spec: RecurrentSpec, q, kept: Ingredients, scale):
        self.spec, self.source_q, self.kept, self.scale = spec, q, kept, scale
        self.q, self.k = (T.alloc_buffer((2, spec.key_dim), F32) for _ in range(2))
        shape = (2, spec.key_dim if spec.decays_by_channel else 1)
        self.decays = T.alloc_buffer(shape, F32)
        # Keys times decays. A decay of the head is a factor on the sum.
        self.recalling = T.alloc_buffer(shape, F32) if self._scales_keys else self.k

    @property
    def _scales_keys(self) -> bool:
        return self.spec.is_delta and self.spec.decays_by_channel

    @inline
    def load(self, turn, page, offset, row, head):
        """Take a token's ingredients from its slot, and its query from a row unless that is -1."""
        key_head = head // self.spec.heads_per_key
        self._load_ingredients(turn, page, offset, head, key_head)
        if row >= 0:
            self._load_query(turn, row, key_head)

    def _load_ingredients(self, turn, page, offset, head, key_head) -> None:
        dtype = self.spec.state_dtype
        for start, lanes in chunks(self.spec.key_dim, self.spec.target.lanes):
            k = load(self.kept.k, (page, offset, key_head, start), lanes)
            k = temp(safe(k, dtype, lanes), lanes)
            store(self.k, (turn, start), lanes, k)
            if self.spec.decays_by_channel:
                log_decay = load(self.kept.log_decay, (page, offset, head, start), lanes)
                decay = exp(safe(log_decay, dtype, lanes), lanes, simd)
                store(self.decays, (turn, start), lanes, decay)
                if self._scales_keys:
                    store(self.recalling, (turn, start), lanes, k * decay)
        if not self.spec.decays_by_channel:
            decay = exp(safe(self.kept.log_decay[page, offset, head], dtype, 1), 1, simd)
            store(self.decays, (turn, 0), 1, decay)

    def _load_query(self, turn, row, key_head) -> None:
        for start, lanes in chunks(self.spec.key_dim, self.spec.target.lanes):
            q = load(self.source_q, (row, key_head, start), lanes)
            store(self.q, (turn, start), lanes, q * broadcast(self.scale, lanes))

    def decay(self, turn, channel):
        """Return the factor on a row of the state."""
        return self.decays[turn, channel if self.spec.decays_by_channel else 0]

    def decayed(self, turn, recalled, lanes: int):
        """Return what a token recalls, from the sums of rows times `recalling`."""
        if self.spec.decays_by_channel:
            return recalled
        return recalled * broadcast(self.decays[turn, 0], lanes)

    def prefetch(self, slot, row, head, columns: tuple) -> None:
        """Ask for what a head takes of a token, with the columns ``(first, count)`` of v.

        The slots of tokens follow no pattern that a CPU knows. (A row of -1 does no harm.)
        """
        page, offset = (
            index_temp(at(slot, self.spec.page_size)) for at in (slot_page, slot_offset)
        )
        key_head, key_dim = index_temp(head // self.spec.heads_per_key), self.spec.key_dim
        _prefetch_row(self.source_q, (row, key_head), 0, key_dim)
        _prefetch_row(self.kept.k, (page, offset, key_head), 0, key_dim)
        _prefetch_row(self.kept.v, (page, offset, head), *columns)
        if self.spec.decays_by_channel:
            _prefetch_row(self.kept.log_decay, (page, offset, head), 0, key_dim)
        else:
            _prefetch_row(self.kept.log_decay, (page, offset), head, 1)
        if self.spec.is_delta:
            _prefetch_row(self.kept.beta, (page, offset), head, 1)


def _prefetch_row(buffer, row: tuple, begin, count: int) -> None:
    for start in range(0, count, elements_per_line(str(buffer.dtype))):
        prefetch(buffer, (*row, begin + start), INTO_L1)
