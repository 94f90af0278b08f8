# SPDX-License-Identifier: Apache-2.0
"""Runs of elements between global memory and registers, 128 bits at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T

from ..define import ACCESS_BYTES
from ..spec import STORED_ITEMSIZE
from .emit import F32, U32, Registers, ptx

_SHORT = {"float16": "f16", "bfloat16": "bf16"}


def run_length(*extents: int) -> int:
    """Elements, at most 8, that a thread takes at once of rows that have starts and ends there."""
    return math.gcd(8, *extents)


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


def load_floats(buffer, index: Sequence, count: int) -> Registers:
    """Load `count` elements, widened to float32."""
    dtype = str(buffer.dtype)
    values, num_bytes = Registers(count, F32, "values"), count * STORED_ITEMSIZE[dtype]
    if num_bytes % 4:
        for i in range(count):
            values[i] = T.cast(buffer[(*index[:-1], index[-1] + i)], F32)
        return values
    words = Registers(num_bytes // 4, U32, "words")
    load_words(words, buffer, index, num_bytes)
    widen_words(words, dtype, values)
    return values


def widen_words(words: Registers, dtype: str, values: Registers, first: int = 0) -> None:
    """Widen the elements of words, to `values` from `first` on."""
    for i in range(words.count):
        if dtype == F32:
            values[first + i] = T.reinterpret(F32, words[i])
        else:
            unpack(words[i], dtype, values[first + 2 * i], values[first + 2 * i + 1])


def store_floats(buffer, index: Sequence, values: Registers) -> None:
    """Store elements, narrowed from float32."""
    dtype = str(buffer.dtype)
    num_bytes = values.count * STORED_ITEMSIZE[dtype]
    if num_bytes % 4:
        for i in range(values.count):
            T.buffer_store(buffer, T.cast(values[i], dtype), [*index[:-1], index[-1] + i])
        return
    words = Registers(num_bytes // 4, U32, "words")
    for i in range(num_bytes // 4):
        if dtype == F32:
            words[i] = T.reinterpret(U32, values[i])
        else:
            pack(words[i], dtype, values[2 * i], values[2 * i + 1])
    store_words(words, buffer, index, num_bytes)


def round_floats(values, row, count: int, dtype: str) -> None:
    """Round `count` float32 numbers of a row of registers to the nearest of a type."""
    if dtype == F32:
        return
    word = Registers(1, U32, "word")
    for j in range(0, count, 2):
        pair = [(row, j), (row, min(j + 1, count - 1))]
        pack(word[0], dtype, *(values[at] for at in pair))
        unpack(word[0], dtype, *(values[at] for at in pair))


def copy_elements(to, to_index: Sequence, of, of_index: Sequence, count: int) -> None:
    """Copy `count` elements; bit for bit where the types are the same."""
    num_bytes = count * STORED_ITEMSIZE[str(of.dtype)]
    if str(to.dtype) != str(of.dtype):
        store_floats(to, to_index, load_floats(of, of_index, count))
    elif num_bytes % 4:
        for i in range(count):
            value = of[(*of_index[:-1], of_index[-1] + i)]
            T.buffer_store(to, value, [*to_index[:-1], to_index[-1] + i])
    else:
        words = Registers(num_bytes // 4, U32, "words")
        load_words(words, of, of_index, num_bytes)
        store_words(words, to, to_index, num_bytes)


def pack(word, dtype: str, low, high) -> None:
    """Narrow two float32 numbers to one word."""
    ptx(f"cvt.rn.{_SHORT[dtype]}x2.f32", word, high, low)


def widen_bits(value, dtype: str, bits) -> None:
    """Widen a number given as uint16."""
    if dtype == "bfloat16":
        ptx("mov.b32", value, T.shift_left(T.cast(bits, U32), T.uint32(16)))
    else:
        ptx("cvt.f32.f16", value, bits)


def unpack(word, dtype: str, low, high) -> None:
    """Widen the two numbers of a word."""
    if dtype == "bfloat16":
        ptx("mov.b32", low, T.shift_left(word, T.uint32(16)))
        ptx("mov.b32", high, T.bitwise_and(word, T.uint32(0xFFFF0000)))
        return
    ptx("cvt.f32.f16", low, T.cast(T.bitwise_and(word, T.uint32(0xFFFF)), "uint16"))
    ptx("cvt.f32.f16", high, T.cast(T.shift_right(word, T.uint32(16)), "uint16"))
