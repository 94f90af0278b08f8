# SPDX-License-Identifier: Apache-2.0
"""Pages that windows leave behind are found again by forks and pops, until they are reclaimed."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from ...support.cases.caches.cache_cases import DIM, MODES
from ...support.emulators.python_kernels import KERNELS, snapshot
from ...support.worlds.random_operation import KernelFails
from ..layers.test_cache_sliding import Pair

RECLAIMED = "have been reclaimed for others since their window left them behind"


def text_of(pair: Pair, seq_id: int, *lengths: int) -> Pair:
    pair.add(seq_id)
    for length in lengths:
        pair.step([seq_id], [length])
    return pair


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_forks_anywhere(mode, page_size):
    pair = Pair((0, 6, 13), mode, page_size=page_size, max_total_tokens=512, max_num_sequences=8)
    text_of(pair, 0, 32, 31, 1, 20)
    assert pair.cache.first_position(0, 1) >= 48
    for position in (83, 60, 47, 46, 45, 32, 21, 20, 7, 6, 1):
        pair.fork(0, 1, position)
        pair.step([1], [3])
        pair.fork(1, 2, position // 2)  # the child has the history of its parent
        pair.step([2, 0, 1], [2, 1, 1])
        pair.pop(0, 1)
        pair.remove(1)
        pair.remove(2)
    assert pair.cache.stats()["num_reclaimed_pages"] == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_pops_to_anywhere(page_size):
    """Covers a sequence, and a fork made after the window has slid."""
    pair = Pair((6, 0), "inline", page_size=page_size, max_total_tokens=512, max_num_sequences=8)
    text_of(pair, 0, 32, 32, 16)
    pair.fork(0, 1)
    for seq_id, counts in ((0, (33, 1, 20, 12)), (1, (57, 17, 6))):
        for count in counts:
            pair.pop(seq_id, count)
            pair.step([seq_id], [2])
    pair.step([0, 1], [5, 6])
    assert pair.cache.stats()["num_reclaimed_pages"] == 0


def test_children_go_back_when_their_parent_is_gone():
    pair = text_of(Pair((6,), max_total_tokens=512, max_num_sequences=8), 0, 32, 32)
    pair.fork(0, 1)
    pair.remove(0)
    pair.fork(1, 2, 9)
    pair.pop(1, 40)
    pair.step([1, 2], [1, 1])


def test_cached_pages_count_as_available():
    pair = Pair((6,), max_total_tokens=64, max_num_sequences=2)
    text_of(pair, 0, 32, 28)
    (group,) = pair.cache.stats()["groups"]
    numbers = [group[f"num_{kind}pages"] for kind in ("", "used_", "cached_", "free_")]
    assert numbers == [16, 6, 9, 1]
    assert pair.cache.num_available_pages() == 10
    oldest = pair.cache.cached_pages()
    text_of(pair, 1, 12)
    assert pair.cache.cached_pages() == oldest[2:]  # those of the first positions went first
    assert pair.cache.stats()["num_reclaimed_pages"] == 2
    pair.remove(1)
    assert pair.cache.cached_pages() == oldest[2:]  # nobody can find the pages of 1
    pair.cache.clear()
    assert pair.cache.stats()["num_free_pages"] == 16 and pair.cache.cached_pages() == []


def test_reclaimed_pages_are_an_error_that_changes_nothing():
    pair = Pair((6,), max_total_tokens=64, max_num_sequences=2)
    text_of(pair, 0, 32, 12)  # keeps positions from 20 on; five pages are free
    pair.fork(0, 1, 12)  # holds positions from 4 on
    pair.step([1], [24])  # takes the free pages and that of positions 0 to 3
    before = snapshot(pair.cache, [0, 1])
    assert pair.cache.stats()["num_reclaimed_pages"] == 1
    where = r"sequence 0 \(length 44\) at position 5: layers with a window of 6 would see "
    where += rf"position 0 next, but the pages of positions 0 to 3 {RECLAIMED}; "
    with pytest.raises(ValueError, match=rf"cannot pop {where}pop at position 9 or later, append"):
        pair.cache.pop_n(0, 39)
    with pytest.raises(ValueError, match=f"cannot fork {where}fork at position 9 or later"):
        pair.cache.fork_sequence(0, 2, 5)
    assert snapshot(pair.cache, [0, 1]) == before
    pair.remove(1)
    pair.fork(0, 2, 9)
    pair.pop(0, 35)
    pair.step([0, 2], [1, 2])


def test_writes_to_a_page_that_others_note_go_to_a_copy():
    pair = text_of(Pair((6,), max_total_tokens=512, max_num_sequences=8), 0, 32, 32)
    pair.fork(0, 1, 18)
    copies = pair.cache.stats()["cow_page_copies"]
    pair.step([1], [1])
    assert pair.cache.stats()["cow_page_copies"] == copies + 1
    rows = np.zeros((1, 4, 2, DIM), "float32")
    pair.cache.debug_set_kv(1, 13, rows, rows)
    pair.fork(0, 2, 19)  # sees what child 1 has written over in its own pages
    pair.step([2], [1])
    pair.remove(1)
    pair.pop(0, 46)
    pair.step([0], [9])


def test_an_aborted_step():
    """Lengths and pages are as before; what it has reclaimed is free then."""
    pair = Pair((6,), max_total_tokens=64, max_num_sequences=2)
    text_of(pair, 0, 32, 28)
    pair.add(1)
    available = pair.cache.num_available_pages()
    with pytest.raises(KeyError, match="stop"), pair.cache.forward([0, 1], [1, 17]):
        raise KeyError("stop")
    pair.cache.check_integrity()
    assert pair.cache.num_available_pages() == available
    assert pair.cache.sequence_length(1) == 0
    with pytest.raises(ValueError, match=RECLAIMED):
        pair.cache.fork_sequence(0, 2, 3)
    pair.pop(0, 30)
    pair.step([0, 1], [3, 17])


def test_a_step_that_cannot_begin_reclaims_nothing():
    pair = Pair((6,), max_total_tokens=64, max_num_sequences=2)
    text_of(pair, 0, 32, 28)
    text_of(pair, 1, 16)
    before = snapshot(pair.cache, [0, 1]), pair.cache.cached_pages()
    assert len(before[1]) == 6
    with pytest.raises(pkv.CacheFullError, match="needs 8 pages, but 6 of 16 are available"):
        pair.cache.begin_forward([0, 1], [16, 16])
    pair.cache.check_integrity()
    assert (snapshot(pair.cache, [0, 1]), pair.cache.cached_pages()) == before


def test_a_copy_that_fails_loses_one_page_at_most():
    fails = []

    def copy(pages, source, destination, length):
        if fails:
            raise KernelFails("copy_single_page")
        KERNELS["copy_single_page"](pages, source, destination, length)

    pair = Pair((6,), max_total_tokens=64, max_num_sequences=2, kernels={"copy_single_page": copy})
    text_of(pair, 0, 32, 31)
    pair.fork(0, 1)
    cached = pair.cache.cached_pages()
    fails.append(True)
    with pytest.raises(KernelFails):
        pair.cache.begin_forward([1], [9])
    fails.clear()
    pair.cache.check_integrity()
    assert pair.cache.cached_pages() == cached or pair.cache.cached_pages() == cached[1:]
    pair.step([1, 0], [9, 1])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
