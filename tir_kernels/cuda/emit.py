# SPDX-License-Identifier: Apache-2.0
"""Building blocks of device code: registers, instructions, barriers, launches.

Plain Python functions that emit TIR. A register is a small buffer in the scope "local", whose loops
are unrolled, so that the compiler keeps it where its name says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

F32, U32, I32, I64 = "float32", "uint32", "int32", "int64"
WARP = 32


@contextmanager
def launch(grid: Sequence, num_threads: int, min_blocks: int = 0, waits: bool = True):
    """A kernel: what is emitted within runs on the device, once for each thread.

    From compute capability 9.0 on, blocks of a kernel may start before the previous kernel has
    ended. They wait until all of its writes are visible and write nothing before that, so a kernel
    that waits for its predecessor waits for all earlier kernels.

    The int32 arrays of a step can be read at once: they are copied before the first kernel that
    reads them, and a copy, unlike a kernel, has ended when the next operation of its stream begins.

    Parameters
    ----------
    grid : up to three int32 expressions
        One block is launched for an extent of 0: the kernel has to see that it has nothing to do.
    num_threads : int
        Threads of a block.
    min_blocks : int
        Blocks that shall fit into a multiprocessor, for the allocation of registers; 0: any number.
    waits : bool
        Whether the kernel waits first. If not, all of its threads call `wait_for_kernels_before`
        after they have read int32 arrays, and nothing else.

    Yields
    ------
    blocks : tuple of int32 expressions, as many as `grid` has
    thread : int32 expression
    """
    with T.attr(0, "tirx.device_entry", True):
        # Or the compiler takes `block < extent` for certain.
        blocks = T.cta_id([e if isinstance(e, int) else T.max(e, 1) for e in grid])
        thread = T.thread_id([num_threads])
        bound = T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", min_blocks or 1)
        with bound if min_blocks else nullcontext():
            _control_grids("let_next_begin", "launch_dependents")
            if waits:
                wait_for_kernels_before()
            yield tuple(blocks) if len(grid) > 1 else (blocks,), thread


def wait_for_kernels_before() -> None:
    """Wait until the kernels before have ended, and all that they wrote can be seen."""
    _control_grids("wait_for_before", "wait")


def _control_grids(name: str, operation: str) -> None:
    """Emit ``griddepcontrol``, which chips before 9.0 have not."""
    source = (
        f"__device__ __forceinline__ void pagedkv_{name}() {{\n"
        "#if __CUDA_ARCH__ >= 900\n"
        f'  asm volatile("griddepcontrol.{operation};" ::: "memory");\n'
        "#endif\n"
        "}\n"
    )
    T.evaluate(T.cuda.func_call(f"pagedkv_{name}", source_code=source))


def ptx(instruction: str, *operands) -> None:
    """Emit an instruction of the PTX ISA; destinations first."""
    T.evaluate(T.ptx[instruction](*operands))


def sync_block() -> None:
    """A barrier of all threads of a block."""
    T.evaluate(T.cuda.cta_sync())


def sync_block_and_copies() -> None:
    """A barrier of a block, behind which matrix instructions see what it has stored or copied.

    They read shared memory by another way than loads and stores, the "async proxy" of the PTX ISA.
    """
    ptx("fence.proxy.async.shared::cta")
    sync_block()


def sync_warp() -> None:
    """A barrier of all threads of a warp."""
    T.evaluate(T.cuda.warp_sync())


class Registers:
    """An array of registers of a thread.

    Parameters
    ----------
    count : int
    dtype : str
    name : str
        In the generated code.
    """

    def __init__(self, count: int, dtype: str, name: str = "r"):
        self.count = count
        # The default layout says the same as none, and takes longer to make than the buffer.
        buffer = T.alloc_buffer((count,), dtype, scope="local", layout=None)
        self.buffer = IRBuilder.name(name, buffer)

    @classmethod
    def of(cls, buffer) -> Registers:
        """Take registers that a component or a kernel has allocated."""
        registers = object.__new__(cls)
        registers.count, registers.buffer = int(buffer.shape[0]), buffer
        return registers

    def __getitem__(self, i):
        return self.buffer[i]

    def __setitem__(self, i, value) -> None:
        T.buffer_store(self.buffer, value, [i])

    def fill(self, value) -> None:
        """Set all to one value."""
        with T.unroll(self.count) as i:
            self[i] = value


def temp(value, lanes: int = 1, dtype: str = F32):
    """Materialise `value`, so that later uses do not repeat its expression."""
    register = Registers(lanes, dtype, "t")
    register[0] = value
    return register[0]


def index_temp(value):
    """Materialise an int32 value."""
    return temp(value, 1, I32)


def as_count(value):
    """The one cast for counts of work, in 64 bits.

    KV tiles of a batch are pages times KV heads, or tiles of rows times tiles of positions.
    Pages that sequences share count once for each, so they may exceed 32 bits though the pool does
    not. Offsets of elements need no cast: buffers have an `elem_offset` of 64 bits.
    """
    return T.cast(value, I64)


def opaque(value):
    """An int32 value that the compiler takes for another one each time it gets here."""
    register = Registers(1, I32, "opaque")
    ptx("mov.b32", register[0], value)
    return register[0]


class Variable:
    """A variable of a thread."""

    def __init__(self, value, dtype: str = I32, name: str = "x"):
        self.register = Registers(1, dtype, name)
        self.set(value)

    def get(self):
        """Its value."""
        return self.register[0]

    def set(self, value) -> None:
        """Give it another value."""
        self.register[0] = value
