# SPDX-License-Identifier: Apache-2.0
"""The emulator runs generated launchers, and shows waits and barriers that are missing."""

import functools

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.cuda.isa import CudaIsa
from tir_kernels.cuda.launches import launch
from tir_kernels.cuda.ptx import ptx
from tir_kernels.define import target_attributes
from tir_kernels.gpu.registers import Registers
from tir_kernels.script import inline, prim_func
from tir_kernels.spec import CudaTarget
from tvm_pagedkv.compiler.cuda.source import cuda_source

from ..support.emulators.cuda_emulator import (
    SCHEDULES,
    Launch,
    Schedule,
    emulated,
    launches,
    mutated,
    schedule,
)

sync_block = CudaIsa(CudaTarget()).sync_block
THREADS, ROUNDS = 64, 4
parametrize_schedules = pytest.mark.parametrize("chosen", SCHEDULES, ids=str)


@inline
def copy_row(x, ring, block, thread, i):
    """Begin to copy a row to a stage of the ring."""
    source = T.meta_var(x.ptr_to([block, i, 4 * thread]))
    ptx("cp.async.cg.shared.global", ring.ptr_to([i % 2, 4 * thread]), source, 16)
    ptx("cp.async.commit_group")


@inline
def reverse_row(ring, y, block, thread, i):
    """Write the 4 floats that another thread copied."""
    sync_block()
    for e in T.unroll(4):
        y[block, i, 4 * thread + e] = ring[i % 2, 4 * THREADS - 1 - (4 * thread + e)]


@functools.cache
def reversing_source() -> str:
    """A kernel that reverses rows of 256 floats, a ring of two stages at a time.

    Thread i copies 16 bytes of each row, and writes those that thread 63 - i copied.
    """

    @prim_func
    def reverse(var_x: T.handle, var_y: T.handle):
        T.func_attr(target_attributes(on_cpu=False))
        num_rows = T.int32()
        place = T.meta_var({"align": 16, "elem_offset": T.int64(), "offset_factor": 4})
        x = T.match_buffer(var_x, (num_rows, ROUNDS, 4 * THREADS), "float32", **place)
        y = T.match_buffer(var_y, (num_rows, ROUNDS, 4 * THREADS), "float32", align=16)
        with launch([num_rows], THREADS) as ((block,), thread):
            ring = T.alloc_buffer((2, 4 * THREADS), "float32", scope="shared.dyn", align=16)
            if block < num_rows:
                copy_row(x, ring, block, thread, 0)
                for i in range(ROUNDS - 1):
                    copy_row(x, ring, block, thread, i + 1)
                    ptx("cp.async.wait_group", 1)
                    reverse_row(ring, y, block, thread, i)
                    sync_block()
                ptx("cp.async.wait_group", 0)
                reverse_row(ring, y, block, thread, ROUNDS - 1)

    return cuda_source({"reverse": reverse})


def reversed_rows(source: str, num_rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's rows and the expected ones."""
    rows = np.random.default_rng(0).standard_normal((num_rows, ROUNDS, 4 * THREADS), np.float32)
    whole = tvm.runtime.tensor(np.concatenate([np.full(4, np.nan, np.float32), rows.reshape(-1)]))
    y = tvm.runtime.tensor(np.full(rows.shape, np.nan, np.float32))
    emulated(source).get_function("reverse")(whole._create_view(rows.shape, "float32", 16), y)
    return y.numpy(), rows[:, :, ::-1]


@parametrize_schedules
def test_a_kernel_runs_under_every_schedule(chosen):
    with schedule(chosen):
        actual, expected = reversed_rows(reversing_source())
    np.testing.assert_array_equal(actual, expected)


def test_launches_are_told():
    with launches() as made:
        reversed_rows(reversing_source())
    assert made == [Launch((3, 1, 1), THREADS, 2 * 16 * THREADS, begins_early=True)]


def _caught(source: str) -> list[str]:
    found = []
    for chosen in SCHEDULES:
        with schedule(chosen):
            actual, expected = reversed_rows(source)
        if not np.array_equal(actual, expected):
            found.append(str(chosen))
    return found


def test_a_copy_that_is_not_waited_for_is_caught():
    source = mutated(reversing_source(), "cp.async.wait_group 1", "cp.async.wait_group 2")
    assert str(Schedule()) in _caught(source)


# In a round before and after reading, then before the last row is read.
BARRIER = "  tvm_builtin_cuda_cta_sync();\n"


def test_a_barrier_that_is_missing_before_reading_is_caught():
    assert _caught(mutated(reversing_source(), BARRIER, which=2))


def test_a_barrier_that_is_missing_before_writing_again_is_caught():
    """Copies that land late never show it."""
    found = _caught(mutated(reversing_source(), BARRIER, which=1))
    assert str(Schedule("skewed", eager=True)) in found and str(Schedule()) not in found


@functools.cache
def turning_source() -> str:
    """A kernel whose 64 threads pass numbers on through shared memory, twice.

    Word 64 gets the same number from all of them.
    """

    @prim_func
    def turn(var_x: T.handle, var_y: T.handle):
        T.func_attr(target_attributes(on_cpu=False))
        x = T.match_buffer(var_x, (2, THREADS), "float32")
        y = T.match_buffer(var_y, (2, THREADS), "float32")
        with launch([1], THREADS) as (_, thread):
            room = T.alloc_buffer((THREADS + 1,), "float32", scope="shared.dyn", align=16)
            value = T.meta_var(Registers(2, "float32", "value"))
            for i in range(2):
                ptx("st.shared.f32", room.ptr_to([thread]), x[i, thread])
                ptx("st.shared.f32", room.ptr_to([THREADS]), T.float32(1))
                ptx("ld.shared.f32", value[1], room.ptr_to([THREADS]))
                sync_block()
                ptx("ld.shared.f32", value[0], room.ptr_to([THREADS - 1 - thread]))
                y[i, thread] = value[0] * value[1]
                sync_block()

    return cuda_source({"turn": turn})


def _turned(source: str) -> np.ndarray:
    x = tvm.runtime.tensor(np.arange(2.0 * THREADS, dtype="float32").reshape(2, -1))
    y = tvm.runtime.tensor(np.zeros((2, THREADS), "float32"))
    emulated(source).get_function("turn")(x, y)
    return y.numpy()


@parametrize_schedules
def test_numbers_that_are_passed_on_behind_barriers(chosen):
    with schedule(chosen):
        found = _turned(turning_source())
    np.testing.assert_array_equal(found, np.arange(2 * THREADS).reshape(2, -1)[:, ::-1])


@parametrize_schedules
@pytest.mark.parametrize("which", [0, 1], ids=["before-reading", "before-writing"])
def test_a_barrier_that_is_missing_is_an_error(which, chosen):
    """Also where the numbers are right because of the order in which the threads run."""
    source = mutated(turning_source(), BARRIER, which=which)
    with schedule(chosen), pytest.raises(RuntimeError, match="shared memory: a race at byte"):
        _turned(source)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("(int64_t)2048", "(int64_t)1024", "shared memory: 16 bytes at .* of 1024"),
        (BARRIER, f"if (threadIdx.x) {BARRIER}", "deadlock"),
        ("x_ptr[", "x_ptr[1 + ", "not aligned"),
    ],
    ids=["beyond-shared-memory", "barrier-in-a-branch", "misaligned"],
)
def test_faults_are_errors(old, new, message):
    with pytest.raises(RuntimeError, match=message):
        reversed_rows(mutated(reversing_source(), old, new, which=0))


def test_arguments_are_checked():
    module = emulated(reversing_source())
    x = tvm.runtime.tensor(np.zeros((1, ROUNDS, 8), np.float32))
    with pytest.raises(ValueError, match=r"x\.\w+ on argument #0"):
        module.get_function("reverse")(x, x)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
