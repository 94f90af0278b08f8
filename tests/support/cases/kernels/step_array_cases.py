# SPDX-License-Identifier: Apache-2.0
"""The arrays of two decode steps, in NumPy, of which `advance_arrays` makes one of the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tir_kernels.cuda import step_arrays as kinds

from .... import reference

GARBAGE = 1 << 30
GROUPS = 2


class Step:
    """The arrays of a decode step whose sequences have these pages in each group."""

    def __init__(self, pages: list[list[np.ndarray]], positions: np.ndarray, page_size: int):
        self.positions = positions.astype(np.int32)
        self.lengths = self.positions % page_size + 1
        self.groups = []
        for group in pages:
            last_pages = np.array([ids[-1] for ids in group], np.int32)
            self.groups.append(
                {
                    kinds.INDPTR: np.cumsum([0, *map(len, group)], dtype=np.int32),
                    kinds.PAGE_IDS: np.concatenate(group).astype(np.int32),
                    kinds.LENGTHS: self.lengths,
                    kinds.SLOTS: last_pages * page_size + self.lengths - 1,
                }
            )

    def arrays(self) -> list[tuple[int, int, np.ndarray]]:
        """Kind, group and content of every array."""
        rows = np.arange(len(self.positions) + 1, dtype=np.int32)
        arrays = [(kinds.SAME, 0, rows), (kinds.NEXT, 0, self.positions)]
        for i, group in enumerate(self.groups):
            arrays += [(kind, i, array) for kind, array in group.items()]
        return arrays


def random_steps(rng, num_sequences: int, page_size: int, max_pages: int) -> tuple:
    """Two steps, the sequences that begin a page in the second one, and the pages."""
    num_pages = rng.integers(1, max_pages + 1, num_sequences)
    used = rng.choice([1, page_size // 2 + 1, page_size], num_sequences)  # slots of the last page
    positions = (num_pages - 1) * page_size + used - 1
    ids = iter(rng.permutation(GROUPS * (num_pages.sum() + num_sequences)))
    pages = [[np.array([next(ids) for _ in range(n)]) for n in num_pages] for _ in range(GROUPS)]
    rows = np.flatnonzero(used == page_size).astype(np.int32)
    new_pages = np.array([[next(ids) for _ in range(GROUPS)] for _ in rows], np.int32)
    last = Step(pages, positions, page_size)
    for group in range(GROUPS):
        for row, new_page in zip(rows, new_pages.reshape(-1, GROUPS)[:, group], strict=True):
            pages[group][row] = np.append(pages[group][row], new_page)
    return last, Step(pages, positions + 1, page_size), rows, new_pages.reshape(-1, GROUPS)


def laid_out(rng, arrays: list) -> tuple[np.ndarray, list[int]]:
    """The arrays in one buffer, with garbage between them, and where they begin."""
    parts, begins, size = [], [], 0
    for _, _, array in arrays:
        gap = int(rng.integers(1, 20))
        parts += [np.full(gap, GARBAGE, np.int32), array]
        begins.append(size + gap)
        size += gap + len(array)
    return np.concatenate([*parts, np.full(5, GARBAGE, np.int32)]), begins


def check(
    kernel: Callable, tensor: Callable, page_size: int, num_sequences: int, max_pages: int,
    block_size: int, seed: int,
) -> int:  # fmt: skip
    """Compare `advance_arrays` with NumPy; how many sequences begin a page."""
    rng = np.random.default_rng(seed)
    last, step, rows, new_pages = random_steps(rng, num_sequences, page_size, max_pages)
    before, sources = laid_out(rng, last.arrays())
    after, sinks = laid_out(rng, step.arrays())
    indptrs = [
        source
        for source, (kind, _, _) in zip(sources, last.arrays(), strict=True)
        if kind == kinds.INDPTR
    ]
    changes, num_blocks = [], 0
    for (kind, group, array), source, sink in zip(step.arrays(), sources, sinks, strict=True):
        changes.append([kind, source, sink, len(array), num_blocks, group, indptrs[group]])
        num_blocks += -(-len(array) // block_size)
    current = tensor(np.full(len(after), GARBAGE, np.int32))
    kernel(
        tensor(before), current, tensor(np.array(changes, np.int32)),
        tensor(rows), tensor(new_pages), block_size, num_blocks,
    )  # fmt: skip
    reference.assert_same_bits(current.numpy(), after)
    return len(rows)
