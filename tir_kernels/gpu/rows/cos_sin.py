# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of a position, in shared memory."""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.rope import base_inverse_frequencies, first_factor, inverse_frequencies, sin_cos
from ..registers import F32, temp
from .worker import Worker


@T.meta_class
class CosSin:
    """The cosines and sines of one position, which a block computes together.

    Parameters
    ----------
    worker : Worker
    factors : Buffer, optional
        longrope: the long factors, then the short ones.
    """

    def __init__(self, worker: Worker, factors=None):
        self.worker, self.factors, self.rope = worker, factors, worker.spec.rope
        self.half = self.rope.rotary_dim // 2
        self.table = worker.table(2, self.half)

    @inline
    def fill(self, position, last_position=None):
        """Compute them for an int32 position of a sequence; longrope asks for its last one."""
        scaled = T.cast(position, "float32") * T.float32(self.rope.scale)
        for i in self.worker.elements(self.half):
            self._compute(i, scaled, last_position)
        self.worker.sync()

    def _compute(self, i, scaled, last_position) -> None:
        known = inverse_frequencies(self.rope)
        if self.factors is None:
            frequency = self.worker.isa.lookup(known.inv_freq, i)
        else:
            unscaled = self.worker.isa.lookup(base_inverse_frequencies(self.rope), i, "float64")
            factor = self.factors[first_factor(self.rope, last_position) + i]
            frequency = T.cast(unscaled / T.cast(factor, "float64"), F32)
        rotation = sin_cos(scaled * frequency, 1, self.worker.isa)
        for row, value in enumerate((rotation.cos, rotation.sin)):
            if known.attention_factor != 1.0:
                value = value * T.float32(known.attention_factor)
            T.buffer_store(self.table, value, [row, i])

    def at(self, i) -> tuple:
        """Return cosine and sine of a pair of dimensions."""
        return tuple(temp(self.table[row, i]) for row in range(2))
