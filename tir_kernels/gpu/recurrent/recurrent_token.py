# SPDX-License-Identifier: Apache-2.0
"""The rows of a token that update a head's state, loaded while the token before is worked on."""

from __future__ import annotations

from tvm.script import tirx as T

from ...ingredients import Ingredients
from ...layout import slot_offset, slot_page
from ...recurrent_spec import RecurrentSpec
from ...script import inline
from ...semantics.decay import exp
from ..isa import isa_of
from ..registers import F32
from .requested_rows import RequestedRows


@T.meta_class
class RecurrentToken:
    """Query, ingredients and decay of a token, as a thread takes them.

    Parameters
    ----------
    spec : RecurrentSpec
    num_rows, num_columns : int
        Consecutive key channels and value channels of a thread.
    q : Buffer ``[row, key head, key channel]``
    kept : Ingredients
    scale : float32 expression
        Factor on q.
    """

    def __init__(
        self, spec: RecurrentSpec, num_rows: int, num_columns: int, q, kept: Ingredients, scale
    ):
        self.spec, self.source_q, self.kept, self.scale = spec, q, kept, scale
        self.isa = isa = isa_of(spec.target)
        num_decays = num_rows if spec.decays_by_channel else 1
        self.q, self.k = (T.alloc_local((num_rows,), F32, layout=None) for _ in range(2))
        self.v = T.alloc_local((num_columns,), F32, layout=None)
        self.decays = T.alloc_local((num_decays,), F32, layout=None)
        self.beta = T.alloc_local((1,), F32, layout=None)
        self.next_q, self.next_k = (RequestedRows(isa, num_rows, spec.dtype) for _ in range(2))
        self.next_v = RequestedRows(isa, num_columns, spec.dtype)
        self.next_decays = RequestedRows(isa, num_decays, F32)
        self.next_beta = RequestedRows(isa, 1, F32)

    @inline
    def request(self, slot, row, head, first_row, first_column):
        """Load the ingredients of a slot, and the query of a row unless that is -1."""
        page, offset = slot_page(slot, self.spec.page_size), slot_offset(slot, self.spec.page_size)
        key_head = head // self.spec.heads_per_key
        self.next_k.request(self.kept.k, (page, offset, key_head), first_row)
        self.next_v.request(self.kept.v, (page, offset, head), first_column)
        if self.spec.decays_by_channel:
            self.next_decays.request(self.kept.log_decay, (page, offset, head), first_row)
        else:
            self.next_decays.request(self.kept.log_decay, (page, offset), head)
        if self.spec.is_delta:
            self.next_beta.request(self.kept.beta, (page, offset), head)
        if row >= 0:
            self.next_q.request(self.source_q, (row, key_head), first_row)

    def take(self) -> None:
        """Take what was requested, as float32, before the next request."""
        self.next_k.take(self.k)
        self.next_q.take(self.q)
        self.next_v.take(self.v)
        self.next_decays.take(self.decays)
        for i in range(int(self.decays.shape[0])):
            T.buffer_store(self.decays, exp(self.decays[i], 1, self.isa), [i])
        for i in range(int(self.q.shape[0])):
            T.buffer_store(self.q, self.q[i] * self.scale, [i])
        if self.spec.is_delta:
            self.next_beta.take(self.beta)

    def decay(self, i):
        """Return the factor on the thread's row i of the state."""
        return self.decays[i if self.spec.decays_by_channel else 0]
