# SPDX-License-Identifier: Apache-2.0
"""Codes of quantized rows, widened to pairs of float16 or bfloat16 values in registers.

Codes become values without a conversion instruction: the bits of a code are put into the mantissa
of a power of two that is as large as the codes' range, and that power is subtracted. An 8-bit
floating-point number has its exponent and mantissa shifted to where a wider one has them. All
results are exact.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...codec import Codec
from ...gpu.registers import U32, Registers
from ..ptx import SHORT_TYPES, ptx

_ONE = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}
_ZERO = 0x80008000  # minus zero, which changes no number that it is added to
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors of `permute`


def _u32(value: int):
    return T.uint32(value)


def permute(low, high, selector: int):
    """Four bytes of ``low, high``, by the digits of the selector, the lowest first."""
    word = Registers(1, U32, "permuted")
    ptx("prmt.b32", word[0], low, high, _u32(selector))
    return word[0]


def _fma(dtype: str, a, b, c):
    """``a * b + c`` of two pairs, rounded once."""
    word = Registers(1, U32, "pair")
    ptx(f"fma.rn.{SHORT_TYPES[dtype]}x2", word[0], a, b, c)
    return word[0]


def multiply_pairs(dtype: str, a, b):
    """The products of two pairs."""
    return _fma(dtype, a, b, _u32(_ZERO))


def narrow_dtype(dtype: str) -> str:
    """The 16-bit type that codes are widened to on the way to `dtype`."""
    return "float16" if dtype == "float32" else dtype


def code_scale(codec: Codec, dtype: str) -> float:
    """Return what a widened code of 1.0 in `dtype` has to be multiplied by."""
    is_float = codec.storage_dtype == "uint8" and codec.bits == 8
    return 256.0 if is_float and narrow_dtype(dtype) == "float16" else 1.0


def widen(codec: Codec, dtype: str, word, side=0) -> list:
    """Widen the codes in the four bytes ``b0 .. b3`` of a word.

    Parameters
    ----------
    codec : Codec
    dtype : {"float16", "bfloat16"}
    word : uint32 expression
    side : {0, 1} or int32 expression
        Of packed codes: those of the low bits, or of the high ones.

    Returns
    -------
    list of two uint32 expressions
        Pairs of `dtype`: those of ``b0, b2`` and of ``b1, b3``.
    """
    if codec.is_packed:
        (plane,) = codec.planes
        shifts = [T.cast(T.int32(plane.num_bits) * side + bits, U32) for bits in (0, 8)]
        return [_stored_codes(codec, dtype, T.shift_right(word, shift)) for shift in shifts]
    if codec.storage_dtype == "uint8":
        return [_floats(dtype, bytes_) for bytes_ in (T.shift_left(word, _u32(8)), word)]
    return [_integers(dtype, bytes_) for bytes_ in (word, T.shift_right(word, _u32(8)))]


def widen_in_order(codec: Codec, dtype: str, word, side=0) -> list:
    """Widen as `widen`, to pairs in the order of the bytes."""
    pairs = widen(codec, dtype, word, side)
    return [permute(*pairs, selector) for selector in (LOW_HALVES, HIGH_HALVES)]


def _stored_codes(codec: Codec, dtype: str, word):
    """The codes whose bits are the lowest of each half."""
    (plane,) = codec.planes
    magic = {"float16": 0x6400, "bfloat16": 0x4300}[dtype]  # 1024, and 128
    minus = magic + 0x8000 - codec.lowest
    stored = T.bitwise_and(word, _u32(plane.mask * 0x10001))
    pair = T.bitwise_or(stored, _u32(magic * 0x10001))
    return _fma(dtype, pair, _u32(_ONE[dtype]), _u32(minus * 0x10001))


def _integers(dtype: str, word):
    """The low byte of each half, which is signed."""
    if dtype == "float16":  # 1024 + 128 + code
        pair = T.bitwise_xor(T.bitwise_and(word, _u32(0x00FF00FF)), _u32(0x64806480))
        return _fma(dtype, pair, _u32(_ONE[dtype]), _u32(0xE480E480))
    # bfloat16 has room for seven bits: 128 + these, less 128, or less 256 for a negative code.
    low, sign = (
        T.bitwise_or(T.bitwise_and(word, _u32(mask)), _u32(0x43004300))
        for mask in (0x007F007F, 0x00800080)
    )
    return _fma(dtype, sign, _u32(0xBF80BF80), low)


def _floats(dtype: str, word):
    """The high byte of each half; a code that is no number becomes one."""
    sign = T.bitwise_and(word, _u32(0x80008000))
    if dtype == "float16":  # an exponent that is too small by 8; see `code_scale`
        rest = T.bitwise_and(T.shift_right(word, _u32(1)), _u32(0x3F803F80))
        return T.bitwise_or(rest, sign)
    rest = T.bitwise_and(T.shift_right(word, _u32(4)), _u32(0x07F007F0))
    return multiply_pairs(dtype, T.bitwise_or(rest, sign), _u32(0x7B807B80))  # 2 ** 120
