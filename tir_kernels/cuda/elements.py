# SPDX-License-Identifier: Apache-2.0
"""Elements between global memory and registers, 128 bits at a time, and their narrowing."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ..define import ACCESS_BYTES
from ..gpu.registers import U32, Registers
from ..spec import STORED_ITEMSIZE
from .ptx import ptx

_SHORT = {"float16": "f16", "bfloat16": "bf16"}


def load_words(words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
    """Load 4 bytes or a multiple of them, which lie aligned to their number, up to 16 at once."""
    _access("ld.global", words, buffer, index, num_bytes)


def store_words(words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
    """The inverse of `load_words`."""
    _access("st.global", words, buffer, index, num_bytes)


def _access(name: str, words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
    *outer, last = index
    for start in range(0, num_bytes, ACCESS_BYTES):
        count = min(num_bytes - start, ACCESS_BYTES) // 4
        pointer = buffer.ptr_to([*outer, last + start // STORED_ITEMSIZE[str(buffer.dtype)]])
        registers = [words[start // 4 + i] for i in range(count)]
        operands = (*registers, pointer) if name.startswith("ld") else (pointer, *registers)
        ptx(f"{name}.v{count}.b32" if count > 1 else f"{name}.b32", *operands)


def pack(word, dtype: str, low, high) -> None:
    """Narrow two float32 values to one word."""
    ptx(f"cvt.rn.{_SHORT[dtype]}x2.f32", word, high, low)


def widen_bits(value, dtype: str, bits) -> None:
    """Widen a number given as uint16."""
    if dtype == "bfloat16":
        ptx("mov.b32", value, T.shift_left(T.cast(bits, U32), T.uint32(16)))
    else:
        ptx("cvt.f32.f16", value, bits)


def unpack(word, dtype: str, low, high) -> None:
    """Widen the two values of a word."""
    if dtype == "bfloat16":
        ptx("mov.b32", low, T.shift_left(word, T.uint32(16)))
        ptx("mov.b32", high, T.bitwise_and(word, T.uint32(0xFFFF0000)))
        return
    ptx("cvt.f32.f16", low, T.cast(T.bitwise_and(word, T.uint32(0xFFFF)), "uint16"))
    ptx("cvt.f32.f16", high, T.cast(T.shift_right(word, T.uint32(16)), "uint16"))
