# SPDX-License-Identifier: Apache-2.0
"""Rules for machine code: the limits of chips, and the instructions that kernels need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cuda_machine_code import MachineCode

from tir_kernels.catalogue import KERNELS
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import KernelSpec

KIB = 1024
ATTENTION = frozenset(name for name, kernel in KERNELS.items() if kernel.attends)
RECURRENT = ("recurrent_scan", "causal_conv")  # all that are in neither move rows
MAX_REGISTERS = 255  # of a thread, for kernels that keep sums or states there
MAX_REGISTERS_OF_MOVES = 64  # these wait for memory: many threads have to do so at a time
MIN_COPIES = 2  # asynchronous ones: of the first tile, and of the next ones
MIN_LOADS = 16  # of 128 bits, where states are merged: of eight states, which do not wait
MIN_STATE_RUNS = 8  # of 128 bits, that a thread keeps of a recurrent layer's state
# Arrays that are complete before a step: the host copies them, and no kernel writes them. Only
# these may be loaded through a cache that does not see what other kernels write while this one
# runs: with programmatic dependent launch it may begin before those that write its arguments have
# ended. The copy of an array is no kernel, so whatever follows it in the stream waits for its end.
COPIED_ARRAYS = frozenset(
    name
    for kernel in KERNELS.values()
    for name in kernel.signature.names
    if kernel.gpu and kernel.signature.argument(name).is_int32_array
)
# Of quantized rows: the lanes of a warp have a few numbers each, side by side.
_ROWS_OF_WARPS = ("transpose_append", "transpose_append_mla", "debug_get_kv", "debug_get_kv_mla")
_REGISTERS = 65536  # of a multiprocessor, of every chip
_MOST_COLUMNS = 256  # of V that a block sums


@dataclass(frozen=True)
class Chip:
    """Limits of an architecture, from the CUDA programming guide.

    Parameters
    ----------
    block_bytes : int
        Shared memory that a block may have.
    bytes, threads, blocks : int
        Of a multiprocessor.
    """

    block_bytes: int
    bytes: int
    threads: int
    blocks: int


CHIPS = {
    "80": Chip(163 * KIB, 164 * KIB, 2048, 32),
    "86": Chip(99 * KIB, 100 * KIB, 1536, 16),
    "89": Chip(99 * KIB, 100 * KIB, 1536, 24),
    "90": Chip(227 * KIB, 228 * KIB, 2048, 32),
    "90a": Chip(227 * KIB, 228 * KIB, 2048, 32),
    "100": Chip(227 * KIB, 228 * KIB, 2048, 32),
    "120": Chip(99 * KIB, 100 * KIB, 1536, 24),
}


def is_launched(code: MachineCode) -> bool:
    """Whether the chip has the shared memory that the launcher asks for."""
    return code.launch.device_bytes <= CHIPS[code.arch].block_bytes


def resident_blocks(code: MachineCode) -> int:
    """Blocks of a kernel that a multiprocessor holds at a time."""
    chip, warps = CHIPS[code.arch], -(-code.launch.threads // 32)
    warp_registers = -(-code.registers * 32 // 256) * 256
    return min(
        chip.blocks,
        chip.threads // (warps * 32),
        _REGISTERS // warp_registers // warps,
        chip.bytes // (code.shared_bytes + KIB),  # 1 KiB of each block is the system's
    )


Spec = KernelSpec | RecurrentSpec | ConvSpec


def failures(name: str, spec: Spec, codes: Sequence[MachineCode]) -> list[str]:
    """Yield what is wrong with the code of a function.

    Parameters
    ----------
    name : str
        Of the function, as `tir_kernels.build_kernel` takes it.
    spec : KernelSpec, RecurrentSpec or ConvSpec
    codes : sequence of MachineCode
        All kernels of the function, for one architecture.
    """
    return [*(line for code in codes for line in _of_kernel(name, code)), *_of(name, spec, codes)]


def _of_kernel(name: str, code: MachineCode) -> Iterator[str]:
    kernel, launch, chip = f"{code.launch.kernel} (sm_{code.arch})", code.launch, CHIPS[code.arch]
    if code.spill_bytes or code.stack_bytes or code.counts["local"]:
        yield (
            f"{kernel} spills {code.spill_bytes} bytes, has a stack of {code.stack_bytes} and "
            f"{code.counts['local']} accesses to local memory"
        )
    limit = MAX_REGISTERS if name in (*ATTENTION, *RECURRENT) else MAX_REGISTERS_OF_MOVES
    if code.registers > limit:
        yield f"{kernel} has {code.registers} registers, more than {limit}"
    if launch.device_bytes and code.shared_bytes > launch.device_bytes:
        yield (
            f"{kernel} has {code.shared_bytes} bytes of shared memory, and is launched where a "
            f"block may have {launch.device_bytes}"
        )
    if is_launched(code) and code.shared_bytes > chip.block_bytes:
        yield f"{kernel} has {code.shared_bytes} bytes of shared memory of {chip.block_bytes}"
    if launch.begins_early and int(code.arch.rstrip("a")) >= 90:
        if not (code.counts["wait"] and code.counts["next"]):
            yield f"{kernel} begins early, but does not wait, or does not let the next one begin"
        elif code.early_accesses:
            yield f"{kernel} has {code.early_accesses} accesses to memory before it waits"
    elif code.counts["wait"] or code.counts["next"]:
        yield f"{kernel} waits for the kernel before, though it does not begin early"
    written = sorted(set(code.constant_arguments) - COPIED_ARRAYS)
    if written:
        yield f"{kernel} reads what kernels write by constant loads: {', '.join(written)}"
    elif code.counts["constant"] and not code.constant_arguments:
        yield f"{kernel} has {code.counts['constant']} constant loads that its PTX has not"
    if name in ATTENTION and not code.counts["ldgsts"] and 0 < code.counts["ldg.128"] < MIN_LOADS:
        yield f"{kernel} merges states by {code.counts['ldg.128']} loads of 128 bits at a time"
    if launch.threads != launch.bound:
        yield f"{kernel} is compiled for {launch.bound} threads and launched with {launch.threads}"
    if is_launched(code) and not resident_blocks(code):
        yield f"{kernel} does not fit into a multiprocessor"


def _of(name: str, spec: Spec, codes: Sequence[MachineCode]) -> Iterator[str]:
    """Each branch that a launcher may take has all that the function needs."""
    branches = {code.launch.device_bytes for code in codes if is_launched(code)}
    if 0 not in branches:
        yield f"{name} (sm_{codes[0].arch}) launches nothing where blocks have little shared memory"
    for device_bytes in sorted(branches):
        branch = [code for code in codes if code.launch.device_bytes == device_bytes]
        yield from _of_branch(name, spec, branch)


def _of_branch(name: str, spec: Spec, codes: Sequence[MachineCode]) -> Iterator[str]:
    counts = {key: sum(code.counts[key] for code in codes) for key in codes[0].counts}
    if name == "recurrent_scan":  # the state, in one go; in 16 bits, runs are of 64, not counted
        is_whole = isinstance(spec, RecurrentSpec) and spec.state_dtype == "float32"
        wanted = {"ldg.128": MIN_STATE_RUNS, "stg.128": MIN_STATE_RUNS} if is_whole else {}
    elif name == "causal_conv":
        wanted = {"ldg.128": spec.width, "stg.128": 1}
    elif isinstance(spec, KernelSpec) and spec.codec and name in _ROWS_OF_WARPS:
        wanted = {}
    elif name not in ATTENTION:
        wanted = {"ldg.128": 1, "stg.128": 1}
    else:
        wanted = {"ldgsts": MIN_COPIES, "stg.128": 1}
        if spec.dtype != "float32" and (spec.codec or spec.dtype == spec.kv_dtype):
            columns = min(spec.v_head_dim, spec.non_absorbed.v_head_dim, _MOST_COLUMNS)
            # Sixteen positions over all columns of V, and a step of a loop over those of K.
            wanted["mma"] = columns // 8 + 1
            if counts["wgmma"]:  # over all columns at once, operands from shared memory
                wanted["mma"] = wanted["wgmma"] = spec.qk_head_dim // 16 + 1
            # Operands come four 8 x 8 matrices at a time; a product takes two of them, and two
            # tiles of rows may share them.
            wanted["ldsm"] = (counts["mma"] - counts["wgmma"]) // 4
            if spec.codec and spec.codec.bits == 4:  # decode widens eight from four of codes
                wanted["ldsm"] //= 2
    for key, count in wanted.items():
        if counts[key] < count:
            branch = f"sm_{codes[0].arch}"
            if codes[0].launch.device_bytes:
                branch += f", where blocks may have {codes[0].launch.device_bytes} bytes"
            yield f"{name} ({branch}) has {counts[key]} {key}, needs at least {count}"
