# SPDX-License-Identifier: Apache-2.0
"""Operands in pairs of bfloat16 for dot products: ``vdpbf16ps`` of AVX-512, ``bfdot`` of AArch64.

TVM's legalisation turns vectors of bfloat16 into float32, so the kernel never names the type: it
reads 16-bit words, keeps pairs as int32, and calls LLVM functions that reinterpret them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ...semantics.rope import has_rope
from ...spec import KernelSpec, VectorTarget
from .simd import F32, broadcast, import_llvm, load, ramp, shuffle, store, temp, vector_type

INT32, WORD = "int32", "uint16"

# linkonce_odr: several kernels of one module may bring the same helpers.
_DOT = """
define linkonce_odr {f} @pagedkv_bf16_dot_{n}({f} %sum, {i} %a, {i} %b) #0 {{
  %x = bitcast {i} %a to {b}
  %y = bitcast {i} %b to {b}
  %r = call {f} @llvm.x86.avx512bf16.dpbf16ps.{bits}({f} %sum, {b} %x, {b} %y)
  ret {f} %r
}}
declare {f} @llvm.x86.avx512bf16.dpbf16ps.{bits}({f}, {b}, {b})
"""
# LLVM would broadcast the pair by an instruction of its own, a third of the cost of the product.
_DOT_SCALAR = """
define linkonce_odr {f} @pagedkv_bf16_dot_scalar({f} %sum, {i} %a, ptr %b) #1 {{
  %r = call {f} asm "vdpbf16ps $3{{1to16}}, $2, $0", "=v,0,v,*m"(
      {f} %sum, {i} %a, ptr elementtype(i32) %b) #1
  ret {f} %r
}}
attributes #1 = {{ alwaysinline nounwind memory(read) }}
"""
_ROUND = """
define linkonce_odr {i} @pagedkv_bf16_round({f} %second, {f} %first) #0 {{
  %r = call {b} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({f} %second, {f} %first)
  %pairs = bitcast {b} %r to {i}
  ret {i} %pairs
}}
define linkonce_odr {i} @pagedkv_bf16_interleave({f} %second, {f} %first) #0 {{
  %r = call {b} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({f} %second, {f} %first)
  %s = shufflevector {b} %r, {b} poison, <32 x i32> <{interleaved}>
  %pairs = bitcast {b} %s to {i}
  ret {i} %pairs
}}
declare {b} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({f}, {f})
attributes #0 = {{ alwaysinline nounwind readnone }}
"""


def _helper(text: str, n: int) -> str:
    types = {"f": f"<{n} x float>", "i": f"<{n} x i32>", "b": f"<{2 * n} x bfloat>"}
    interleaved = ", ".join(f"i32 {i}, i32 {n + i}" for i in range(n))
    return text.format(n=n, bits=32 * n, interleaved=interleaved, **types)


LLVM_HELPERS = "".join(
    _helper(text, n) for text, n in ((_DOT, 16), (_DOT, 8), (_DOT_SCALAR, 16), (_ROUND, 16))
)


class PairOperands:
    """Two neighbouring bfloat16 numbers along the summed axis are one int32 element."""

    dtype = INT32
    values_per_element = 2
    llvm_helpers = (LLVM_HELPERS,)
    scale_in_q = False  # would cost Q another rounding
    broadcasts_from_memory = True
    steps = None
    product_tile = None  # as of `Float32Operands`
    lanes = 16

    def begin(self, buffers) -> None:
        """Look at the bfloat16 ones of some buffers as 16-bit words, where they are matched."""
        bfloat16 = [buffer for buffer in buffers if str(buffer.dtype) == "bfloat16"]
        self.views = [(buffer, _as_words(buffer)) for buffer in bfloat16]

    def begin_task(self) -> None:
        """Nothing to prepare."""

    def end_task(self) -> None:
        """Nothing to give back."""

    def scope(self):
        """Open the scope in which the LLVM helpers are known."""
        return import_llvm(*self.llvm_helpers)

    def fma(self, total, a, b, lanes: int):
        """Return `total` and both products of every pair."""
        name = f"pagedkv_bf16_dot_{lanes}"
        return T.call_pure_extern(vector_type(F32, lanes), name, total, a, b)

    def fma_element(self, total, element, b):
        """Return what `fma` does for a pair, which is loaded from a buffer, and a whole vector."""
        name, result = "pagedkv_bf16_dot_scalar", vector_type(F32, self.lanes)
        return T.call_pure_extern(result, name, total, b, T.address_of(element))

    def load_q(self, buffer, index, lanes: int, factor):
        """`lanes` elements of Q."""
        return self.pairs(buffer, index, lanes)

    def load_rotated_q(self, row, element, lanes: int, factor):
        """`lanes` elements of a float32 row that was rotated."""
        return self.pack(row, element, lanes)

    def pack(self, row, element, lanes: int):
        """`lanes` elements of a float32 row, which is padded to whole vectors of pairs."""
        halves = [load(row, (element * 2 + start,), self.lanes) for start in (0, self.lanes)]
        pairs = self.round(*halves)
        return pairs if lanes == self.lanes else shuffle([pairs], range(lanes))

    def unpack(self, value) -> list:
        """The numbers of a vector of pairs, each as a float32 vector."""
        value = temp(value, self.lanes, INT32)
        upper = broadcast(T.int32(-65536), self.lanes)
        bits = (
            T.shift_left(value, broadcast(T.int32(16), self.lanes)),
            T.bitwise_and(value, upper),
        )
        return [temp(T.reinterpret(vector_type(F32, self.lanes), b), self.lanes) for b in bits]

    def repack(self, numbers: list):
        """The inverse of `unpack`, rounding to nearest even."""
        first, second = numbers
        pairs = vector_type(INT32, self.lanes)
        return T.call_pure_extern(pairs, "pagedkv_bf16_interleave", second, first)

    def split_words(self, first, second, lanes: int) -> tuple:
        """Pairs of numbers of two rows as pairs of rows: of the even numbers, of the odd ones."""
        sixteen, upper, lower = (broadcast(T.int32(x), lanes) for x in (16, -65536, 65535))
        return (
            T.bitwise_or(T.bitwise_and(first, lower), T.shift_left(second, sixteen)),
            T.bitwise_or(
                T.bitwise_and(T.shift_right(first, sixteen), lower), T.bitwise_and(second, upper)
            ),
        )

    def load_k(self, tile, row, element, lanes: int):
        """`lanes` elements of a row of K."""
        return self.pairs(*tile.k(row, element), lanes)

    def load_v(self, tile, rows, element, lanes: int) -> list:
        """Pairs of two rows of V: of the even columns of `lanes` elements, and of the odd ones."""
        words = [temp(self.pairs(*tile.v(row, element), lanes), lanes, INT32) for row in rows]
        return list(self.split_words(*words, lanes))

    def select(self, value, is_seen: Sequence, lanes: int):
        """A vector of pairs of V with zeros for the position of the pair that is not seen."""
        low, high = (
            T.Select(is_seen[n], T.int32(bits), T.int32(0)) for n, bits in ((0, 65535), (1, -65536))
        )
        return T.bitwise_and(value, broadcast(T.bitwise_or(low, high), lanes))

    def packed_v(self, tile, t: int, column, lanes: int, is_held: Sequence):
        """Rows `t` and ``t + 1`` of a tile of V in pairs, zeros for a row that is not held."""

        def word(n):
            buffer, (*outer, last) = tile.v(t + n, column)
            words = self._words(buffer)[(*outer, ramp(last, lanes))]
            number = T.cast(words, vector_type(INT32, lanes))
            zeros = broadcast(T.int32(0), lanes)
            return T.Select(is_held[n], number, zeros) if is_held else number

        high = T.shift_left(word(1), broadcast(T.int32(16), lanes))
        return T.bitwise_or(word(0), high)

    def store_numbers(self, buffer, row, vectors) -> None:
        """Store a row of a buffer of elements, as float32 vectors of its numbers in order."""
        for v in range(0, len(vectors), 2):
            at = (row, v // 2 * self.lanes)
            store(buffer, at, self.lanes, self.round(*vectors[v : v + 2]), INT32)

    def round(self, first, second):
        """Round two vectors of neighbouring numbers to one vector of pairs."""
        pairs = vector_type(INT32, self.lanes)
        return T.call_pure_extern(pairs, "pagedkv_bf16_round", second, first)

    def _words(self, buffer):
        return next(view for known, view in self.views if known.same_as(buffer))

    def pairs(self, buffer, index, lanes: int):
        """`lanes` elements of a buffer that `begin` was told of, at an index in elements."""
        *outer, element = index
        words = self._words(buffer)[(*outer, ramp(element * 2, 2 * lanes))]
        return T.reinterpret(vector_type(INT32, lanes), words)

    def store_pairs(self, buffer, index, lanes: int, value) -> None:
        """Store `lanes` elements as `pairs` loads them."""
        *outer, element = index
        words = T.reinterpret(vector_type(WORD, 2 * lanes), value)
        T.buffer_store(self._words(buffer), words, [*outer, ramp(element * 2, 2 * lanes)])


def _as_words(buffer):
    words = T.decl_buffer(
        buffer.shape,
        WORD,
        data=buffer.data,
        strides=list(buffer.strides) or None,
        elem_offset=buffer.elem_offset,
        align=2,
    )
    IRBuilder.name(f"{buffer.name}_words", words)
    return words


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
_NEON_HELPERS = """
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
_NEON_HELPERS += _rounding("round", range(8))
_NEON_HELPERS += _rounding("interleave", (0, 4, 1, 5, 2, 6, 3, 7))


class NeonPairs(PairOperands):
    """`PairOperands` for AArch64 with FEAT_BF16 (``bfdot``, ``bfmmla``): vectors of four pairs."""

    llvm_helpers = (_NEON_HELPERS,)
    broadcasts_from_memory = False
    steps = "matrices"
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


def are_pairs(spec: KernelSpec) -> bool:
    """Whether rows of Q can be pairs of bfloat16: both numbers of a pair have to rotate alike."""
    target = spec.target
    has_pairs = target.has_bf16_dot and target.lanes == PairOperands.lanes
    if not (target.has_bfdot or has_pairs):
        return False
    return spec.dtype == "bfloat16" and (spec.rope.rotary_dim % 4 == 0 or not has_rope(spec))


def pair_operands(target: VectorTarget) -> PairOperands:
    """Return the pairs of bfloat16 of a target."""
    return NeonPairs() if target.has_bfdot else PairOperands()
