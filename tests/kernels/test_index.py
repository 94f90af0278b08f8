# SPDX-License-Identifier: Apache-2.0
"""The kernels `index_top_k` and `index_top_blocks` against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.index_spec import IndexSpec

from ..reference.index import assert_chosen, assert_chosen_blocks, block_scores, index_scores
from ..support.cases.kernels.attention_cases import (
    compiled,
    indptr,
    normal,
    page_dtype,
    pool_of,
    random_pages,
    tensor,
)
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, NATIVE, parametrize_seed
from ..support.harness.selections import few_of, latin_square

SPECS = [
    IndexSpec(4, 64, F32, F32, 16, NATIVE),
    IndexSpec(64, 128, BF16, BF16, 64, NATIVE),
    IndexSpec(3, 32, F16, F32, 1, NATIVE),
    IndexSpec(1, 40, F32, BF16, 4, NATIVE),
    IndexSpec(300, 16, F32, F32, 4, NATIVE),
]
QUANTIZED = [
    IndexSpec(64, 128, BF16, "float8_e4m3fn", 64, NATIVE),
    IndexSpec(4, 64, F32, "int8", 16, NATIVE),
    IndexSpec(3, 32, F16, "int8", 1, NATIVE),
    IndexSpec(5, 72, BF16, "int8", 4, NATIVE),
    IndexSpec(5, 72, F32, "float8_e4m3fn", 4, NATIVE),
]
# (rows of the step, positions), and how many are chosen.
BATCHES = {
    "decode": ([(1, 3000), (1, 1), (1, 70)], 64),
    "prompts": ([(100, 300), (0, 5), (3, 3), (1, 64)], 17),
    "one": ([(5, 200)], 1),
}


class Case:
    """Keys in shuffled pages, with NaN wherever nothing lies."""

    def __init__(self, spec: IndexSpec, lengths, seed: int):
        self.spec, rng = spec, np.random.default_rng(seed)
        self.num_rows, self.kv_lens = (list(x) for x in zip(*lengths, strict=True))
        page, total = spec.page_size, sum(self.num_rows)
        num_pages = [-(-kv // page) for kv in self.kv_lens]
        rows = spec.rows
        shape = (sum(num_pages) + 3, page, spec.dim)
        self.pages = np.full(shape, np.nan, page_dtype(rows))
        self.page_indptr = indptr(num_pages)
        self.page_ids = rng.permutation(len(self.pages))[: sum(num_pages)].astype(np.int32)
        self.keys = [random_pages(rng, (kv, spec.dim), rows) for kv in self.kv_lens]
        for b, keys in enumerate(self.keys):
            ids = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
            for at, key in enumerate(keys):
                self.pages[ids[at // page], at % page] = key
        self.last = [kv - (n - 1) * page for kv, n in zip(self.kv_lens, num_pages, strict=True)]
        self.q = normal(rng, (total, spec.num_heads, spec.dim), spec.dtype)
        self.weights = normal(rng, (total, spec.num_heads), F32)

    def run(self, k: int) -> np.ndarray:
        positions = tensor(np.full((len(self.q), k), 77, np.int32))
        pages = pool_of(self.spec.rows, self.pages)
        arrays = [self.q, indptr(self.num_rows), self.weights, pages, self.page_indptr]
        arrays += [self.page_ids, np.array(self.last, np.int32)]
        kernel = compiled("index_top_k", self.spec)
        kernel(*map(tensor, arrays), positions, 0.25)
        return positions.numpy()

    def run_blocks(self, k: int, block_size: int, kept: tuple[int, int]) -> np.ndarray:
        blocks = tensor(np.full((*self.q.shape[:2], k), 77, np.int32))
        pages = pool_of(self.spec.rows, self.pages)
        arrays = [self.q, indptr(self.num_rows), pages, self.page_indptr, self.page_ids]
        arrays += [np.array(self.last, np.int32)]
        kernel = compiled("index_top_blocks", self.spec)
        kernel(*map(tensor, arrays), blocks, block_size, *kept)
        return blocks.numpy()

    def rows(self):
        """Each row of the call, and the keys that it sees."""
        row = 0
        for n, kv, keys in zip(self.num_rows, self.kv_lens, self.keys, strict=True):
            for own in range(kv - n, kv):
                yield row, keys[: own + 1]
                row += 1

    def verify(self, positions: np.ndarray) -> None:
        for row, keys in self.rows():
            scores = index_scores(self.q[row], self.weights[row], keys, 0.25)
            assert_chosen(positions[row], scores, self.spec.dtype)

    def verify_blocks(self, blocks: np.ndarray, block_size: int, kept: tuple[int, int]) -> None:
        for row, keys in self.rows():
            scores = block_scores(self.q[row], keys, block_size)
            assert_chosen_blocks(blocks[row], scores, kept, self.spec.dtype)


def name_of(spec: IndexSpec) -> str:
    return f"{spec.num_heads}x{spec.dim}-{spec.dtype}-{spec.kv_dtype}"


@parametrize_seed
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("spec", few_of(SPECS, 2) + few_of(QUANTIZED, 2), ids=name_of)
def test_index_top_k(spec, batch, seed):
    case = Case(spec, batch[0], seed)
    case.verify(case.run(batch[1]))


def test_equal_scores_choose_the_first_positions():
    case = Case(SPECS[0], [(1, 200)], 0)
    case.pages[:] = 1
    assert case.run(7).tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    case.q[:] = 0  # all scores are 0
    assert case.run(3).tolist() == [[0, 1, 2]]


def test_equal_scores_behind_a_full_list_are_not_chosen():
    case = Case(SPECS[0], [(1, 3000)], 0)
    case.pages[:] = 1
    assert case.run(7).tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_negative_scores_are_ordered_too():
    case = Case(SPECS[0], [(2, 300)], 1)
    case.weights[:] = -np.abs(case.weights)
    case.verify(case.run(40))


# Pages of a block, blocks of a list, and those that are always chosen.
BLOCKS = {"local": (2, 5, (0, 1)), "both": (1, 9, (2, 3)), "none": (5, 3, (0, 0))}


@parametrize_seed
@latin_square(3, "batch", "how")
@pytest.mark.parametrize("how", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("batch", [x[0] for x in BATCHES.values()], ids=BATCHES.keys())
@pytest.mark.parametrize("spec", few_of(SPECS, 2) + few_of(QUANTIZED, 1), ids=name_of)
def test_index_top_blocks(spec, batch, how, seed):
    pages, k, kept = how
    case = Case(spec, batch, seed)
    blocks = case.run_blocks(k, pages * spec.page_size, kept)
    case.verify_blocks(blocks, pages * spec.page_size, kept)


def test_blocks_that_are_always_chosen_win():
    case = Case(SPECS[0], [(1, 200)], 0)
    assert case.run_blocks(3, 32, (1, 2))[0].tolist() == [[0, 5, 6]] * 4
    case.pages[:] = 1  # all scores are equal
    assert case.run_blocks(4, 32, (0, 1))[0].tolist() == [[0, 1, 2, 6]] * 4
    assert case.run_blocks(9, 32, (0, 9))[0].tolist() == [[*range(7), -1, -1]] * 4
