# SPDX-License-Identifier: Apache-2.0
"""Kernels of MLA layers with a window, against the reference: splits, pages, trees, the past."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels import build_kernel, kernel_names
from tir_kernels.cpu.attention.mla import mla_prefill
from tir_kernels.semantics.visibility import WindowMask

from ..support.cases.kernels.kernel_specs import BF16, F16, F32, parametrize_cpu
from ..support.cases.kernels.mla_cases import LatentBatch, make_spec
from ..support.cases.kernels.tree_cases import LatentTrees, chain, random_parents
from ..support.harness.selections import few_of, latin_square

SLIDING = {"kind": "mla_sliding"}
SPECS = {
    "16x64+16-bf16-p16": make_spec(16, (64, 16), (BF16, BF16), **SLIDING),
    "3x40+24-f32-p1": make_spec(3, (40, 24), page=1, **SLIDING),
    "16x512+64-f32-p16": make_spec(16, (512, 64), **SLIDING),
    "25x72+0-f16-f32-p4": make_spec(25, (72, 0), (F16, F32), 4, **SLIDING),
    "7x56+16-f32-int8-p32": make_spec(7, (56, 16), (F32, "int8"), 32, **SLIDING),
}
BATCHES = {
    "one-row": [(1, 0), (1, 1), (1, 33), (1, 64), (1, 128), (1, 300), (1, 0)],
    "long": [(1, 1700)],
    "mixed": [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (4, 6), (90, 500)],
}
# Less than a page and more, no multiple of anything, and more than there is.
WINDOWS = [1, 16, 37, 130, 2**31 - 1]
specs = few_of(SPECS.values(), 2)
parametrize_specs = pytest.mark.parametrize("spec", specs, ids=SPECS)
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")


@latin_square(3, "batch", "window")
@parametrize_specs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "past"])
@parametrize_seed
def test_mla_prefill_sliding(spec, batch, causal, window, seed):
    case = LatentBatch(spec, BATCHES[batch], seed)
    case.run(causal, window=window)
    case.verify(causal, window=window)


@parametrize_specs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_hidden", [False, True], ids=["with-step", "past"])
@parametrize_seed
def test_mla_tree_sliding(spec, is_hidden, window, seed):
    rng = np.random.default_rng(seed)
    trees = [
        (4, 40, [-1, 0, 0, 2, 1, 4]),
        (1, 9, []),
        (5, 0, random_parents(rng, 5)),
        (70, 90, random_parents(rng, 90)),
        (3, 61, chain(7)),
    ]
    case = LatentTrees(spec, trees, seed)
    if is_hidden:
        case.hide_step()
    case.run(window=window)
    case.verify(window=window)


@latin_square(3, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", "x86-64-v4", "x86-64")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@parametrize_seed
def test_other_instruction_sets(cpu, dtype, seed):
    spec = make_spec(7, (104, 24), (F32, dtype), 8, cpu=cpu, **SLIDING)
    case = LatentBatch(spec, BATCHES["mixed"], seed)
    case.run(True, cpu, window=21)
    case.verify(window=21)
    case = LatentTrees(spec, [(4, 40, [-1, 0, 0, 2, 1, 4]), (2, 9, [])], seed)
    case.run(cpu, window=6)
    case.verify(window=6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@parametrize_seed
def test_nan_before_a_window(dtype, seed):
    """Of two rows the second does not see the first position of the first row's window."""
    spec = make_spec(5, (128, 32), (dtype, dtype), **SLIDING)
    for kv_len in (65, 130, 200):
        case = LatentBatch(spec, [(2, kv_len)], seed)
        slot = case.slots(0)[kv_len - 1 - 33]
        case.pages[slot // spec.page_size, slot % spec.page_size] = np.nan
        case.run(window=33)
        o = case.o.numpy().astype("float32")
        assert np.isnan(o[0]).all() and np.isfinite(o[1]).all()


@parametrize_seed
def test_nan_in_what_no_row_sees(seed):
    """Slots before a window may hold anything, as those of an imported sequence do."""
    spec = SPECS["3x40+24-f32-p1"]
    case = LatentBatch(spec, [(1, 1700), (70, 900)], seed)
    wanted = case.expected(window=33)
    for b, (num_rows, kv_len) in enumerate(zip(case.num_rows, case.kv_lens, strict=True)):
        slots = case.slots(b)[: kv_len - num_rows + 1 - 33]
        case.pages[slots // spec.page_size, slots % spec.page_size] = np.nan
    case.run(window=33)
    case.compare(wanted, *case.dtypes)


def test_the_kernels_of_layers_with_a_window():
    plain, sliding = make_spec(4, (32, 8)), make_spec(4, (32, 8), **SLIDING)
    with_rows = make_spec(4, (32, 8), original=(24, 16), **SLIDING)
    assert {"mla_prefill_sliding", "mla_tree_sliding"} <= set(kernel_names(sliding))
    assert not {"mla_prefill", "mla_tree", "mla_prefill_shared"} & set(kernel_names(sliding))
    assert not {name for name in kernel_names(plain) if "sliding" in name}
    assert {"prefill_ragged_sliding", "tree_sliding"} <= set(kernel_names(with_rows))
    names = [parameter.name for parameter in build_kernel("mla_prefill_sliding", sliding).params]
    assert names[-1] == "window" and "first_positions" not in names
    with pytest.raises(ValueError, match="the kernel takes no window, but WindowMask has one"):
        mla_prefill(plain, mask=WindowMask)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
