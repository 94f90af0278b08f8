# SPDX-License-Identifier: Apache-2.0
"""Numbers in two bytes as matrices: high bytes of eight numbers, then the low ones."""

from tvm.script import tirx as T

from ..bytes.byte_shuffles import INT32
from ..bytes.two_bytes import TwoBytes
from ..shuffles import transpose
from ..simd import load, store


@T.meta_class
class MatrixBytes(TwoBytes):
    """`TwoBytes` as ``[four rows, two dwords, row, high or low and dword]``."""

    @staticmethod
    def _shape(width: int) -> tuple[int, int, int]:
        return width // 8, 4, 4

    def _put(self, four, dword: int, high, low) -> None:
        """Keep the bytes of some numbers of four rows, two dwords at a time."""
        if dword % 2 == 0:
            self.held = high, low
            return
        for row, value in enumerate(transpose([self.held[0], high, self.held[1], low], INT32)):
            store(self.dwords, (four, dword // 2, row, 0), 4, value, INT32)

    def matrix(self, of_set, row: int, dword):
        """The bytes of eight numbers of a row, from an even dword on."""
        at = of_set * self.fours + row // 4, dword // 2, row % 4, 0
        return load(self.dwords, at, 4, INT32)
