# SPDX-License-Identifier: Apache-2.0
"""decode_sliding and prefill_sliding against the reference: windows, chunks, page sizes."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    DECODE_BATCHES,
    F16,
    F32,
    SOME_SPECS,
    SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.harness.selections import few_of, latin_square

# Less than a page and more, no multiple of anything, and more than there is; negative: chunks.
WINDOWS = [1, 16, 37, 2**31 - 1, -5, -32, -1000]
parametrize_specs = pytest.mark.parametrize("spec", few_of(SOME_SPECS.values(), 2), ids=SOME_SPECS)


@latin_square(3, "batch", "window")
@parametrize_specs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", ["mixed", "long", "cuts"])
@parametrize_seed
def test_decode(spec, batch, window, seed):
    case = PagedBatch(spec, DECODE_BATCHES[batch], seed)
    case.decode(window=window)
    case.verify(window=window)


@parametrize_seed
def test_decode_may_see_nothing(seed):
    """A window of 1 leaves nothing of the past: rows that follow it get window 0."""
    case = PagedBatch(SPECS["32:8x128-f32-p16"], DECODE_BATCHES["cuts"], seed)
    case.decode(window=0)
    case.verify(window=0)
    assert np.isneginf(case.lse.numpy()).all()


@latin_square(2, "batch", "window")
@parametrize_specs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", ["mixed", "tiles"])
@parametrize_seed
def test_prefill(spec, batch, window, seed):
    case = PagedBatch(spec, BATCHES[batch], seed)
    case.prefill(window=window)
    case.verify(window=window)


@parametrize_specs
@pytest.mark.parametrize("window", WINDOWS)
@parametrize_seed
def test_ragged_prefill(spec, window, seed):
    case = RaggedBatch(spec, BATCHES["mixed"], seed)
    case.prefill(window=window)
    case.verify(window=window)


@parametrize_specs
@parametrize_seed
def test_prefill_over_the_past(spec, seed):
    """causal = 0: the rows follow the pages' positions."""
    for window in (100, -100):
        case = PagedBatch(spec, BATCHES["tiles"], seed)
        case.q_positions += np.repeat(case.num_rows, case.num_rows).astype(np.int32)
        case.prefill(False, window=window)
        case.verify(False, window=window)


@parametrize_seed
def test_decode_over_the_past(seed):
    """A row that follows the pages begins to see where its own chunk does."""
    case = PagedBatch(SPECS["32:8x128-f32-p16"], DECODE_BATCHES["cuts"], seed)
    case.q_positions += 1
    case.decode(window=-33)
    case.verify(False, window=-33)


def hide_with_nan(case: PagedBatch, window: int, slack: int) -> None:
    """NaN in all slots more than `slack` positions before what the first row of each sees."""
    page = case.spec.page_size
    for b, (num_rows, kv_len) in enumerate(zip(case.num_rows, case.kv_lens, strict=True)):
        table = case.page_ids[case.page_indptr[b] : case.page_indptr[b + 1]]
        for position in range(max(0, kv_len - num_rows + 1 - window - slack)):
            case.pages[table[position // page], :, :, position % page] = np.nan


def verify_without_nan(case: PagedBatch, window: int) -> None:
    """Compare; the reference multiplies what it hides with zeros."""
    case.pages = np.nan_to_num(case.pages)
    case.verify(window=window)


@parametrize_seed
def test_what_lies_far_before_the_window_is_not_read(seed):
    spec = SPECS["32:8x128-f32-p16"]
    case = PagedBatch(spec, [(1, 1700), (1, 40), (1, 700)], seed)
    hide_with_nan(case, 33, slack=16)
    case.decode(window=33)
    verify_without_nan(case, 33)
    case = PagedBatch(spec, [(70, 1700), (1, 40), (200, 700)], seed)
    hide_with_nan(case, 33, slack=16)
    case.prefill(window=33)
    verify_without_nan(case, 33)


@pytest.mark.parametrize("window", [1, 20])
@parametrize_seed
def test_inline_rope_counts_from_the_first_slot(window, seed):
    """Every sequence of a batch begins at a position of its own."""
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_type", "yarn"))
    for spec in (
        make_spec((8, 2), 128),
        make_spec((4, 2), 96, (BF16, BF16), 64, rope=RopeSpec(1e4, 1.0, 96, yarn)),
    ):
        case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
        case.decode(inline=True, window=window)
        case.verify(inline=True, window=window)
        for batch in (PagedBatch, RaggedBatch):
            case = batch(spec, [(3, 70), (2, 2), (65, 90)], seed)
            case.prefill(inline=True, window=window)
            case.verify(inline=True, window=window)


@latin_square(3, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", "x86-64")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@parametrize_seed
def test_other_instruction_sets(cpu, dtype, seed):
    target = vector_target(cpu)
    spec = make_spec((7, 1), 104, (F32, dtype), 8, target=target)
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(cpu, window=21)
    case.verify(window=21)
    case = PagedBatch(spec, BATCHES["tiles"], seed)
    case.prefill(True, cpu, window=21)
    case.verify(window=21)


@parametrize_seed
def test_soft_cap(seed):
    """The cap comes before the window hides anything."""
    spec = make_spec((4, 2), 64, logit_softcap=0.5)
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(window=21)
    case.verify(window=21)
    case = PagedBatch(spec, BATCHES["tiles"], seed)
    case.prefill(window=21)
    case.verify(window=21)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
