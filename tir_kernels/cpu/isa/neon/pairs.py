# SPDX-License-Identifier: Apache-2.0
"""Operands in pairs of bfloat16 for NEON with FEAT_BF16: dot products and products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ..bf16 import INT32, WORD, PairOperands
from ..simd import shuffle, temp, vector_type
from .steps import MatrixSteps


def _rounding(name: str, order: Sequence[int]) -> str:
    """Return an LLVM function that rounds two vectors to pairs of their elements, in an order."""
    elements = ", ".join(f"i32 {i}" for i in order)
    return f"""
define linkonce_odr <4 x i32> @pagedkv_bf16_{name}(<4 x float> %second, <4 x float> %first) #0 {{
  %low = fptrunc <4 x float> %first to <4 x bfloat>
  %high = fptrunc <4 x float> %second to <4 x bfloat>
  %r = shufflevector <4 x bfloat> %low, <4 x bfloat> %high, <8 x i32> <{elements}>
  %pairs = bitcast <8 x bfloat> %r to <4 x i32>
  ret <4 x i32> %pairs
}}
"""


# linkonce_odr: several kernels of one module may bring the same helpers. The first operand is often
# a pair in every lane, so it comes last, where the instruction takes a lane of a vector.
_LLVM_HELPERS = """
define linkonce_odr <4 x float> @pagedkv_bf16_dot_4(<4 x float> %s, <4 x i32> %a, <4 x i32> %b) #0 {
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %r = call <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(
      <4 x float> %s, <8 x bfloat> %y, <8 x bfloat> %x)
  ret <4 x float> %r
}
declare <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float>, <8 x bfloat>, <8 x bfloat>)
define linkonce_odr <4 x float> @pagedkv_bf16_matrices(
    <4 x float> %s, <4 x i32> %a, <4 x i32> %b) #0 {
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %r = call <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float> %s, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %r
}
declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)
attributes #0 = { alwaysinline nounwind readnone }
"""
_LLVM_HELPERS += _rounding("round", range(8))
_LLVM_HELPERS += _rounding("interleave", (0, 4, 1, 5, 2, 6, 3, 7))


class NeonPairs(PairOperands):
    """`PairOperands` for AArch64: vectors of four pairs."""

    llvm_helpers = (_LLVM_HELPERS,)
    broadcasts_from_memory = False
    steps = MatrixSteps
    lanes = 4

    def add_matrices(self, sums, left, right):
        """Add the product of two rows and two columns of four numbers to 2 x 2 sums."""
        return T.call_pure_extern("float32x4", "pagedkv_bf16_matrices", sums, left, right)

    def split_words(self, first, second, lanes: int) -> tuple:
        """Pairs of numbers of two rows as pairs of rows: of the even numbers, of the odd ones."""
        rows = [
            temp(T.reinterpret(vector_type(WORD, 2 * lanes), row), 2 * lanes, WORD)
            for row in (first, second)
        ]
        orders = (
            [2 * i + odd + n * 2 * lanes for i in range(lanes) for n in (0, 1)] for odd in (0, 1)
        )
        return tuple(
            T.reinterpret(vector_type(INT32, lanes), shuffle(rows, order)) for order in orders
        )

    def packed_v(self, tile, t: int, column, lanes: int, is_held: Sequence):
        """Rows `t` and ``t + 1`` of a tile of V in pairs, zeros for a row that is not held."""
        rows = []
        for n in range(2):
            buffer, (*outer, last) = tile.v(t + n, column)
            rows.append(temp(self._words(buffer)[(*outer, T.ramp(last, 1, lanes))], lanes, WORD))
        order = [i + n * lanes for i in range(lanes) for n in (0, 1)]
        pairs = T.reinterpret(vector_type(INT32, lanes), shuffle(rows, order))
        return self.select(pairs, is_held, lanes) if is_held else pairs
