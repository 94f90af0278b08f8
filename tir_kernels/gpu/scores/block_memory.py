# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a block past its tiles: tables, and variables spilled from registers."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ...releases import buffer_of
from ...script import inline
from ..registers import U32, Registers
from ..tiles.tiling import Tiling

# Words past the tables: variables first, then the words of `NonFiniteGuard`.
NUM_VARIABLES = 10


@T.meta_class
class BlockMemory:
    """The places of the tables of a block, and its variables that are not in registers.

    Passes over columns need the registers, so variables that say what the block does are stored
    before them and loaded when they are needed again.

    Parameters
    ----------
    shared : SharedMemory
    begin : int
        The first byte past the tiles.
    tiling : Tiling
    """

    def __init__(self, shared, begin: int, tiling: Tiling):
        self.shared, self.isa = shared, shared.isa
        self.begin, self.variables = begin, ()
        self.bounds_begin = begin + tiling.table_bytes
        self.words_begin = self.bounds_begin + tiling.rows * 8

    def position(self, i):
        """Return the byte of the position of column i of a tile of columns: 4 bytes."""
        return self.begin + i * 4

    def bounds(self, row):
        """Return the byte of a row's first visible column and the one after its last: 8 bytes."""
        return self.bounds_begin + row * 8

    def word(self, i: int):
        """Return the byte of word i past the tables."""
        return self.words_begin + i * 4

    @inline
    def spill(self, variables, thread):
        """Store int32 variables, equal in all threads, for `reload`.

        All threads must have loaded the variables of the last call by then.
        """
        if self.isa.stores_once:
            if thread == 0:
                self.put(variables)
            self.isa.sync_block()
        else:
            self.put(variables)

    def put(self, variables: Sequence) -> None:
        """Store the variables of one thread; those past `NUM_VARIABLES` stay in registers."""
        self.variables = tuple(variables)[:NUM_VARIABLES]
        for i, variable in enumerate(self.variables):
            self.shared.store(self.word(i), T.cast(variable, U32))

    def reload(self) -> None:
        """Load the variables that were spilled: registers need not have kept them."""
        words = Registers(len(self.variables), U32, "words")
        for i in range(words.count):
            self.shared.load([words[i]], self.word(i))
        for i, variable in enumerate(self.variables):
            T.buffer_store(buffer_of(variable), T.cast(words[i], "int32"), [0])
