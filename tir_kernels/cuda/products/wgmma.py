# SPDX-License-Identifier: Apache-2.0
"""Products of tiles by four warps together: ``wgmma``, float16 or bfloat16 to float32.

The four warps are a warpgroup, of 64 rows. Matrices come from shared tiles, which descriptors tell
the instructions, and the weights from registers. A thread holds products as with `mma`.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...gpu.registers import U32, Registers
from ...gpu.tiles.shared_tiles import BANK_ROWS, CHUNK_BYTES, SharedTiles
from ...script import inline
from ..ptx import SHORT_TYPES, ptx
from .mma import STEP

_UNIT = 16  # bytes, in which descriptors count
_ATOM_BYTES = BANK_ROWS * BANK_ROWS * CHUNK_BYTES  # eight rows of a slab
_STEP_BYTES = STEP * 2  # of a row
_STEPS_OF_SLAB = BANK_ROWS * CHUNK_BYTES // _STEP_BYTES
# Of all descriptors: from eight rows to the next ones, and the swizzle.
_HIGH_WORD = _ATOM_BYTES // _UNIT | 1 << 30
_K, _V = 0, 1  # operands from the right


def _pin(registers, constraint: str) -> None:
    """Let no access to registers cross this place: instructions that run on use them."""
    kind = "float" if constraint == "f" else "unsigned"
    name = f"pagedkv_pin_{kind}"
    source = (
        f"__device__ __forceinline__ void {name}({kind}& r) "
        f'{{ asm volatile("" : "+{constraint}"(r) :: "memory"); }}\n'
    )
    for register in registers:
        T.evaluate(T.cuda.func_call(name, register, source_code=source))


def _all(products) -> list:
    """The registers of products, as instructions take them."""
    n, rows, pair = (int(size) for size in products.shape)
    return [products[i, h, e] for i in range(n) for h in range(rows) for e in range(pair)]


def _descriptor(low, num_bytes: int):
    """The descriptor of what lies so many bytes after the begin of a tile, by its low word."""
    low = T.cast(low + T.uint32(num_bytes // _UNIT), "uint64")
    return T.bitwise_or(low, T.uint64(_HIGH_WORD << 32))


def _low_word(tiles: SharedTiles, row, from_slab_to_slab: int):
    """The low word of the descriptor of the first tile, from a row on."""
    pointer = tiles.memory.pointer(tiles.begin + row * tiles.layout.stride)
    address = T.cuda.cvta_generic_to_shared(pointer)
    return T.bitwise_or(T.shift_right(address, T.uint32(4)), T.uint32(from_slab_to_slab << 16))


def _step_of_row(tiles: SharedTiles, step: int) -> int:
    """The byte of a row at which a step begins."""
    slab, step = divmod(step, _STEPS_OF_SLAB)
    return slab * tiles.layout.slab_bytes + step * _STEP_BYTES


def _words(buffer) -> list:
    return [buffer[i] for i in range(int(buffer.shape[0]))]


@T.meta_class
class WarpgroupProducts:
    """The products of a warpgroup.

    Parameters
    ----------
    tiling : BlockTiling
    q, k, v : SharedTiles
        In the layout `SlabLayout`.
    first_row : int32 expression
        The warpgroup's first row of Q.
    """

    def __init__(self, tiling, q: SharedTiles, k: SharedTiles, v: SharedTiles, first_row):
        self.q, self.k, self.v, self.first_row = q, k, v, first_row
        self.dtype, self.num_steps = tiling.dtype, tiling.depth // STEP
        short = SHORT_TYPES[tiling.dtype]
        kind = f"k16.f32.{short}.{short}"
        self.for_scores = f"wgmma.mma_async.sync.aligned.m64n{tiling.positions}{kind}"
        self.for_output = f"wgmma.mma_async.sync.aligned.m64n{tiling.columns}{kind}"
        self.left = T.local_scalar(U32)
        self.right = T.alloc_local((2,), U32, layout=None)

    @inline
    def begin(self):
        """Take Q, which is in shared memory."""
        self.left = self.q.isa.in_all_lanes(_low_word(self.q, self.first_row, 1))
        self.right[_K] = _low_word(self.k, 0, 1)
        self.right[_V] = _low_word(self.v, 0, self.v.layout.slab_bytes // _UNIT)

    def low_word(self, place: int, tiles: SharedTiles, stage):
        """Return the low word of the descriptor of a tile, in a register that all lanes share."""
        low = Registers(1, U32, "low")
        begin = self.right[place] + T.cast(stage * (tiles.tile_bytes // _UNIT), U32)
        low[0] = self.q.isa.in_all_lanes(begin)
        return low[0]

    @inline
    def qk(self, scores, k, stage):
        """Compute ``Q K^T``."""
        _pin(_all(scores), "f")
        ptx("wgmma.fence.sync.aligned")
        self.multiply_rows(scores, stage)
        ptx("wgmma.commit_group.sync.aligned")
        ptx("wgmma.wait_group.sync.aligned", 0)
        _pin(_all(scores), "f")

    def multiply_rows(self, scores, stage) -> None:
        """Start the instructions of `qk`."""
        low = self.low_word(_K, self.k, stage)
        for step in range(self.num_steps):
            left = _descriptor(self.left, _step_of_row(self.q, step))
            right = _descriptor(low, _step_of_row(self.k, step))
            ptx(self.for_scores, *_all(scores), left, right, step != 0, 1, 1, 0, 0)

    @inline
    def pv(self, o, weights, v, stage):
        """Add ``weights V``; the weights are float32, as `qk` leaves them."""
        left = T.alloc_local((weights.shape[0] * 2,), U32, layout=None)
        for n in T.unroll(weights.shape[0]):
            for h in T.unroll(2):
                self.q.isa.pack(left[n * 2 + h], self.dtype, weights[n, h, 0], weights[n, h, 1])
        _pin(_words(left), "r")
        _pin(_all(o), "f")
        ptx("wgmma.fence.sync.aligned")
        self.multiply_columns(o, left, stage)
        ptx("wgmma.commit_group.sync.aligned")
        ptx("wgmma.wait_group.sync.aligned", 0)
        _pin(_all(o), "f")

    def multiply_columns(self, o, left, stage) -> None:
        """Start the instructions of `pv`."""
        low = self.low_word(_V, self.v, stage)
        for step in range(int(left.shape[0]) // 4):
            words = [left[step * 4 + i] for i in range(4)]
            right = _descriptor(low, step * STEP * self.v.layout.stride)
            ptx(self.for_output, *_all(o), *words, right, True, 1, 1, 1)
