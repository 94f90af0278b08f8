# SPDX-License-Identifier: Apache-2.0
"""Rows that are loaded a while before they are needed."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script import tirx as T

from ...spec import ITEMSIZE
from ..registers import F32, U32, Registers, run_length


@T.meta_class
class RequestedRows:
    """Consecutive elements of rows in registers, as they lie in memory until they are taken.

    Parameters
    ----------
    isa : Isa
    count : int
        Elements of a row.
    dtype : str
    num_rows : int
    """

    def __init__(self, isa, count: int, dtype: str, num_rows: int = 1):
        self.isa = isa
        self.count, self.dtype, self.run = count, dtype, run_length(count)
        self.num_bytes = self.run * ITEMSIZE[dtype]
        self.is_words = self.num_bytes % 4 == 0
        self.size = count * ITEMSIZE[dtype] // 4 if self.is_words else count
        self.register_dtype = U32 if self.is_words else F32
        self.buffer = T.alloc_local((num_rows * self.size,), self.register_dtype, layout=None)

    def request(self, array, row: Sequence, first, i=0) -> None:
        """Load, as row i, the elements of a row of an array from one on."""
        for start in range(0, self.count, self.run):
            begin = i * self.size + start * self.size // self.count
            if self.is_words:
                words = Registers(self.num_bytes // 4, U32, "words")
                self.isa.load_words(words, array, (*row, first + start), self.num_bytes)
            else:
                words = Registers(self.run, F32, "values")
                for e in range(self.run):
                    words[e] = T.cast(array[(*row, first + start + e)], F32)
            for e in range(words.count):
                T.buffer_store(self.buffer, words[e], [begin + e])

    def clear(self, i=0) -> None:
        """Let the elements of row i be zeros, as if they had been loaded."""
        for e in range(self.size):
            T.buffer_store(self.buffer, tirx.const(0, self.register_dtype), [i * self.size + e])

    def take(self, values, i=0) -> None:
        """Store the elements of row i as float32."""
        words = Registers(self.size, self.register_dtype, "held")
        for e in range(self.size):
            words[e] = self.buffer[i * self.size + e]
        if self.is_words:
            self.isa.widen_words(words, self.dtype, Registers.of(values))
        else:
            for e in range(self.size):
                T.buffer_store(values, words[e], [e])
