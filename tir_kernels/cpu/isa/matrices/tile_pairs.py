# SPDX-License-Identifier: Apache-2.0
"""Operands in pairs of bfloat16 whose matrices are multiplied in the tiles of AMX."""

from __future__ import annotations

from ..bf16 import PairOperands
from ..quantized_pairs import QuantizedPairs
from ..simd import import_llvm
from . import amx
from .amx_tile import AmxTile


class TilePairs(PairOperands):
    """`PairOperands` that are multiplied in tiles wherever both operands are matrices."""

    product_tile = AmxTile

    @property
    def llvm_helpers(self) -> tuple[str, ...]:
        """The LLVM functions that a kernel needs."""
        return (*PairOperands.llvm_helpers, amx.LLVM_HELPERS)

    def scope(self):
        """Open the scope in which the LLVM helpers are known."""
        return import_llvm(*self.llvm_helpers)

    def begin_task(self) -> None:
        """Configure the tiles of a thread."""
        amx.Tiles.begin()

    def end_task(self) -> None:
        """Release them."""
        amx.Tiles.end()


class QuantizedTilePairs(TilePairs, QuantizedPairs):
    """`TilePairs` whose K and V come from quantized pages."""
