# SPDX-License-Identifier: Apache-2.0
"""A GPU that has less than NVIDIA's runs the same kernels over an object of its own, emulated.

It has no tensor cores and no asynchronous copies, counts in 32 bits, and its blocks have 32 KiB and
256 threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from tvm.script import tirx as T

from tir_kernels import kernel_names
from tir_kernels.cuda.isa import CudaIsa, CudaSharedMemory
from tir_kernels.gpu.registers import U32, Registers
from tir_kernels.gpu.tiles.decode_tiling import DecodeTiling
from tir_kernels.gpu.tiles.tiling import MAX_ROWS, Tiling
from tir_kernels.spec import CudaTarget

from ..support.cases.kernels.attention_cases import PagedBatch, cuda_text
from ..support.cases.kernels.cuda_cases import F16, F32, make_spec
from ..support.emulators.cuda_emulator import multiprocessors


@dataclass(frozen=True)
class PlainTarget(CudaTarget):
    """The limits of the GPU."""

    isa_module: ClassVar[str] = __name__
    has_tensor_cores: ClassVar[bool] = False

    max_shared_bytes: int = 32 * 1024
    larger_shared_bytes: tuple[int, ...] = ()
    max_threads: int = 256
    wide_dtype: str = "int32"


@T.meta_class
class PlainMemory(CudaSharedMemory):
    """Copies through registers."""

    def copy(self, byte, source: tuple, size: int = 16, num_bytes=16) -> None:
        words = Registers(size // 4, U32, "copied")
        words.fill(T.uint32(0))
        with T.If(T.cast(num_bytes, "int32") > 0), T.Then():
            self.isa.load_words(words, *source, size)
        self.store(byte, *words)


class PlainIsa(CudaIsa):
    """Instructions that every GPU has."""

    def shared_memory(self, num_bytes: int, align: int = 128) -> PlainMemory:
        return PlainMemory(self, num_bytes, align)

    def commit_copies(self) -> None:
        """They are done."""

    def wait_for_copies(self, groups_left: int) -> None:
        """They are done."""


isa_of = PlainIsa
SPECS = {
    "f32": make_spec((4, 2), 64, (F32, F32), target=PlainTarget()),
    "f16": make_spec((8, 2), 128, (F16, F16), target=PlainTarget()),
    "int8": make_spec((4, 2), 64, (F16, "int8"), target=PlainTarget()),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_tiles_fit_into_a_block(spec):
    tilings = [*DecodeTiling.choices(spec), *Tiling.choices(spec, spec.kv_dtype, MAX_ROWS)]
    for tiling in tilings:
        assert not tiling.is_tensor
        assert tiling.num_bytes <= 32 * 1024
        assert tiling.num_threads <= 256


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_decode(spec):
    case = PagedBatch(spec, [(1, n) for n in (0, 1, 33, 131, 500)], 0)
    with multiprocessors(3):
        case.decode()
    case.verify()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prefill(spec):
    case = PagedBatch(spec, [(3, 70), (0, 33), (40, 61)], 0)
    with multiprocessors(3):
        case.prefill()
    case.verify()


@pytest.mark.parametrize("name", kernel_names(SPECS["f16"]))
def test_no_instruction_that_the_target_lacks(name):
    source = cuda_text(name, SPECS["f16"])
    assert not [word for word in ("cp.async", "mma.sync", "ldmatrix", "wgmma") if word in source]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
