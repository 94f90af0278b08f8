# SPDX-License-Identifier: Apache-2.0
"""What the kernels ask a kind of GPU for: launches, threads, arithmetic, memory, products.

A target implements `Isa` and `SharedMemory` in a module `isa` of its own folder, which `isa_of`
finds. Kernels never name a target, and they address shared memory by bytes, not by pointers.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tvm import tirx
from tvm.script import tirx as T

from ..codec import Codec
from ..spec import STORED_ITEMSIZE, GpuTarget
from ..vectors import broadcast, constant
from .registers import F32, U32, WARP, Registers, temp


@functools.cache
def isa_of(target: GpuTarget) -> Isa:
    """Return the instructions of a target."""
    return importlib.import_module(target.isa_module).isa_of(target)


@T.meta_class
class SharedMemory(ABC):
    """Memory that the threads of a block share.

    Places are offsets in bytes, multiples of the size of an access. A source in global memory is a
    buffer and the index of its first element.

    Attributes
    ----------
    isa : Isa
    """

    isa: Isa

    @abstractmethod
    def load(self, registers: Sequence, byte) -> None:
        """Load 1, 2 or 4 words, or a float32 value, to as many registers."""

    @abstractmethod
    def store(self, byte, *values) -> None:
        """Store what `load` loads."""

    @abstractmethod
    def load_half(self, byte):
        """Return 16 bits as uint32."""

    @abstractmethod
    def store_half(self, byte, bits) -> None:
        """Store the low 16 bits of a uint32."""

    @abstractmethod
    def load_element(self, byte, dtype: str):
        """Return an element, widened to float32."""

    @abstractmethod
    def copy(self, byte, source: tuple, size: int = 16, num_bytes=16) -> None:
        """Start to copy 4, 8 or 16 bytes, or zeros where `num_bytes` is 0 and not `size`.

        `Isa.commit_copies` and `Isa.wait_for_copies` tell when they have arrived. A target without
        asynchronous copies copies here, and these two do nothing.
        """


class Isa(ABC):
    """The instructions of a target; `temp` and those with `lanes` serve `semantics` as arithmetic.

    Parameters
    ----------
    target : GpuTarget
    """

    # Whether one thread stores what all threads of a block hold, and a barrier follows. Without
    # it all threads store the same, which saves the registers that a barrier costs.
    stores_once: bool = True
    shared_scope: str = "shared"  # of arrays in shared memory that are indexed

    def __init__(self, target: GpuTarget):
        self.target = target

    # ---- Launches --------------------------------------------------------------------------------

    @abstractmethod
    def launch(
        self, grid: Sequence, num_threads: int, min_blocks: int = 0, waits: bool = True
    ) -> AbstractContextManager[tuple]:
        """Return a kernel: what is emitted within runs on the device, once for each thread.

        Blocks may start before the previous kernel has ended. They wait until all of its writes
        are visible and write nothing before that, so a kernel that waits for its predecessor waits
        for all earlier kernels. The int32 arrays of a step can be read at once.

        Parameters
        ----------
        grid : up to three int32 expressions
            One block is launched for an extent of 0: the kernel has to see that it has nothing to
            do.
        num_threads : int
            Threads of a block.
        min_blocks : int
            Blocks that shall fit into a multiprocessor, for the allocation of registers; 0: any
            number.
        waits : bool
            Whether the kernel waits first. If not, all of its threads call
            `wait_for_kernels_before` after they have read int32 arrays, and nothing else.

        Yields
        ------
        blocks : tuple of int32 expressions, as many as `grid` has
        thread : int32 expression
        """

    @abstractmethod
    def wait_for_kernels_before(self) -> None:
        """Wait until the kernels before have ended, and all that they wrote can be seen."""

    @abstractmethod
    def workspace(self, shape: Sequence, name: str) -> AbstractContextManager:
        """Return a float32 buffer in global memory, for the kernels that are launched within."""

    @abstractmethod
    def block_shared_bytes(self):
        """Return the shared memory that a block may have on the device: the same in all calls."""

    @abstractmethod
    def resident_blocks(self, shared_bytes: int, max_per_sm: int, num_slices: int = 1):
        """Return how many blocks the GPU holds at a time, at least one: the same in all calls.

        Parameters
        ----------
        shared_bytes : int
            Of a block.
        max_per_sm : int
            Blocks for which a multiprocessor has registers.
        num_slices : int
            Blocks that take slices of the same rows, and count as one.
        """

    def wide(self, value):
        """Return an integer in the type of those that may exceed 32 bits.

        KV tiles of a batch are pages times KV heads, or tiles of rows times tiles of positions.
        Pages that sequences share count once for each, so they may exceed 32 bits though the pool
        does not. So may numbers of rows times their sizes. Offsets of elements need no cast:
        buffers have an `elem_offset` of 64 bits.
        """
        dtype = self.target.wide_dtype
        return tirx.const(value, dtype) if isinstance(value, int) else T.cast(value, dtype)

    def wide_variable(self):
        """Declare a variable for such an integer."""
        return T.local_scalar(self.target.wide_dtype)

    # ---- Threads ---------------------------------------------------------------------------------

    @abstractmethod
    def sync_block(self) -> None:
        """Emit a barrier of all threads of a block."""

    @abstractmethod
    def sync_warp(self) -> None:
        """Emit a barrier of all threads of a warp, `WARP` threads side by side."""

    def tile_barrier(self, tiling) -> Callable[[], None]:
        """Return the barrier of a block after which products see tiles that were stored."""
        return self.sync_block

    @abstractmethod
    def any_of(self, condition):
        """Return whether the condition holds in any lane of a warp: the same in all of them."""

    @abstractmethod
    def shuffle_up(self, value, distance):
        """Return the value of the lane `distance` before."""

    @abstractmethod
    def shuffle_from(self, value, lane):
        """Return the value of a lane."""

    @abstractmethod
    def shuffle_xor(self, value, mask):
        """Return the value of the lane whose number differs in the bits of `mask`."""

    def in_all_lanes(self, value):
        """Return a value that all lanes have: so the compiler, too, knows that they are equal."""
        return self.shuffle_from(value, 0)

    def over_lanes(self, value, combine: Callable, lanes: int = WARP):
        """Combine the values of so many lanes next to each other; all of them have the result."""
        value, mask = temp(value, 1, str(value.ty.dtype)), 1
        while mask < lanes:
            value = temp(combine(value, self.shuffle_xor(value, mask)), 1, str(value.ty.dtype))
            mask *= 2
        return value

    # ---- Arithmetic ------------------------------------------------------------------------------

    temp, broadcast, constant = staticmethod(temp), staticmethod(broadcast), staticmethod(constant)

    @abstractmethod
    def fused_multiply_add(self, a, b, c, lanes: int = 1):
        """Return ``a * b + c`` rounded once, or where a target has no such instruction, twice."""

    def multiply_add(self, a, b, c, lanes: int = 1):
        """Return ``a * b + c``, rounded as the target does fastest."""
        return self.fused_multiply_add(a, b, c, lanes)

    @staticmethod
    def at_least(x, bound: float, lanes: int = 1):
        """Return the larger of `x` and a constant; NaN stays NaN."""
        return T.Select(x < T.float32(bound), T.float32(bound), x)

    @staticmethod
    def at_most(x, bound: float, lanes: int = 1):
        """Return the smaller of `x` and a constant; NaN stays NaN."""
        return T.Select(x > T.float32(bound), T.float32(bound), x)

    @abstractmethod
    def rint(self, x, lanes: int = 1):
        """Return the nearest whole number, as a float; even ones at ties."""

    @abstractmethod
    def exp2(self, x, lanes: int = 1):
        """Return ``2 ** x``; relative error 2e-7, 0 where it would be subnormal."""

    @abstractmethod
    def log2(self, x):
        """Return the base-2 logarithm; absolute error 1e-7 between 0.5 and 2, else relative."""

    @abstractmethod
    def divide(self, a, b):
        """Return ``a / b`` rounded to nearest."""

    @abstractmethod
    def lookup(self, values: Sequence[float], i, dtype: str = F32):
        """Return element `i`, any expression, of a table of constants."""

    @abstractmethod
    def opaque(self, value):
        """Return an int32 value that the compiler takes for another one each time it gets here."""

    # ---- Elements in global memory ---------------------------------------------------------------

    @abstractmethod
    def load_words(self, words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
        """Load a multiple of 4 bytes, which lie aligned to their number, up to 16 at once."""

    @abstractmethod
    def store_words(self, words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
        """Store what `load_words` loads."""

    @abstractmethod
    def pack(self, word, dtype: str, low, high) -> None:
        """Narrow two float32 values to the halves of a word."""

    @abstractmethod
    def unpack(self, word, dtype: str, low, high) -> None:
        """Widen the halves of a word."""

    def load_floats(self, buffer, index: Sequence, count: int) -> Registers:
        """Load `count` elements, widened to float32."""
        dtype = str(buffer.dtype)
        values, num_bytes = Registers(count, F32, "values"), count * STORED_ITEMSIZE[dtype]
        if num_bytes % 4:
            for i in range(count):
                values[i] = T.cast(buffer[(*index[:-1], index[-1] + i)], F32)
            return values
        words = Registers(num_bytes // 4, U32, "words")
        self.load_words(words, buffer, index, num_bytes)
        self.widen_words(words, dtype, values)
        return values

    def widen_words(self, words: Registers, dtype: str, values: Registers, first: int = 0) -> None:
        """Widen the elements of words, to `values` from `first` on."""
        for i in range(words.count):
            if dtype == F32:
                values[first + i] = T.reinterpret(F32, words[i])
            else:
                self.unpack(words[i], dtype, values[first + 2 * i], values[first + 2 * i + 1])

    def store_floats(self, buffer, index: Sequence, values: Registers) -> None:
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
                self.pack(words[i], dtype, values[2 * i], values[2 * i + 1])
        self.store_words(words, buffer, index, num_bytes)

    def round_floats(self, values, row, count: int, dtype: str) -> None:
        """Round `count` float32 values of a row of registers to a type."""
        if dtype == F32:
            return
        word = Registers(1, U32, "word")
        for j in range(0, count, 2):
            pair = [(row, j), (row, min(j + 1, count - 1))]
            self.pack(word[0], dtype, *(values[at] for at in pair))
            self.unpack(word[0], dtype, *(values[at] for at in pair))

    def copy_elements(self, to, to_index: Sequence, of, of_index: Sequence, count: int) -> None:
        """Copy `count` elements; bit for bit where the types are the same."""
        num_bytes = count * STORED_ITEMSIZE[str(of.dtype)]
        if str(to.dtype) != str(of.dtype):
            self.store_floats(to, to_index, self.load_floats(of, of_index, count))
        elif num_bytes % 4:
            for i in range(count):
                value = of[(*of_index[:-1], of_index[-1] + i)]
                T.buffer_store(to, value, [*to_index[:-1], to_index[-1] + i])
        else:
            words = Registers(num_bytes // 4, U32, "words")
            self.load_words(words, of, of_index, num_bytes)
            self.store_words(words, to, to_index, num_bytes)

    # ---- Shared memory ---------------------------------------------------------------------------

    @abstractmethod
    def shared_memory(self, num_bytes: int, align: int = 128) -> SharedMemory:
        """Allocate the shared memory of a block."""

    @abstractmethod
    def commit_copies(self) -> None:
        """Close the group of the copies since the last one."""

    @abstractmethod
    def wait_for_copies(self, groups_left: int) -> None:
        """Wait for all groups of this thread but the last ones."""

    # ---- Codes of quantized pages ----------------------------------------------------------------

    @abstractmethod
    def widened_dtype(self, dtype: str) -> str:
        """Return the 16-bit type that `widen_codes` gives on the way to `dtype`."""

    @abstractmethod
    def scale_of_codes(self, codec: Codec, dtype: str) -> float:
        """Return what a widened code of 1.0 in `dtype` has to be multiplied by."""

    @abstractmethod
    def widen_codes(self, codec: Codec, dtype: str, word, side=0) -> list:
        """Return the two words of 16-bit values that four bytes of codes stand for, in order.

        Parameters
        ----------
        codec : Codec
        dtype : {"float16", "bfloat16"}
        word : uint32 expression
        side : {0, 1} or int32 expression
            With 4 bits: the low or the high bits of the bytes.
        """

    @abstractmethod
    def multiply_pairs(self, dtype: str, a, b):
        """Return the products of two words of 16-bit values."""

    # ---- Products --------------------------------------------------------------------------------

    @abstractmethod
    def decode_products(self, tiling, q, pipeline, warp_row, lane):
        """Return what multiplies the query rows of a warp with tiles of K and V.

        Products have the methods of `tiles.multiply_adds.MultiplyAdds`, which any target may use.

        Parameters
        ----------
        tiling : DecodeTiling
        q : SharedTiles
        pipeline : KvPipeline
        warp_row : int32 expression
            The warp's first row of Q.
        lane : int32 expression
        """

    @abstractmethod
    def tile_products(self, tiling, q, k, v, rows):
        """Return what multiplies the rows of a tile of Q with tiles of K and V.

        Parameters
        ----------
        tiling : Tiling
        q, k, v : SharedTiles
        rows : QueryRows
        """
