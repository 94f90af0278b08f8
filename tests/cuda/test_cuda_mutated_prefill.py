# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the source of prefill, MLA and shared prefixes on GPUs fail the comparisons."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.gpu.attention import query_tiles
from tir_kernels.gpu.scores.mask import TileMask
from tir_kernels.gpu.scores.non_finite_v import NonFiniteGuard
from tir_kernels.gpu.scores.query_rows import QueryRows
from tir_kernels.gpu.tiles.code_pipeline import CodePipeline
from tir_kernels.gpu.tiles.pipeline import KvPipeline
from tir_kernels.gpu.work.tile_output import MergedOutput, TileOutput
from tir_kernels.gpu.work.tile_work import BalancedSplits, BalancedWork, FixedSplits, FixedWork
from tir_kernels.gpu.work.work_items import Items

from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels.attention_cases import PagedBatch, altered_kernels
from ..support.cases.kernels.cuda_cases import BF16, F16, make_spec
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.emulators.cuda_emulator import is_right, multiprocessors
from ..support.harness.mutated_source import Mistake
from ..support.harness.selections import every_nth

PAGED = make_spec((4, 2), 32)
CODES = make_spec((4, 2), 32, (F16, "int8"))
LATENT = make_spec((5, 1), (80, 64), (BF16, BF16), 4, kind="mla")
SHARED = make_spec((4, 2), 32, page=4)


def paged() -> None:
    with multiprocessors(1):
        case = PagedBatch(PAGED, [(3, 70), (0, 33), (2, 0), (70, 131)], 0)
        case.prefill()
        case.verify()


def split() -> None:
    with multiprocessors(132):
        case = PagedBatch(PAGED, [(3, 1400), (1, 300)], 0)
        case.prefill()
        case.verify()


def windows() -> None:
    with multiprocessors(1):
        case = PagedBatch(PAGED, [(3, 70), (70, 131)], 0)
        case.prefill(window=20)
        case.verify(window=20)


def dropped_positions() -> None:
    with multiprocessors(1):
        case = WindowBatch(PAGED, [(3, 50, 5, 30, 12), (2, 40, 0, 0, None)], 0)
        case.run("prefill", case.length_rows(4).ravel(), False, True)
        case.verify(4, False)


def codes() -> None:
    with multiprocessors(1):
        case = PagedBatch(CODES, [(3, 70), (2, 40)], 0)
        case.prefill()
        case.verify()


def not_finite() -> None:
    with multiprocessors(1):
        case = PagedBatch(PAGED, [(8, 40)], 0)
        page, slot = case.page_ids[2], 3  # position 35, which rows 3 and later see
        case.pages[page, 1, :, slot, 5] = np.nan
        case.prefill()
        rows = np.isnan(case.o.numpy()).any(axis=(1, 2))
        assert rows.tolist() == [False] * 3 + [True] * 5


def latent() -> None:
    with multiprocessors(2):
        case = LatentBatch(LATENT, [(0, 0), (1, 1), (3, 70), (2, 0), (40, 61), (1, 300)], 0)
        case.run()
        case.verify()


def shared() -> None:
    with multiprocessors(3):
        case = SharedBatch(SHARED, [(16, 5), (8, 0), (75, 40), (8, 2)], 0)
        case.check()
        case.check(1, 3)


MISTAKES = [
    Mistake(
        paged, query_tiles, "attend_to_tiles", "mask.hides_some(first)", "first < mask.shared_begin"
    ),
    Mistake(
        paged,
        query_tiles,
        "attend_to_tiles",
        "(mask.start, mask.end)",
        "(mask.start, mask.end - 1)",
    ),
    Mistake(
        paged,
        query_tiles,
        "attend_to_tiles",
        "first < mask.joint_end",
        "first + 16 < mask.joint_end",
    ),
    Mistake(
        paged, query_tiles, "attend_to_tiles", "softmax.update(scores, o, left_factor)", "scores"
    ),
    Mistake(paged, query_tiles, "load_q", "rows.index(row)", "rows.index(row + 1)"),
    Mistake(paged, TileMask, "row_end", "token(row)", "token(row + 1)"),
    Mistake(paged, TileMask, "_is_visible", "first + column < end", "first + column <= end"),
    Mistake(paged, KvPipeline, "stage", "_of_copies(tile)", "_of_copies(tile + 1)"),
    Mistake(paged, FixedSplits, "take_split", "count - 1 - self.search.index", "count - 1"),
    Mistake(split, FixedSplits, "clip", "self.split * size", "self.split * (size + 1)"),
    Mistake(split, FixedSplits, "state_index", "self.split, ", "0, "),
    Mistake(split, FixedWork, "launch_merge", "(i, *output)", "(0 * i, *output)"),
    Mistake(
        latent, BalancedSplits, "find_cut", "tile_begin = cut  #", "tile_begin = self.total  #"
    ),
    Mistake(paged, TileOutput, "_store_rows_of_o", "n * 8 + column", "n * 8"),
    Mistake(windows, TileMask, "row_begin", ".begin(*arguments)", ".begin(*arguments) + 1"),
    Mistake(dropped_positions, TileMask, "span", "gap.span(i,", "gap.span(0,"),
    Mistake(codes, CodePipeline, "_scale_place", "plane * codes", "0 * codes"),
    Mistake(not_finite, NonFiniteGuard, "mark", "_CAREFUL", "_DONE"),
    Mistake(not_finite, NonFiniteGuard, "end_pass", "self.mode = _CAREFUL", "self.mode = _DONE"),
    Mistake(latent, BalancedSplits, "advance", "count == self.num_kv_tiles", "self.kv_tile == 0"),
    Mistake(latent, BalancedSplits, "advance", "self.kv_tile > 0", "self.kv_tile >= 0"),
    Mistake(latent, BalancedSplits, "clip", "T.min(mask.end, self.end)", "mask.end"),
    Mistake(latent, BalancedSplits, "find_tile", "T.truncmod(number, num_tiles)", "0 * number"),
    Mistake(latent, BalancedSplits, "num_splits", "self.block + 1", "self.block"),
    Mistake(latent, BalancedWork, "launch_merge", "i > 0", "i >= 0"),
    Mistake(shared, MergedOutput, "prepare", "merged.weights[1]", "merged.weights[0]"),
    Mistake(shared, MergedOutput, "prepare", "lse[h] = merged.lse", "pass"),
    Mistake(shared, QueryRows, "row_of_q", "self.row_ids[at]", "at"),
    Mistake(shared, Items, "kv_len", "self.offset + i", "i"),
]


@pytest.fixture
def fresh_kernels():
    """Kernels that a test builds are forgotten."""
    with altered_kernels():
        yield


@pytest.mark.parametrize(
    "check", [paged, split, windows, dropped_positions, codes, not_finite, latent, shared]
)
def test_without_a_mistake(check):
    check()


def test_every_mistake_can_be_made(monkeypatch):
    """The sources still have the texts that the mistakes replace."""
    for mistake in MISTAKES:
        with monkeypatch.context() as undone:
            mistake.make(undone)


@pytest.mark.parametrize("mistake", every_nth(MISTAKES, 6), ids=str)
def test_mistakes_are_found(mistake, monkeypatch, fresh_kernels):
    mistake.make(monkeypatch)
    assert not is_right(mistake.check)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
