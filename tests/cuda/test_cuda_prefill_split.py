# SPDX-License-Identifier: Apache-2.0
"""Few rows over many positions: blocks split what a tile of rows sees, emulated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tir_kernels.gpu.tiles.tiling import Tiling
from tir_kernels.gpu.work.tile_work import MIN_COLUMNS
from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels import attention_cases
from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch, cuda_text
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.tree_cases import (
    LatentTrees,
    PagedTrees,
    RaggedTrees,
    chain,
    random_parents,
)
from ..support.emulators.cuda_emulator import emulated, launches, multiprocessors, mutated
from ..support.harness.selections import few_of

SPECS = {
    "5:1x80-bf16-p4": make_spec((5, 1), 80, (BF16, BF16), 4),
    "4:2x128-f16-p16": make_spec((4, 2), 128),
    "4:2x32-f32-p16": make_spec((4, 2), 32, (F32, F32)),
}
SMALL = SPECS["5:1x80-bf16-p4"]
SLICED = make_spec((2, 1), 264, (F16, F16))  # blocks share out the columns of V, too
LATENT = make_spec((5, 1), (80, 64), (F16, F16), 4, kind="mla", rope=RopeSpec(rotary_dim=0))
# A long sequence, one without rows, rows that see nothing, and some that see little.
FEW_ROWS = [(3, 1300), (0, 40), (2, 0), (1, 5), (7, 290)]
parametrize_specs = pytest.mark.parametrize("spec", few_of(SPECS.values(), 2), ids=SPECS)
parametrize_kinds = pytest.mark.parametrize("kind", [PagedBatch, RaggedBatch])


def check_is_split(made: list) -> None:
    """Check two launches: the first splits tiles over blocks, the second merges."""
    split, _ = made
    assert split.grid[2] > 1
    assert any(split.copied_bytes[split.grid[0] * split.grid[1] :])


@parametrize_specs
@parametrize_kinds
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@parametrize_seed
def test_few_rows(kind, spec, causal, seed):
    case = kind(spec, FEW_ROWS, seed)
    with launches() as made:
        case.prefill(causal)
    case.verify(causal)
    check_is_split(made)


@parametrize_kinds
@pytest.mark.parametrize("count", [5, 12, 100])
def test_any_number_of_splits(kind, count):
    case = kind(SMALL, FEW_ROWS, 0)
    with multiprocessors(count), launches() as made:
        case.prefill()
    case.verify()
    check_is_split(made)


@parametrize_kinds
@pytest.mark.parametrize("window", [17, 600])
@parametrize_seed
def test_sliding_windows(kind, window, seed):
    spec = dataclasses.replace(SMALL, logit_softcap=1.5)
    case = kind(spec, FEW_ROWS, seed)
    with launches() as made:
        case.prefill(window=window, inline=True)
    case.verify(window=window, inline=True)
    if window == 600:
        check_is_split(made)


@parametrize_seed
def test_columns_of_v_are_shared_out_too(seed):
    case = PagedBatch(SLICED, [(2, 800), (1, 3)], seed)
    with launches() as made:
        case.prefill()
    case.verify()
    check_is_split(made)
    assert made[0].grid[1] == Tiling.of(SLICED, F16).slices == 2


@parametrize_seed
def test_windows_of_sequences(seed):
    """Columns before the gap are split, and so are those behind it."""
    case = WindowBatch(SMALL, [(3, 1400, 600, 700, None), (2, 900, 4, 300, 580)], seed)
    with launches() as made:
        case.run("prefill", case.length_rows(4).reshape(-1), True, causal=True)
    case.verify(4, True)
    check_is_split(made)


@parametrize_seed
@pytest.mark.parametrize("kind", [PagedTrees, RaggedTrees, LatentTrees])
def test_trees(kind, seed):
    rng = np.random.default_rng(seed)
    trees = [(7, 700, random_parents(rng, 7)), (5, 600, chain(9)), (3, 0, random_parents(rng, 3))]
    spec = LATENT if kind is LatentTrees else make_spec((4, 2), 32, (F32, F32))
    if kind is RaggedTrees:
        trees = [(n, before + len(parents), parents) for n, before, parents in trees]
    case = kind(spec, trees, seed)
    with launches() as made:
        case.run()
    case.verify()
    check_is_split(made)


@on_gpu_too
def test_rows_of_no_sequence_are_left_alone():
    """The outputs may have more rows than the sequences."""
    case = PagedBatch(SMALL, [(2, 600), (3, 9)], 0)
    for name, count in (
        ("query_indptr", 2),
        ("page_indptr", 2),
        ("last_page_len", 1),
        ("k_offsets", 1),
    ):
        setattr(case, name, getattr(case, name)[:count])
    case.prefill()
    for array in (case.o.numpy().astype(F32), case.lse.numpy()):
        assert np.isnan(array[2:]).all() and not np.isnan(array[:2]).any()


def test_enough_tiles_are_not_split():
    """One launch then, and no state is kept."""
    case = PagedBatch(SMALL, [(1, 600)] * 4, 0)
    with multiprocessors(1), launches() as made:
        case.prefill()
    case.verify()
    assert [launch.grid for launch in made] == [(4, 1, 1)]


def test_a_share_is_worth_its_merge():
    """A block has some tiles of columns, if the sequences have."""
    assert MIN_COLUMNS % Tiling.of(SMALL, BF16).positions == 0
    for length, splits in ((MIN_COLUMNS, 1), (MIN_COLUMNS + 1, 2), (5 * MIN_COLUMNS, 5)):
        case = PagedBatch(SMALL, [(1, length)], 0)
        with launches() as made:
            case.prefill()
        case.verify()
        assert made[0].grid == (1, 1, splits)
        assert all(made[0].copied_bytes)


def test_the_merge_waits(monkeypatch):
    text = cuda_text("prefill", SMALL)
    wait = " pagedkv_wait_for_before();"
    assert text.count(wait) == 2
    function = emulated(mutated(text, wait, which=1)).get_function("prefill")
    monkeypatch.setattr(attention_cases, "compiled", lambda *arguments: function)
    case = PagedBatch(SMALL, FEW_ROWS, 0)
    case.prefill()
    with pytest.raises(AssertionError):
        case.verify()


@on_gpu_too
def test_inline_rope_and_alibi():
    slopes = tuple(reference.alibi_slopes(5))
    spec = dataclasses.replace(SMALL, alibi_slopes=slopes, rope=RopeSpec(rotary_dim=20))
    case = PagedBatch(spec, FEW_ROWS, 0)
    case.prefill(inline=True)
    case.verify(inline=True)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
