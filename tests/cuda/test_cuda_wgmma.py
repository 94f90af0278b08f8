# SPDX-License-Identifier: Apache-2.0
"""The emulator multiplies matrices by warpgroups as PTX says, and finds what is left out."""

import functools

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.cuda.isa import CudaIsa
from tir_kernels.cuda.launches import launch
from tir_kernels.cuda.ptx import ptx
from tir_kernels.define import target_attributes
from tir_kernels.gpu.registers import WARP
from tir_kernels.script import inline, prim_func
from tir_kernels.spec import CudaTarget
from tvm_pagedkv.compiler.cuda.source import cuda_source

from ..support.cases.kernels.cuda_cases import BF16, F16
from ..support.emulators.cuda_emulator import SCHEDULES, emulated, mutated, wrong_schedules

sync_block = CudaIsa(CudaTarget()).sync_block
ROWS, DEPTH, COLUMNS = 128, 128, 96
THREADS = 2 * ROWS  # two warpgroups
SLAB = 64  # elements of 16 bits in the 128 bytes that are swizzled
ATOM_BYTES = 8 * 128
A_BYTES = ROWS * DEPTH * 2
SHORT = {F16: "f16", BF16: "bf16"}


def _slab_bytes(num_rows: int) -> int:
    return num_rows * SLAB * 2


@inline
def copy_swizzled(x, num_rows: int, num_chunks: int, shared, begin: int, thread):
    """Copy rows to slabs whose chunks of 16 bytes are swizzled."""
    for turn in T.serial(num_rows * num_chunks // THREADS):
        item = turn * THREADS + thread
        row = T.truncdiv(item, num_chunks)
        chunk = T.truncmod(item, num_chunks)
        in_slab = T.bitwise_xor(T.truncmod(chunk, 8), T.truncmod(row, 8)) * 16
        to = begin + T.truncdiv(chunk, 8) * _slab_bytes(num_rows) + row * 128 + in_slab
        ptx("cp.async.cg.shared.global", shared.ptr_to([to]), x.ptr_to([row, chunk * 8]), 16)


def _descriptor(shared, begin, from_slab_to_slab: int, atom_bytes: int):
    address = T.cast(T.cuda.cvta_generic_to_shared(shared.ptr_to([begin])), "uint64")
    fixed = 1 << 62 | atom_bytes // 16 << 32 | from_slab_to_slab // 16 << 16
    return T.bitwise_or(T.shift_right(address, T.uint64(4)), T.uint64(fixed))


def multiply_all(shared, a, d, left, first_row, dtype, transposed, in_registers, atom_bytes):
    """Start the products of all steps; B has its columns, or else its rows, side by side."""
    kind = f"m64n{COLUMNS}k16.f32.{SHORT[dtype]}.{SHORT[dtype]}"
    sums = [d[i] for i in range(COLUMNS // 2)]
    for step in range(DEPTH // 16):
        slab, in_slab = divmod(step * 16, SLAB)
        if in_registers:
            operand = [left[step * 4 + i] for i in range(4)]
        else:
            begin = slab * _slab_bytes(ROWS) + first_row * 128 + in_slab * 2
            operand = [_descriptor(shared, begin, 16, ATOM_BYTES)]
        if transposed:
            right = _descriptor(shared, A_BYTES + step * 16 * 128, _slab_bytes(DEPTH), atom_bytes)
        else:
            begin = A_BYTES + slab * _slab_bytes(COLUMNS) + in_slab * 2
            right = _descriptor(shared, begin, 16, atom_bytes)
        flags = [1, 1, int(transposed)] if in_registers else [1, 1, 0, int(transposed)]
        ptx(f"wgmma.mma_async.sync.aligned.{kind}", *sums, *operand, right, step != 0, *flags)


@functools.cache
def product_source(dtype, transposed=False, in_registers=False, atom_bytes=ATOM_BYTES) -> str:
    """A kernel of one block that multiplies ``[128, 128]`` by ``[128, 96]``."""
    b_shape = (DEPTH, 2 * SLAB) if transposed else (COLUMNS, DEPTH)
    b_bytes = b_shape[0] * b_shape[1] * 2

    @prim_func
    def multiply(var_a: T.handle, var_b: T.handle, var_d: T.handle):
        T.func_attr(target_attributes(on_cpu=False))
        a = T.match_buffer(var_a, (ROWS, DEPTH), dtype, align=16)
        b = T.match_buffer(var_b, b_shape, dtype, align=16)
        out = T.match_buffer(var_d, (ROWS, COLUMNS), "float32", align=16)
        with launch([1], THREADS) as ((block,), thread):
            shared = T.alloc_buffer((A_BYTES + b_bytes,), "uint8", scope="shared.dyn", align=1024)
            d = T.alloc_local((COLUMNS // 2,), "float32", layout=None)
            left = T.alloc_local((DEPTH // 4,), "uint32", layout=None)
            copy_swizzled(a, ROWS, DEPTH // 8, shared, 0, thread)
            copy_swizzled(b, b_shape[0], b_shape[1] // 8, shared, A_BYTES, thread)
            ptx("cp.async.commit_group")
            first_row = T.truncdiv(thread, 4 * WARP) * 64
            row = T.truncdiv(thread, WARP) * 16 + T.truncdiv(T.truncmod(thread, WARP), 4)
            pair = T.truncmod(thread, 4) * 2
            for i in T.unroll(DEPTH // 4):
                column = T.meta_var(pair + i // 4 * 16 + i // 2 % 2 * 8)
                ptx("ld.global.b32", left[i], a.ptr_to([row + i % 2 * 8, column]))
            ptx("cp.async.wait_group", 0)
            ptx("fence.proxy.async.shared::cta")
            sync_block()
            ptx("wgmma.fence.sync.aligned")
            multiply_all(shared, a, d, left, first_row, dtype, transposed, in_registers, atom_bytes)
            ptx("wgmma.commit_group.sync.aligned")
            ptx("wgmma.wait_group.sync.aligned", 0)
            for i in T.unroll(COLUMNS // 2):
                out[row + i // 2 % 2 * 8, i // 4 * 8 + pair + i % 2] = d[i]

    return cuda_source({"multiply": multiply})


def _check(source: str, dtype, transposed: bool = False) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (n, DEPTH)).astype(dtype) for n in (ROWS, 2 * SLAB))
    b_rows = b.T if transposed else b[:COLUMNS]
    out = tvm.runtime.tensor(np.full((ROWS, COLUMNS), np.nan, np.float32))
    operands = (tvm.runtime.tensor(np.ascontiguousarray(x)) for x in (a, b_rows))
    emulated(source).get_function("multiply")(*operands, out)
    expected = a.astype(np.float32) @ b[:COLUMNS].astype(np.float32).T
    np.testing.assert_array_equal(out.numpy(), expected)


def _wrong_schedules(source: str, dtype=F16, transposed: bool = False) -> list[str]:
    return wrong_schedules(lambda: _check(source, dtype, transposed))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
def test_products(dtype, transposed, in_registers):
    source = product_source(dtype, transposed, in_registers)
    assert not _wrong_schedules(source, dtype, transposed)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_atoms_in_other_places_are_found(transposed):
    source = product_source(F16, transposed, atom_bytes=ATOM_BYTES // 2)
    assert len(_wrong_schedules(source, F16, transposed)) == len(SCHEDULES)


WAIT = " tvm_builtin_ptx_wgmma_wait_group_wait_group_sync_aligned_0();\n"
PROXY_FENCE = " tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta();\n"
OVERWRITE = f" {{ int zero = 0; emulator::StoreShared({A_BYTES} + threadIdx.x * 4, &zero, 4); }}"


@pytest.mark.parametrize(
    "old, new",
    [
        (WAIT, ""),
        (WAIT, f"left_ptr[5] = 0;{WAIT}"),
        (WAIT, f"{OVERWRITE}{WAIT}"),
        (PROXY_FENCE, ""),
        (PROXY_FENCE, f"if (threadIdx.x != 77) {PROXY_FENCE}"),
    ],
    ids=[
        "no-wait",
        "registers-changed",
        "rows-overwritten",
        "no-fence",
        "no-fence-of-a-thread",
    ],
)
def test_what_is_left_out_is_found(old, new):
    source = product_source(F16, in_registers=True)
    assert _wrong_schedules(mutated(source, old, new))


FENCE = " tvm_builtin_ptx_wgmma_fence_fence_sync_aligned();\n"
COMMIT = " tvm_builtin_ptx_wgmma_commit_group_commit_group_sync_aligned();\n"
PRODUCT = " tvm_builtin_ptx_wgmma_f16_ss_mma_async"


@pytest.mark.parametrize(
    "old, new, which, message",
    [
        (FENCE, "", 0, "no wgmma.fence"),
        (COMMIT, "", 0, "never committed"),
        (PRODUCT, f" if (threadIdx.x < 96) {PRODUCT}", -1, "left out"),
        (PRODUCT, f" if (threadIdx.x < 96) {PRODUCT}", 1, "warps of a warpgroup"),
        (PRODUCT, f" if (threadIdx.x % 2) {PRODUCT}", 1, "lanes of a warp"),
    ],
    ids=["fence", "commit", "last-of-a-warp", "first-of-a-warp", "half-a-warp"],
)
def test_faults_are_errors(old, new, which, message):
    source = product_source(F16)
    with pytest.raises(RuntimeError, match=message):
        _check(mutated(source, old, new, which % source.count(old)), F16)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
