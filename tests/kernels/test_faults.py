# SPDX-License-Identifier: Apache-2.0
"""The tests of kernels notice mistakes: skipped positions, rows that are read or written twice.

No kernel is built for this: results with a mistake are computed by the reference, and given to the
comparisons that the kernels' tests make, over the data that they use.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from tir_kernels.spec import KernelSpec

from .. import reference
from ..support.cases.kernels import page_kernel_cases
from ..support.cases.kernels.kernel_specs import make_spec
from ..support.cases.kernels.page_kernel_cases import (
    check_compact_copy,
    check_copy_pages,
    check_copy_single_page,
    check_debug_get_kv,
    check_merge,
    check_rope_append,
    check_split_rotary,
    check_transpose_append,
    fused,
)
from ..support.emulators import python_kernels
from ..support.emulators.python_kernels import view
from . import test_append_prefill as append_prefill_tests

TESTS = Path(__file__).parents[1]
# Files of attention kernels, and how many comparisons with the reference each has at least.
FILES = {
    "kernels/test_attention_kernels.py": 200,
    "kernels/test_sliding_kernels.py": 120,
    "kernels/test_window_kernels.py": 80,
    "kernels/test_tree_kernels.py": 90,
    "kernels/test_alibi_kernels.py": 70,
    "kernels/test_mla_kernels.py": 110,
    "kernels/test_mla_windows.py": 30,
    "kernels/test_shared_prefix_kernel.py": 60,
    "cuda/test_cuda_decode.py": 24,
    "cuda/test_cuda_prefill.py": 50,
    "cuda/test_cuda_prefill_split.py": 30,
    "cuda/test_cuda_trees.py": 24,
    "cuda/test_cuda_shared_prefix.py": 40,
    "cuda/test_cuda_mla.py": 12,
}


# All files share their comparison, so a run without the long ones tries one of them.
IN_EVERY_RUN = ("cuda/test_cuda_trees.py",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in FILES],
)
def test_attention(name):
    """Every comparison of a file's tests refuses every kind of mistake in attention."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.harness.faults", f"tests/{name}"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    kinds = "page", "eight positions", "row of K", "rows of V"
    pattern = "noticed: " + ", ".join(rf"(\d+) of {kind}" for kind in kinds)
    counts = re.search(pattern, done.stdout)
    assert counts, done.stdout[-2000:]
    print(counts[0])
    assert min(map(int, counts.groups())) >= FILES[name]


def test_the_attention_that_makes_mistakes_is_right_without_them():
    """Run in another interpreter, for the plugin replaces names in modules."""
    code = """
import numpy as np
from tests import reference
from tests.support.harness import faults
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, h, d)) for n, h, d in ((5, 6, 8), (9, 2, 8), (9, 2, 24)))
mask = rng.random((5, 9)) < 0.5
mask[2] = False
bias, sinks = rng.standard_normal((6, 5, 9)), rng.standard_normal(6)
for how in ({}, {"softcap": 0.5}, {"sinks": sinks}, {"bias": bias}):
    wanted = faults.exact_attention(q, k, v, mask, 0.3, **how)
    for x, y in zip(faults.attention(q, k, v, mask, 0.3, **how), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
assert reference.attention is faults.attention
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- kernels that move rows ---------------------------------------------------------------------

SPECS = {
    f"{dtype}-{kv_dtype}": KernelSpec(4, 2, 16, 16, dtype, kv_dtype, page_size=4)
    for dtype, kv_dtype in (("float32", "float32"), ("float16", "float16"), ("float32", "float16"))
}
ROWS, ROW = 21, 12  # of each step, and the one with a mistake


def put(argument: int, where, value):
    """A mistake: a kernel that is given `value` at some place of an argument."""

    def fault(kernel):
        def run(*arguments):
            array = view(arguments[argument]).copy()
            array[where] = value
            kernel(*arguments[:argument], array, *arguments[argument + 1 :])

        return run

    return fault


def repeat(argument: int, where=()):
    """A mistake: a kernel that takes the row before `ROW` in its place."""

    def fault(kernel):
        def run(*arguments):
            array = view(arguments[argument]).copy()
            array[(ROW, *where)] = array[(ROW - 1, *where)]
            kernel(*arguments[:argument], array, *arguments[argument + 1 :])

        return run

    return fault


def leave_merged_row(kernel):
    """A mistake: a row keeps what it had."""

    def run(o, lse, *others):
        before = view(o)[ROW].copy(), view(lse)[ROW].copy()
        kernel(o, lse, *others)
        view(o)[ROW], view(lse)[ROW] = before

    return run


def merge_row_twice(kernel):
    """A mistake: a row counts its other part twice."""

    def run(o, lse, o_other, lse_other):
        kernel(o, lse, o_other, lse_other)
        rows = [view(x)[ROW : ROW + 1] for x in (o, lse, o_other, lse_other)]
        kernel(*rows)

    return run


def merge(o, lse, o_other, lse_other):
    """Merge as in `python_kernels`; a partial state that saw nothing may hold NaN."""
    o, lse, o_other, lse_other = map(view, (o, lse, o_other, lse_other))
    parts = (np.where(np.isinf(y)[..., None], 0, x) for x, y in ((o, lse), (o_other, lse_other)))
    first, second = parts
    o[...], lse[...] = reference.merge(first, lse, second, lse_other)


def debug_get_kv(pages, slots, k, v, layer):
    view(k)[layer], view(v)[layer] = reference.gather_slots(view(pages), view(slots))


def compact_copy(pages, indptr, slots, num_sequences):
    pages = view(pages)
    for source, destination in view(slots).T:
        rows = reference.gather_slots(pages, np.array([source]))
        pages[...] = reference.append(pages, *rows, np.array([destination]))


def check_rotated(spec):
    qkv, positions, _ = fused(np.random.default_rng(0), spec, ROWS)
    rope = reference.Rope(rotary_dim=spec.qk_head_dim)
    check_rope_append(spec, rope, qkv, positions, [8, ROWS - 8])


# Of each kernel: itself in NumPy, the check of its tests, and mistakes.
MOVES = {
    "transpose_append": (
        python_kernels.transpose_append,
        lambda spec: check_transpose_append(spec, ROWS, 0),
        {
            "a row is not written": put(3, ROW, -1),
            "a row of K is written twice": repeat(1),
            "a row of V is written twice": repeat(2),
        },
    ),
    "rope_append": (
        python_kernels.rope_append,
        check_rotated,
        {
            "a row is not written": put(3, ROW, -1),
            "a head of Q is that of the row before": repeat(0, (0,)),
            "a head of K is that of the row before": repeat(0, (4,)),
            "a head of V is that of the row before": repeat(0, (7,)),
            "a row has the position of the one before": repeat(2),
        },
    ),
    "split_rotary": (
        python_kernels.split_rotary,
        lambda spec: check_split_rotary(spec, ROWS, 1, 0),
        {"a row is read twice": repeat(0), "a position is read twice": repeat(1)},
    ),
    "merge": (
        merge,
        lambda spec: check_merge(spec, ROWS, 0),
        {
            "a row is not merged": leave_merged_row,
            "a row is merged twice": merge_row_twice,
            "a row's other part is that of the row before": repeat(2),
            "a row's other lse is that of the row before": repeat(3),
        },
    ),
    "copy_single_page": (
        python_kernels.copy_single_page,
        lambda spec: check_copy_single_page(spec, 0),
        {
            "a slot is left out": lambda kernel: lambda *x: kernel(*x[:3], max(0, x[3] - 1)),
            "a slot more is copied": lambda kernel: lambda *x: kernel(*x[:3], x[3] + 1),
            "another page is copied": lambda kernel: lambda *x: kernel(x[0], 0, *x[2:]),
        },
    ),
    "copy_pages": (
        python_kernels.copy_pages,
        lambda spec: check_copy_pages(spec, 9, 0),
        {
            "a page is not copied": put(1, (2, 4), 0),
            "a slot is left out": put(1, (2, 4), 1),
            "a page is copied twice": put(1, (0, 4), 1),
        },
    ),
    "compact_copy": (
        compact_copy,
        lambda spec: check_compact_copy(spec, 30, 0),
        {
            "the last row is not copied": put(2, (0, 29), 0),
            "a row is copied elsewhere": put(2, (1, 29), 0),
        },
    ),
    "debug_get_kv": (
        debug_get_kv,
        lambda spec: check_debug_get_kv(spec, ROWS, 0),
        {"a row is read twice": repeat(1)},
    ),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", MOVES)
def test_moved_rows(monkeypatch, name, spec):
    kernel, check, faults = MOVES[name]
    for fault in (None, *faults.values()):
        run = kernel if fault is None else fault(kernel)
        monkeypatch.setattr(page_kernel_cases, "compiled", lambda *_, run=run: run)
        if fault is None:
            check(spec)
            continue
        with pytest.raises(AssertionError):
            check(spec)


APPEND_PREFILL_FAULTS = {
    "a row is not written": put(3, ROW, -1),
    "a head of Q is that of the row before": repeat(0, (0,)),
    "a head of K is that of the row before": repeat(0, (4,)),
    "a head of V is that of the row before": repeat(0, (7,)),
    "a row has the position of the one before": repeat(2),
    "the last position is not seen": lambda kernel: (
        lambda *x: kernel(*x[:7], np.maximum(view(x[7]) - 1, 1), *x[8:])
    ),
    "a page is read twice": lambda kernel: (
        lambda *x: kernel(*x[:6], np.repeat(view(x[6])[::2], 2)[: len(view(x[6]))], *x[7:])
    ),
}


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float16")])
def test_append_prefill(monkeypatch, dtypes):
    """Its rows are appended and attended to in one kernel: both are compared."""
    spec = make_spec((4, 2), 16, dtypes, 4)
    for fault in (None, *APPEND_PREFILL_FAULTS.values()):
        run = python_kernels.append_prefill if fault is None else fault(_append_prefill)
        monkeypatch.setattr(append_prefill_tests, "compiled", lambda *_, run=run: run)
        if fault is None:
            append_prefill_tests.check(spec, [(8, 8), (ROWS - 8, 30)], 0, True)
            continue
        with pytest.raises(AssertionError):
            append_prefill_tests.check(spec, [(8, 8), (ROWS - 8, 30)], 0, True)


def _append_prefill(*arguments):
    """The kernel in NumPy, some of whose arguments are arrays."""
    arguments = (tvm.runtime.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments)
    python_kernels.append_prefill(*arguments)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
