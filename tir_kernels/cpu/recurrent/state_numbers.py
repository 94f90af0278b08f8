# SPDX-License-Identifier: Apache-2.0
"""The numbers of recurrent states: float32 in registers, of a narrower type in pages.

A state is rounded after each token. So it has the same bits however its tokens came, whether the
next one finds it in a register, in a tile or in a page.
"""

from tvm.script import tirx as T

from ...vectors import load as load_vector
from ...vectors import store as store_vector
from ..isa.simd import F32, broadcast, round_safe, vector_type

BF16, WORD = "bfloat16", "uint16"
_HALF_UNIT = 0x8000  # of bfloat16, whose bits are the upper half of those of float32


def words_of(states):
    """Return bfloat16 states as words, which a shift widens and narrows, and others as they are."""
    if str(states.dtype) != BF16:
        return states
    return T.decl_buffer(
        states.shape, WORD, data=states.data, elem_offset=states.elem_offset, align=2, layout=None
    )


def load_numbers(buffer, index, lanes: int):
    """Load numbers of a state as float32."""
    if str(buffer.dtype) != WORD:
        return load_vector(buffer, index, lanes)
    bits = T.cast(load_vector(buffer, index, lanes, WORD), vector_type("uint32", lanes))
    bits = T.shift_left(bits, broadcast(T.uint32(16), lanes))
    return T.reinterpret(vector_type(F32, lanes), bits)


def store_numbers(buffer, index, lanes: int, value) -> None:
    """Store float32 numbers, which `rounded` has returned, in a state."""
    dtype = str(buffer.dtype)
    if dtype == WORD:
        bits = T.reinterpret(vector_type("uint32", lanes), value)
        bits = T.shift_right(bits, broadcast(T.uint32(16), lanes))
        value = T.cast(bits, vector_type(WORD, lanes))
    elif dtype != F32:
        value = T.cast(value, vector_type(dtype, lanes))
    store_vector(buffer, index, lanes, value)


def rounded(value, dtype: str, lanes: int):
    """Round numbers to the nearest of a type, as float32; ties of bfloat16 go away from zero.

    Half a unit is added to the bits of bfloat16, which might carry out of the fraction of a NaN:
    what comes from a token must be `safe` first.
    """
    if dtype == F32:
        return value
    if dtype != BF16:
        return T.cast(T.cast(value, vector_type(dtype, lanes)), vector_type(F32, lanes))
    bits = T.reinterpret(vector_type("uint32", lanes), value)
    bits = bits + broadcast(T.uint32(_HALF_UNIT), lanes)
    bits = T.bitwise_and(bits, broadcast(T.uint32(0xFFFF0000), lanes))
    return T.reinterpret(vector_type(F32, lanes), bits)


def safe(value, dtype: str, lanes: int):
    """Return numbers of a token whose NaN stay NaN in states of type `dtype`."""
    return round_safe(value, lanes) if dtype == BF16 else value
