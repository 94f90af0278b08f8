# SPDX-License-Identifier: Apache-2.0
"""The instructions of NVIDIA's GPUs, as `gpu.isa` asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tvm.script import tirx as T

from ..define import ACCESS_BYTES
from ..gpu.isa import Isa, SharedMemory
from ..gpu.registers import F32, I32, U32, WARP, Registers
from ..gpu.tiles.multiply_adds import MultiplyAdds
from ..spec import STORED_ITEMSIZE
from . import launches
from .products import codes
from .products.group_scales import GroupScales
from .products.mma import TensorCores
from .products.mma_codes import CodeTensorCores, PackedCodeTensorCores
from .products.wgmma import WarpgroupProducts
from .ptx import SHORT_TYPES, ptx

MAX_KEPT = 128  # elements of a row of Q in registers: tiles of few positions leave room for them
_ALL_LANES = 0xFFFFFFFF
_COPY = {16: "cg", 8: "ca", 4: "ca"}  # by the size: only 16 bytes may pass by the L1 cache
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
        ptx(f"ld.shared{_suffix(registers)}", *registers, self.pointer(byte))

    def store(self, byte, *values) -> None:
        ptx(f"st.shared{_suffix(values)}", self.pointer(byte), *values)

    def load_half(self, byte):
        return T.cast(self._load_half(byte), U32)

    def store_half(self, byte, bits) -> None:
        self.store(byte, T.cast(bits, "uint16"))

    def load_element(self, byte, dtype: str):
        value = Registers(1, F32, "value")
        if dtype == F32:
            self.load([*value], byte)
        elif dtype == "bfloat16":
            ptx("mov.b32", value[0], T.shift_left(self.load_half(byte), T.uint32(16)))
        else:
            ptx("cvt.f32.f16", value[0], self._load_half(byte))
        return value[0]

    def _load_half(self, byte):
        bits = Registers(1, "uint16", "bits")
        self.load([*bits], byte)
        return bits[0]

    def copy(self, byte, source: tuple, size: int = 16, num_bytes=16) -> None:
        buffer, index = source
        pointers = self.pointer(byte), buffer.ptr_to(list(index))
        copy = f"cp.async.{_COPY[size]}.shared.global.L2::128B"
        ptx(copy, *pointers, size, T.cast(num_bytes, "uint32"))


def _suffix(values: Sequence) -> str:
    vector = f".v{len(values)}" if len(values) > 1 else ""
    return f"{vector}.{_TYPES[str(values[0].ty.dtype)]}"


class CudaIsa(Isa):
    """PTX, the launches of CUDA, and tensor cores. Methods do what `Isa` says of them."""

    shared_scope = "shared.dyn"

    # ---- Launches --------------------------------------------------------------------------------

    launch = staticmethod(launches.launch)
    wait_for_kernels_before = staticmethod(launches.wait_for_kernels_before)
    workspace = staticmethod(launches.workspace)
    block_shared_bytes = staticmethod(launches.block_shared_bytes)
    resident_blocks = staticmethod(launches.resident_blocks)

    # ---- Threads ---------------------------------------------------------------------------------

    @property
    def stores_once(self) -> bool:
        """Chips before Hopper have no registers for the barrier."""
        return self.target.multiplies_by_warpgroups

    def sync_block(self) -> None:
        T.evaluate(T.cuda.cta_sync())

    def sync_warp(self) -> None:
        T.evaluate(T.cuda.warp_sync())

    def tile_barrier(self, tiling):
        return self._sync_tiles if tiling.by_warpgroups else self.sync_block

    def _sync_tiles(self) -> None:
        """Emit a barrier after which instructions of a warpgroup see what was stored or copied.

        They read shared memory by another way than loads and stores, the "async proxy" of the PTX
        ISA.
        """
        ptx("fence.proxy.async.shared::cta")
        self.sync_block()

    def any_of(self, condition):
        return T.cuda.any_sync(T.uint32(_ALL_LANES), T.cast(condition, "int32")) != 0

    def shuffle_up(self, value, distance):
        return T.tvm_warp_shuffle_up(T.uint32(_ALL_LANES), value, distance, WARP, WARP)

    def shuffle_from(self, value, lane):
        return T.tvm_warp_shuffle(T.uint32(_ALL_LANES), value, lane, WARP, WARP)

    def shuffle_xor(self, value, mask):
        return T.tvm_warp_shuffle_xor(T.uint32(_ALL_LANES), value, mask, WARP, WARP)

    # ---- Arithmetic ------------------------------------------------------------------------------

    def _result(self, instruction: str, *operands):
        register = Registers(1, F32, "t")
        ptx(instruction, register[0], *operands)
        return register[0]

    def fused_multiply_add(self, a, b, c, lanes: int = 1):
        return self._result("fma.rn.f32", a, b, c)

    def rint(self, x, lanes: int = 1):
        return self._result("cvt.rni.f32.f32", x)

    def exp2(self, x, lanes: int = 1):
        return self._result("ex2.approx.ftz.f32", x)

    def log2(self, x):
        return self._result("lg2.approx.ftz.f32", x)

    def divide(self, a, b):
        return self._result("div.rn.f32", a, b)  # `/` is not, with fast arithmetic

    def opaque(self, value):
        register = Registers(1, I32, "opaque")
        ptx("mov.b32", register[0], value)
        return register[0]

    def lookup(self, values: Sequence[float], i, dtype: str = F32):
        kind, suffix = ("double", "") if dtype == "float64" else ("float", "f")
        text = ", ".join(f"{float(v)!r}{suffix}" for v in values)
        name = f"pagedkv_table_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        source = (
            f"__device__ __forceinline__ {kind} {name}(int i) {{\n"
            f"  static const {kind} values[] = {{{text}}};\n"
            "  return values[i];\n"
            "}\n"
        )
        return T.cuda.func_call(name, T.cast(i, "int32"), source_code=source, return_type=dtype)

    # ---- Elements in global memory ---------------------------------------------------------------

    def load_words(self, words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
        for pointer, taken, vector in _accesses(words, buffer, index, num_bytes):
            ptx(f"ld.global{vector}.b32", *taken, pointer)

    def store_words(self, words: Registers, buffer, index: Sequence, num_bytes: int) -> None:
        for pointer, taken, vector in _accesses(words, buffer, index, num_bytes):
            ptx(f"st.global{vector}.b32", pointer, *taken)

    def pack(self, word, dtype: str, low, high) -> None:
        ptx(f"cvt.rn.{SHORT_TYPES[dtype]}x2.f32", word, high, low)

    def unpack(self, word, dtype: str, low, high) -> None:
        if dtype == "bfloat16":
            ptx("mov.b32", low, T.shift_left(word, T.uint32(16)))
            ptx("mov.b32", high, T.bitwise_and(word, T.uint32(0xFFFF0000)))
            return
        ptx("cvt.f32.f16", low, T.cast(T.bitwise_and(word, T.uint32(0xFFFF)), "uint16"))
        ptx("cvt.f32.f16", high, T.cast(T.shift_right(word, T.uint32(16)), "uint16"))

    # ---- Shared memory ---------------------------------------------------------------------------

    def shared_memory(self, num_bytes: int, align: int = 128) -> CudaSharedMemory:
        return CudaSharedMemory(self, num_bytes, align)

    def commit_copies(self) -> None:
        ptx("cp.async.commit_group")

    def wait_for_copies(self, groups_left: int) -> None:
        ptx("cp.async.wait_group", groups_left)

    # ---- Codes and products ----------------------------------------------------------------------

    widened_dtype = staticmethod(codes.narrow_dtype)
    scale_of_codes = staticmethod(codes.code_scale)
    widen_codes = staticmethod(codes.widen_in_order)
    multiply_pairs = staticmethod(codes.multiply_pairs)

    def decode_products(self, tiling, q, pipeline, warp_row, lane):
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
        if tiling.by_warpgroups:
            return WarpgroupProducts(tiling, q, k, v, rows.joint_row)
        make = TensorCores if tiling.is_tensor else MultiplyAdds
        return make(tiling, q, rows.warp_row, rows.lane)


def _accesses(words: Registers, buffer, index: Sequence, num_bytes: int):
    """Yield pointer, words and vector suffix of each access of at most `ACCESS_BYTES`."""
    *outer, last = index
    for start in range(0, num_bytes, ACCESS_BYTES):
        count = min(num_bytes - start, ACCESS_BYTES) // 4
        pointer = buffer.ptr_to([*outer, last + start // STORED_ITEMSIZE[str(buffer.dtype)]])
        yield pointer, [words[start // 4 + i] for i in range(count)], f".v{count}" * (count > 1)


isa_of = CudaIsa
