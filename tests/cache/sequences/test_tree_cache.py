# SPDX-License-Identifier: Apache-2.0
"""Token trees through the cache: several rounds, then any commit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import Shape

from ...support.cases.caches.cache_cases import MODES
from ...support.cases.caches.tree_cache_cases import PAIRS, TreePair, grown, parametrize_pair
from ...support.cases.kernels.tree_cases import random_parents
from ...support.emulators.python_kernels import KERNELS, LAYER, make_cache
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step


@pytest.mark.parametrize("page_size", [1, 4, 64])
@parametrize_pair
def test_rounds_then_commits_in_any_order(make, page_size):
    pair = grown(make, page_size=page_size)
    pair.commit({1: 4})  # of the second round, below a later root
    pair.step({1: 1})
    pair.commit({2: 2, 0: 3})
    pair.step({0: 1, 1: 2, 2: 3})
    pair.step({0: [-1, 0], 1: [-1, 0]})
    pair.commit({0: 0, 1: 1})
    pair.step({2: 1, 0: 1, 1: 1})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["global", "mixed"])
def test_rotations_follow_the_depth(mode, name):
    pair = grown(PAIRS[name], mode=mode)
    pair.commit({0: 4, 2: 2, 1: 3})
    pair.step({0: 1, 1: 1, 2: 1})
    pair.step({0: [-1, -1, 1]})


def test_positions():
    cache = grown().cache
    with permissive_step(cache, [0, 2], [3, 1], [-1, 4, 5, 2]):
        assert cache.query_positions().numpy().tolist() == [30, 34, 31, 2]


@parametrize_pair
def test_trees_larger_than_any_tile(make):
    rng = np.random.default_rng(0)
    pair = make(max_total_tokens=2048, prefill_chunk_size=512, page_size=16)
    pair.add(0, 1)
    pair.step({0: 40, 1: 3})
    parents = random_parents(rng, 600, 40)
    pair.step({0: parents[:300], 1: random_parents(rng, 200)})
    pair.step({0: parents[300:]})
    pair.commit({1: 150, 0: 599})
    pair.step({0: 1, 1: 5})


@parametrize_pair
def test_forked_and_unforked_sequences(make):
    pair = make()
    pair.add(0, 1)
    pair.step({0: 10, 1: 4})
    pair.fork(0, 2)
    pair.fork(0, 3, 6)
    pair.step({2: [-1, 0, 0, -1], 0: [-1, 0, 1], 3: [-1, -1], 1: [-1, 0, 0]})
    pair.step({0: [0, 3], 3: [1, 1], 2: [3]})
    pair.commit({3: 3, 2: 2})
    pair.step({3: [-1, -1], 2: [-1, 0, 0], 0: [1]})
    pair.commit({0: 4, 1: -1, 3: -1, 2: 0})
    pair.step({0: 1, 1: 1, 2: 1, 3: 1})


@parametrize_pair
def test_a_fork_shares_what_is_committed(make):
    """Also where committed positions and nodes lie in one page."""
    pair = make()
    pair.add(0)
    pair.step({0: 6})
    pair.step({0: [-1, -1, 1, 1, 3]})
    before = pair.snapshot()
    for position in (-1, 7, 11):
        with pytest.raises(ValueError, match="positions from 6 on are token tree nodes"):
            pair.cache.fork_sequence(0, 1, position)
    assert pair.snapshot() == before
    pair.fork(0, 1, 6)
    pair.fork(0, 2, 3)
    pair.step({1: [-1, 0], 0: [4], 2: [-1, -1]})
    pair.fork(0, 3, 6)
    copies = pair.cache.stats()["cow_page_copies"]
    pair.commit({0: 5})  # writes to a page that sequence 3 shares
    assert pair.cache.stats()["cow_page_copies"] > copies
    pair.commit({1: 0, 2: 1})
    pair.step({0: 1, 1: 1, 2: 1, 3: 1})


def test_commit_of_a_prefix_moves_and_copies_nothing():
    pair = TreePair(kernels={**KERNELS_WITH_TREES, "compact_copy": None})
    pair.add(0, 1)
    pair.step({0: 5, 1: 5})
    pair.step({0: [-1, 0, 1, 1], 1: [-1, 0, 0]})
    pair.fork(0, 2, 5)
    pair.commit({0: 2, 1: -1})
    stats = pair.cache.stats()
    assert (stats["moved_tree_nodes"], stats["cow_page_copies"]) == (0, 0)
    assert (stats["committed_tree_nodes"], stats["dropped_tree_nodes"]) == (3, 4)
    assert stats["uncommitted_tree_nodes"] == 0


def test_counters():
    pair = grown()
    assert pair.cache.stats()["uncommitted_tree_nodes"] == 13
    assert pair.cache.sequence_length(1) == 12 and pair.cache.total_length() == 50
    pair.commit({1: 4, 2: -1})
    stats = pair.cache.stats()
    assert (stats["uncommitted_tree_nodes"], stats["total_tokens"]) == (5, 44)
    assert (stats["committed_tree_nodes"], stats["dropped_tree_nodes"]) == (2, 6)
    assert stats["moved_tree_nodes"] == 2
    assert pair.cache.num_available_pages() == stats["num_free_pages"]


@parametrize_pair
def test_our_copies_are_those_of_the_kernel(make):
    """Without the kernel `compact_copy` the rows are copied one by one."""
    pair = make(kernels={**make().kernels, "compact_copy": None}, page_size=4)
    pair.add(0, 1)
    pair.step({0: 6, 1: 3})
    pair.step({0: [-1, -1, 1, 2, 2, 1, 4], 1: [-1, 0, 0]})
    pair.commit({1: 2, 0: 6})
    pair.step({0: 1, 1: 1})


@parametrize_pair
def test_pop_drops_the_nodes_appended_last(make):
    pair = grown(make)
    pair.pop(1, 2)
    pair.check_rows()
    pair.step({1: [1, 3, 3], 0: [2]})
    pair.commit({1: 4})
    pair.step({1: 1})
    pair.pop(0, 8)  # all six nodes and two committed positions
    assert pair.cache.sequence_length(0) == 28
    pair.step({0: 2})
    pair.pop(2, 3)
    pair.step({2: 1})


def test_remove_and_clear_drop_the_tree():
    pair = grown()
    pair.remove(0)
    pair.add(0)
    pair.step({0: 2})
    pair.cache.clear()
    pair.cache.check_integrity()
    assert pair.cache.stats()["uncommitted_tree_nodes"] == 0
    assert pair.cache.num_available_pages() == 64


def test_chains_need_no_tree_kernels():
    pair = TreePair((0, 4), kernels=KERNELS)
    pair.add(0, 1, 2)
    pair.step({0: 9, 1: 4})
    pair.step({0: [-1, 0], 1: [-1]})
    pair.step({1: [0, 1, 2], 2: [-1]})
    pair.step({1: [3], 2: [0], 0: [1]})  # one row each: decode
    before = pair.snapshot()
    with pytest.raises(ValueError, match="layer 0 has no kernel 'tree_paged'"):
        pair.cache.begin_forward([0, 1], [1, 1], [1, 4])
    assert pair.snapshot() == before
    pair.commit({2: 0, 0: 1, 1: 3})
    pair.step({0: 1, 1: 1, 2: 1})


def test_a_window_keeps_what_the_committed_positions_need():
    """Nodes of many rounds do not push the past out of the window."""
    pair = TreePair((0, 4), max_total_tokens=512, page_size=4)
    pair.add(0)
    pair.step({0: 40})
    first = pair.cache.first_position(0, 1)
    assert first == 20
    for _ in range(5):
        pair.step({0: [-1] * 8})
        assert pair.cache.first_position(0, 1) == first
    pair.step({0: [39, 40, 41, 42, 43, 44]})
    pair.commit({0: 45})
    assert pair.cache.first_position(0, 1) == (47 - 3 - 16) // 4 * 4
    pair.step({0: 1})


def test_rows_of_nodes_from_outside():
    pair = grown()
    pair.check_rows()
    k, v = (x.numpy() for x in pair.cache.debug_get_kv(1, 8, 10))
    pair.cache.debug_set_kv(1, 8, -k, -v)
    for layer, rows in enumerate(pair.expected.sequences[1]):
        pair.expected.sequences[1][layer] = tuple(x.copy() for x in rows)
        for x in pair.expected.sequences[1][layer]:
            x[8:10] *= -1
    pair.check_rows()
    pair.step({1: [1]})
    pair.commit({1: 5})


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_steps_with_trees_allocate_nothing(aux_manager):
    pair = TreePair((0, 3), aux_manager=aux_manager)
    pair.add(0, 1)
    pair.step({0: 5, 1: 5})
    allocated = pair.cache.stats()["allocated_bytes"]
    rng = np.random.default_rng(0)
    for _ in range(5):
        pair.step({0: random_parents(rng, 40), 1: random_parents(rng, 20)})
        assert pair.cache.stats()["allocated_bytes"] == allocated
        pair.commit({1: 4, 0: 3})
        assert pair.cache.stats()["allocated_bytes"] == allocated


def test_global_functions():
    """The names of the stock interface, with and without the last argument."""
    cache = make_cache(KERNELS_WITH_TREES)
    cache.add_sequence(4)
    begin, end = (
        tvm_ffi.get_global_func(f"vm.builtin.kv_state_{name}_forward") for name in ("begin", "end")
    )
    name = "vm.builtin.attention_kv_cache_commit_accepted_token_tree_nodes"
    begin(cache, Shape([4]), Shape([2]))
    end(cache)
    begin(cache, Shape([4]), Shape([1]), None)
    end(cache)
    begin(cache, Shape([4]), Shape([3]), Shape([-1, 0, 0]))
    end(cache)
    tvm_ffi.get_global_func(name)(cache, Shape([4]), Shape([2]))
    assert cache.sequence_length(4) == 5
    assert cache.description["layers"][0]["num_kv_heads"] == LAYER["num_kv_heads"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
