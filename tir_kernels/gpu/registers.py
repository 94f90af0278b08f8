# SPDX-License-Identifier: Apache-2.0
"""Registers of a thread: small buffers in the scope "local".

Their loops are unrolled, so that the compiler keeps each element where its name says.
"""

from __future__ import annotations

import math

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

F32, U32, I32, I64 = "float32", "uint32", "int32", "int64"
WARP = 32  # threads that exchange values; they hold the rows of products together


class Registers:
    """An array of registers of a thread.

    Parameters
    ----------
    count : int
    dtype : str
    name : str
        In the generated code.
    """

    def __init__(self, count: int, dtype: str, name: str = "r"):
        self.count = count
        # The default layout says the same as none, and takes longer to make than the buffer.
        buffer = T.alloc_buffer((count,), dtype, scope="local", layout=None)
        self.buffer = IRBuilder.name(name, buffer)

    @classmethod
    def of(cls, buffer) -> Registers:
        """Take registers that a component or a kernel has allocated."""
        registers = object.__new__(cls)
        registers.count, registers.buffer = int(buffer.shape[0]), buffer
        return registers

    def __getitem__(self, i):
        return self.buffer[i]

    def __setitem__(self, i, value) -> None:
        T.buffer_store(self.buffer, value, [i])

    def __iter__(self):
        return (self.buffer[i] for i in range(self.count))

    def fill(self, value) -> None:
        """Set all to one value."""
        with T.unroll(self.count) as i:
            self[i] = value


def temp(value, lanes: int = 1, dtype: str = F32):
    """Materialise `value`, so that later uses do not repeat its expression."""
    register = Registers(lanes, dtype, "t")
    register[0] = value
    return register[0]


def index_temp(value):
    """Materialise an int32 value."""
    return temp(value, 1, I32)


def as_count(value):
    """Return a count of work, known to the host, in 64 bits."""
    return T.cast(value, I64)


def run_length(*extents: int) -> int:
    """Elements, at most 8, that a thread takes at once of rows that have starts and ends there."""
    return math.gcd(8, *extents)
