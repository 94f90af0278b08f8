# SPDX-License-Identifier: Apache-2.0
"""SIMD fragments: plain Python functions that emit TIR while a kernel is parsed.

Rules that these fragments encode (each costs a factor when broken):

* A register is its own small buffer in the default scope; LLVM turns it into an SSA value.
  Scope "local" would become a heap workspace on the CPU.
* Temporaries go through such buffers as well, never through chained lets: the code generator
  substitutes bound variables into later ones, which is exponential.
* Shuffle indices are Python constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder.utils import _FrameScope

from ... import vectors
from ...codec import CODECS
from ...spec import ITEMSIZE, KernelSpec, VectorTarget
from ...vectors import F32, Chunk, broadcast, constant, ramp, vector_type
from ...vectors import chunks as chunks
from ...vectors import load as load

CACHE_LINE_BYTES = 64
# Prefetches ask for L2: for L1 they would wait for its few miss buffers, which halves the rate of
# scattered pages.
INTO_L2, INTO_L1 = 2, 3

# The polynomial of degree 4 with p(0) = 1 that is nearest to 2**f on [-0.5, 0.5] by relative error,
# which is at most 2.8e-6.
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931241932262163,
    0.24024098617707496,
    0.05590642620117539,
    0.009582853221272234,
)


class Register:
    """A mutable SIMD register of `lanes` elements of `dtype`."""

    def __init__(self, lanes: int, dtype: str = F32, init=None):
        self.lanes = lanes
        # The default layout says the same as none, and takes longer to make than the buffer.
        self.buffer = T.alloc_buffer((lanes,), dtype, layout=None)
        if init is not None:
            self.set(init)

    def get(self):
        """The current value."""
        return self.buffer[ramp(0, self.lanes)]

    def set(self, value) -> None:
        """Replace the value."""
        T.buffer_store(self.buffer, value, [ramp(0, self.lanes)])

    def fma(self, a, b) -> None:
        """Add ``a * b``; LLVM contracts it to a fused multiply-add."""
        self.set(self.get() + a * b)


def temp(value, lanes: int = 1, dtype: str = F32):
    """Materialise `value`, so that later uses do not repeat its expression tree."""
    return Register(lanes, dtype, init=value).get()


def index_temp(value):
    """Materialise an int32 scalar."""
    return temp(value, 1, "int32")


def wide_temp(value):
    """Materialise an int64 scalar, for counts and offsets that may exceed 32 bits."""
    return temp(T.cast(value, "int64"), 1, "int64")


def store(buffer, index: Sequence, lanes: int, value, source: str = F32) -> None:
    """Narrow `value` from `source` to the buffer's type and store it at `index`."""
    dtype = str(buffer.dtype)
    if dtype != source:
        if dtype == "bfloat16":
            value = round_safe(value, lanes)
        value = T.cast(value, vector_type(dtype, lanes))
    vectors.store(buffer, index, lanes, value)


def store_row(
    buffer, row: Sequence, width: int, lanes: int, value: Callable, source: str = F32
) -> None:
    """Store `width` columns of a row, vectors ``value(column, lanes)`` of type `source`."""
    for start, count in chunks(width, lanes):
        store(buffer, (*row, start), count, value(start, count), source)


def round_safe(value, lanes: int):
    """A float32 vector whose NaN can be rounded to bfloat16 as numbers are.

    TVM rounds by an addition to the bits, which carries out of the fraction of some NaN and turns
    it into a zero.
    """
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    bits = temp(T.reinterpret(int_type, value), lanes, "int32")
    if lanes > 1:
        magnitude = T.bitwise_and(bits, broadcast(T.int32(0x7FFFFFFF), lanes))
    else:  # TVM 0.26 takes this mask of a scalar for a remainder by a number beyond int32
        doubled = T.shift_left(T.reinterpret("uint32", bits), T.uint32(1))
        magnitude = T.cast(T.shift_right(doubled, T.uint32(1)), "int32")
    is_nan = magnitude > broadcast(T.int32(0x7F800000), lanes)
    quiet = broadcast(T.int32(0x7FC00000), lanes)
    return T.reinterpret(float_type, T.Select(is_nan, quiet, bits))


def rounded(value, lanes: int, dtype: str):
    """A float32 vector rounded to the numbers of a type, as `store` rounds them.

    The bits are rounded here for bfloat16: TVM would keep such a vector in float32.
    """
    if dtype == F32:
        return value
    if dtype != "bfloat16":
        return T.cast(T.cast(value, vector_type(dtype, lanes)), vector_type(F32, lanes))
    int_type = vector_type("int32", lanes)
    bits = temp(T.reinterpret(int_type, round_safe(value, lanes)), lanes, "int32")
    sixteen, one, half = (broadcast(T.int32(x), lanes) for x in (16, 1, 0x7FFF))
    is_odd = T.bitwise_and(T.shift_right(bits, sixteen), one)
    bits = T.bitwise_and(bits + half + is_odd, broadcast(T.int32(-65536), lanes))
    return T.reinterpret(vector_type(F32, lanes), bits)


def import_llvm(*functions: str) -> _FrameScope:
    """Make LLVM functions known from here on: a statement of a kernel."""
    return _FrameScope([T.attr(T.int32(0), "pragma_import_llvm", text) for text in functions])


def shuffle(vectors: Sequence, lanes: Sequence[int]):
    """Pick `lanes` (Python ints) from the concatenation of `vectors`."""
    return T.Shuffle(list(vectors), [T.int32(i) for i in lanes])


def reduce_lanes(value, lanes: int, combine: Callable, dtype: str = F32):
    """Reduce a vector to a scalar by halving."""
    while lanes > 1:
        value = temp(value, lanes, dtype)
        half = lanes // 2
        value = combine(shuffle([value], range(half)), shuffle([value], range(half, lanes)))
        lanes = half
    return temp(value, 1, dtype)


def add(a, b):
    """Sum, as a combiner for `reduce_lanes`."""
    return a + b


def maximum(a, b):
    """Maximum, as a combiner for `reduce_lanes`."""
    return T.max(a, b)


def at_least(x, bound: float, lanes: int):
    """The larger of `x` and a constant; NaN stays NaN.

    `T.max` gives its second operand where the first one is not greater, as the instruction of x86
    does, so NaN has to be the second one. `at_most` does the same.
    """
    return T.max(constant(bound, lanes), x)


def at_most(x, bound: float, lanes: int):
    """The smaller of `x` and a constant; NaN stays NaN."""
    return T.min(constant(bound, lanes), x)


def exp2(x, lanes: int):
    """``2 ** x`` for ``x <= 0``; relative error 3e-6 from -126 on, about ten instructions.

    It is 0 from -127 down, where the exponent field of 1.0 becomes that of 0.0, and wrong by less
    than ``2 ** -126`` in between. NaN stays NaN: converted to an integer it is one whose low bits
    are 0 (x86: the smallest number, AArch64: 0), so nothing is added to its bits.
    """
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    x = temp(at_least(x, -127.0, lanes), lanes)
    whole = temp(rint(x, lanes), lanes)
    fraction = temp(x - whole, lanes)
    power = constant(_EXP2_COEFFICIENTS[-1], lanes)
    for c in reversed(_EXP2_COEFFICIENTS[:-1]):
        power = power * fraction + constant(c, lanes)
    exponent = T.shift_left(T.cast(whole, int_type), broadcast(T.int32(23), lanes))
    return temp(T.reinterpret(float_type, T.reinterpret(int_type, power) + exponent), lanes)


def rint(x, lanes: int):
    """The nearest whole number, as a float; even ones at ties."""
    return T.call_llvm_pure_intrin(vector_type(F32, lanes), "llvm.rint", x)


def multiply_add(a, b, c, lanes: int):
    """``a * b + c``, rounded once where the CPU can.

    LLVM may fuse a sum of products as it likes, here and there differently. This intrinsic keeps
    the bits of a state independent of how its tokens are cut into calls.
    """
    return T.call_llvm_pure_intrin(vector_type(F32, lanes), "llvm.fmuladd", a, b, c)


def fused_multiply_add(a, b, c, lanes: int):
    """``a * b + c`` rounded once on every target, if need be by a library call."""
    return T.call_llvm_pure_intrin(vector_type(F32, lanes), "llvm.fma", a, b, c)


def literal(values: Sequence[float], dtype: str = F32):
    """A vector of constants."""
    scalars = [tirx.const(float(v), dtype) for v in values]
    return scalars[0] if len(scalars) == 1 else shuffle(scalars, range(len(scalars)))


def prefetch(buffer, index: Sequence, locality: int = INTO_L2) -> None:
    """Ask for the cache line that holds ``buffer[index]``."""
    address = T.address_of(buffer[tuple(index)])
    T.evaluate(
        T.call_intrin("void", "tirx.prefetch", address, T.int32(0), T.int32(locality), T.int32(1))
    )


def elements_per_line(dtype: str) -> int:
    """Elements of `dtype` in a cache line; codes, if it names a codec: a power of two."""
    if dtype in CODECS:
        return 1 << (CACHE_LINE_BYTES * 8 // CODECS[dtype].bits).bit_length() - 1
    return CACHE_LINE_BYTES // ITEMSIZE[dtype]


def for_chunks(width: int, lanes: int, body: Callable[[int, int], None]) -> None:
    """Emit ``body(start, lanes)`` for the vectors of a row."""
    for chunk in chunks(width, lanes):
        body(chunk.start, chunk.lanes)


def steps(width: int, lanes: int, per_step: int) -> Iterator[tuple[object, list[Chunk]]]:
    """Yield ``(first_column, chunks)`` of steps of `per_step` vectors, then of the rest.

    Chunks of a step start at columns relative to `first_column`.
    """
    step = per_step * lanes
    whole = width // step
    if whole == 1:
        yield 0, chunks(step, lanes)
    elif whole > 1:
        with T.serial(whole) as i:
            yield i * step, chunks(step, lanes)
    if width % step:
        yield whole * step, chunks(width % step, lanes)


def require_half_conversion(spec: KernelSpec, *dtypes: str) -> None:
    """Refuse float16 where every element would be a library call."""
    require_half_target(spec.target, dtypes, f"dtype={spec.dtype}, kv_dtype={spec.kv_dtype}")


def require_half_target(target: VectorTarget, dtypes: Sequence[str], got: str) -> None:
    """Do what `require_half_conversion` does, for kernels without a `KernelSpec`."""
    if "float16" in dtypes and not target.has_f16_convert:
        raise ValueError(
            "float16 needs a CPU target that converts float16 in hardware (F16C, AVX-512F or "
            f"AArch64), got {got}, has_f16_convert=False"
        )
