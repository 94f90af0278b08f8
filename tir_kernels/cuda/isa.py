# SPDX-License-Identifier: Apache-2.0
"""The instructions of NVIDIA's GPUs, as `gpu.isa.Isa` names them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ..gpu.isa import Isa, SharedMemory
from ..gpu.tiles.multiply_adds import MultiplyAdds
from ..spec import CudaTarget
from . import arithmetic, elements, launches, threads
from .products import codes
from .products.group_scales import GroupScales
from .products.mma import TensorCores
from .products.mma_codes import CodeTensorCores, PackedCodeTensorCores
from .products.wgmma import WarpgroupProducts
from .ptx import ptx

MAX_KEPT = 128  # elements of a row of Q in registers: tiles of few positions leave room for them
_COPY = {
    16: "cp.async.cg.shared.global.L2::128B",
    8: "cp.async.ca.shared.global.L2::128B",
    4: "cp.async.ca.shared.global.L2::128B",
}
_TYPES = {"float32": "f32", "uint16": "b16", "uint32": "b32"}


@T.meta_class
class CudaSharedMemory(SharedMemory):
    """Dynamic shared memory, one array of bytes.

    Parameters
    ----------
    isa : CudaIsa
    num_bytes, align : int
    """

    def __init__(self, isa: CudaIsa, num_bytes: int, align: int):
        self.isa = isa
        self.buffer = T.alloc_buffer((num_bytes,), "uint8", scope="shared.dyn", align=align)

    def pointer(self, byte):
        """Return a pointer to a byte."""
        return self.buffer.ptr_to([byte])

    def load(self, registers: Sequence, byte) -> None:
        """Emit ``ld.shared``."""
        ptx(f"ld.shared{_suffix(registers)}", *registers, self.pointer(byte))

    def store(self, byte, *values) -> None:
        """Emit ``st.shared``."""
        ptx(f"st.shared{_suffix(values)}", self.pointer(byte), *values)

    def copy(self, byte, source: tuple, size: int = 16, num_bytes=16) -> None:
        """Emit ``cp.async``."""
        buffer, index = source
        pointers = self.pointer(byte), buffer.ptr_to(list(index))
        ptx(_COPY[size], *pointers, size, T.cast(num_bytes, "uint32"))


def _suffix(values: Sequence) -> str:
    vector = f".v{len(values)}" if len(values) > 1 else ""
    return f"{vector}.{_TYPES[str(values[0].ty.dtype)]}"


class CudaIsa(Isa):
    """PTX, the launches of CUDA, and products on tensor cores."""

    target: CudaTarget

    launch = staticmethod(launches.launch)
    wait_for_kernels_before = staticmethod(launches.wait_for_kernels_before)
    workspace = staticmethod(launches.workspace)
    block_shared_bytes = staticmethod(launches.block_shared_bytes)
    resident_blocks = staticmethod(launches.resident_blocks)

    sync_block = staticmethod(threads.sync_block)
    sync_warp = staticmethod(threads.sync_warp)
    any_of = staticmethod(threads.any_of)
    shuffle_up = staticmethod(threads.shuffle_up)
    shuffle_from = staticmethod(threads.shuffle_from)
    shuffle_xor = staticmethod(threads.shuffle_xor)

    fused_multiply_add = staticmethod(arithmetic.fused_multiply_add)
    rint = staticmethod(arithmetic.rint)
    exp2 = staticmethod(arithmetic.exp2)
    log2 = staticmethod(arithmetic.log2)
    divide = staticmethod(arithmetic.divide)
    lookup = staticmethod(arithmetic.lookup)
    opaque = staticmethod(arithmetic.opaque)

    load_words = staticmethod(elements.load_words)
    store_words = staticmethod(elements.store_words)
    pack = staticmethod(elements.pack)
    unpack = staticmethod(elements.unpack)
    widen_bits = staticmethod(elements.widen_bits)

    widened_dtype = staticmethod(codes.narrow_dtype)
    scale_of_codes = staticmethod(codes.code_scale)
    widen_codes = staticmethod(codes.widen_in_order)
    multiply_pairs = staticmethod(codes.multiply_pairs)

    @property
    def stores_once(self) -> bool:
        """Chips before Hopper have no registers for the barrier."""
        return self.target.multiplies_by_warpgroups

    def tile_barrier(self, tiling):
        """Instructions of a warpgroup read shared memory by another way than loads and stores."""
        return threads.sync_block_and_copies if tiling.by_warpgroups else self.sync_block

    def shared_memory(self, num_bytes: int, align: int = 128) -> CudaSharedMemory:
        """Allocate dynamic shared memory."""
        return CudaSharedMemory(self, num_bytes, align)

    def commit_copies(self) -> None:
        """Emit ``cp.async.commit_group``."""
        ptx("cp.async.commit_group")

    def wait_for_copies(self, groups_left: int) -> None:
        """Emit ``cp.async.wait_group``."""
        ptx("cp.async.wait_group", groups_left)

    def decode_products(self, tiling, q, pipeline, warp_row, lane):
        """Return tensor cores, with codes or values, or multiply-adds."""
        scales, operands = pipeline.scales, (tiling, q, warp_row, lane)
        if not tiling.is_tensor:
            products = MultiplyAdds(*operands)
        elif not tiling.has_code_operands:
            products = TensorCores(*operands, max_kept=MAX_KEPT, unrolled=1)
        elif tiling.codes.codec.bits == 8:
            products = CodeTensorCores(*operands, max_kept=MAX_KEPT)
        else:
            scales = GroupScales(pipeline, lane, tiling.dtype)
            products = PackedCodeTensorCores(*operands, max_kept=MAX_KEPT)
        products.scales = scales
        return products

    def tile_products(self, tiling, q, k, v, rows):
        """Return a warpgroup's or a warp's tensor cores, or multiply-adds."""
        if tiling.by_warpgroups:
            return WarpgroupProducts(tiling, q, k, v, rows.joint_row)
        make = TensorCores if tiling.is_tensor else MultiplyAdds
        return make(tiling, q, rows.warp_row, rows.lane)


isa_of = CudaIsa
