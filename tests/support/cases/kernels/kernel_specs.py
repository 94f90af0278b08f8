# SPDX-License-Identifier: Apache-2.0
"""Specs and batches that the tests of the attention kernels have in common."""

from __future__ import annotations

import os

import pytest

from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from ...harness.foreign_code import runs_here

# The pool's default is one worker per two CPUs; the parallel paths need two.
os.environ.setdefault("TVM_NUM_THREADS", "2")

F32, F16, BF16 = "float32", "float16", "bfloat16"
NATIVE = vector_target("native")
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")


def make_spec(heads, dim, dtypes=("float32", "float32"), page=16, **fields) -> KernelSpec:
    qk, v = dim if isinstance(dim, tuple) else (dim, dim)
    fields.setdefault("target", NATIVE)
    fields.setdefault("rope", RopeSpec(rotary_dim=qk))
    return KernelSpec(*heads, qk, v, *dtypes, page_size=page, **fields)


# Between them: every page size, one head and many, odd group sizes, head dims that fill no whole
# number of vectors, every type of rows with every type of pages.
SPECS = {
    "32:8x128-f32-p16": make_spec((32, 8), 128),
    "32:8x128-bf16-p16": make_spec((32, 8), 128, (BF16, BF16)),
    "32:8x128-f16-p1": make_spec((32, 8), 128, (F16, F16), 1),
    "71:1x64-f16-f32-p256": make_spec((71, 1), 64, (F16, F32), 256),
    "5:1x80-f32-bf16-p4": make_spec((5, 1), 80, (F32, BF16), 4),
    "6:2x104-f32-f16-p64": make_spec((6, 2), 104, (F32, F16), 64),
    "7:1x576-bf16-f32-p2": make_spec((7, 1), 576, (BF16, F32), 2),
    "2:2x8-f32-p8": make_spec((2, 2), 8, page=8),
    "16:2x96-f16-bf16-p32": make_spec((16, 2), 96, (F16, BF16), 32),
    "3:1x24-bf16-p128": make_spec((3, 1), 24, (BF16, BF16), 128),
    "1:1x512-bf16-f16-p16": make_spec((1, 1), 512, (BF16, F16)),
    "2:1x256-bf16-p8": make_spec((2, 1), 256, (BF16, BF16), 8),
}
# Those whose dtypes, splits of a row and group sizes others have: left to the long runs where
# kernels take long to compile.
REPEATED = [
    SPECS[name]
    for name in (
        "32:8x128-f16-p1",
        "6:2x104-f32-f16-p64",
        "2:2x8-f32-p8",
        "16:2x96-f16-bf16-p32",
        "3:1x24-bf16-p128",
        "2:1x256-bf16-p8",
    )
]
# Some of these, for kernels that share all but their masks with others.
SOME_SPECS = {
    name: SPECS[name]
    for name in (
        "32:8x128-bf16-p16",
        "32:8x128-f16-p1",
        "5:1x80-f32-bf16-p4",
        "71:1x64-f16-f32-p256",
    )
}
# (rows of the step, positions of K and V): nothing cached; a prefix; an empty sequence at the
# start, in the middle and at the end; rows without anything to see; several tiles of either kind.
BATCHES = {
    "alone": [(5, 5)],
    "mixed": [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (4, 6), (0, 0)],
    "tiles": [(150, 300), (1, 64), (65, 65), (1, 257)],
}
DECODE_BATCHES = {
    "alone": [(1, 5)],
    "mixed": [(1, 0), (1, 1), (1, 33), (1, 0), (1, 64), (1, 128), (1, 300), (1, 0)],
    "long": [(1, 1700)],
    "cuts": [(1, n) for n in (257, 16, 400, 31, 0, 512)],
}
YARN = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_type", "yarn"))
ROPE_SPECS = {
    "f32": make_spec((8, 2), 128),
    "partial-scaled": make_spec((5, 1), 80, (F32, F32), 1, rope=RopeSpec(5e5, 0.25, 20)),
    "yarn-bf16": make_spec((4, 2), 96, (BF16, BF16), 64, rope=RopeSpec(1e4, 1.0, 96, YARN)),
    "odd-pairs-bf16": make_spec((4, 2), 64, (BF16, BF16), 2, rope=RopeSpec(1e4, 1.0, 22)),
}


def needs_cpu(cpu: str) -> pytest.MarkDecorator:
    """Skip a test where this CPU cannot run code for another one."""
    return pytest.mark.skipif(not runs_here(cpu), reason=f"this CPU does not run {cpu}")


def other_cpu(cpu: str, *marks: pytest.MarkDecorator):
    """A parameter: the name of a CPU to compile for. Skipped where this CPU cannot run the code."""
    return pytest.param(cpu, marks=[needs_cpu(cpu), *marks])


def parametrize_cpu(*cpus: str, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Compile the kernels of a test for each of these CPUs; those in `slow` in the long runs."""
    values = [other_cpu(cpu) for cpu in cpus]
    values += [other_cpu(cpu, pytest.mark.slow) for cpu in slow]
    return pytest.mark.parametrize("cpu", values)
