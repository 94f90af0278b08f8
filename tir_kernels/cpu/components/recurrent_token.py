# SPDX-License-Identifier: Apache-2.0
"""The rows of a token that update a head's state: q, k and the decay as float32 columns."""

from tvm.script import tirx as T

from ...ingredients import Ingredients
from ...recurrent_spec import RecurrentSpec
from ...script import inline
from ..simd import F32, broadcast, chunks, load, store
from .decay import exp


@T.meta_class
class RecurrentToken:
    """Query, key and decay of a token, as one head takes them.

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
        self.q, self.k = (T.alloc_buffer((spec.key_dim,), F32) for _ in range(2))
        if spec.decays_by_channel:
            self.decays = T.alloc_buffer((spec.key_dim,), F32)
        else:
            self.head_decay = T.local_scalar(F32)

    @inline
    def load_ingredients(self, page, offset, head):
        """Take the key and the decay of a token."""
        self._load_columns(page, offset, head, head // self.spec.heads_per_key)
        if not self.spec.decays_by_channel:
            self.head_decay = exp(self.kept.log_decay[page, offset, head], 1)

    def _load_columns(self, page, offset, head, key_head) -> None:
        for start, lanes in chunks(self.spec.key_dim, self.spec.target.lanes):
            k = load(self.kept.k, (page, offset, key_head, start), lanes)
            store(self.k, (start,), lanes, k)
            if self.spec.decays_by_channel:
                g = load(self.kept.log_decay, (page, offset, head, start), lanes)
                store(self.decays, (start,), lanes, exp(g, lanes))

    @inline
    def load_query(self, row, head):
        """Take the query of a row."""
        self._load_query(row, head // self.spec.heads_per_key)

    def _load_query(self, row, key_head) -> None:
        for start, lanes in chunks(self.spec.key_dim, self.spec.target.lanes):
            q = load(self.source_q, (row, key_head, start), lanes)
            store(self.q, (start,), lanes, q * broadcast(self.scale, lanes))

    def decay(self, channel):
        """Return the factor on a row of the state."""
        return self.decays[channel] if self.spec.decays_by_channel else self.head_decay
