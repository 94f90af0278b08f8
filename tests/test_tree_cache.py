# SPDX-License-Identifier: Apache-2.0
"""Token trees through the cache: several rounds, any commit, and calls that must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from . import reference
from .python_kernels import KERNELS, LAYER, make_cache, poison, snapshot
from .python_tree_kernels import KERNELS_WITH_TREES
from .tree_cache_cases import DIM, MODES, LatentTreePair, TreePair
from .tree_cases import random_parents

# Two layers without a window, both kinds in one cache, and windows alone; and latent rows.
PAIRS = {
    "global": lambda **fields: TreePair((0, 0), **fields),
    "mixed": lambda **fields: TreePair((0, 5, 0, 2), **fields),
    "sliding": lambda **fields: TreePair((3, 3), **fields),
    "mla": lambda **fields: LatentTreePair((0, 0), **fields),
}
parametrize_pair = pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)


def grown(make=PAIRS["global"], **fields) -> TreePair:
    """Three sequences with nodes of two rounds, in one batch with new sequences and chains."""
    pair = make(**fields)
    pair.add(0, 1, 2)
    pair.step({0: 30, 1: 7})
    pair.step({0: [-1, 0, 0, 1], 1: [-1, 0, -1]})
    pair.step({2: [-1, -1, 0], 1: [2, 2], 0: [3]})
    return pair


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
    with cache.forward([0, 2], [3, 1], [-1, 4, 5, 2]):
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


TREES = {
    "too few": ([0, 1], [1, 2], [-1, -1], "of each of its 3 rows, got 2 parents"),
    "too many": ([0], [1], [-1, -1], "of each of its 1 rows, got 2 parents"),
    "none": ([0], [1], [], "of each of its 1 rows, got 0 parents"),
    "itself": ([0, 1], [1, 2], [-1, 0, 6], r"node 6 of sequence 1 \(row 1 .* in \[-1, 6\), got 6"),
    "later": ([0], [2], [6, -1], r"node 5 of sequence 0 \(row 0 .* in \[-1, 5\), got 6"),
    "negative": ([0], [1], [-2], r"got -2"),
    "another batch's node": ([2], [2], [1, 4], r"node 4 of sequence 2 .*, got 4"),
    "huge": ([0], [1], [2**62], "got 4611686018427387904"),
    "plain": ([0], [1], None, "sequence 0 has 5 token tree nodes that are not committed"),
    "plain among others": ([3, 1], [1, 1], None, "sequence 1 has 5 token tree nodes"),
    "full": ([0], [64], [-1] * 64, "needs 1. pages, but"),
}


@pytest.mark.parametrize("name", TREES)
def test_bad_trees_change_nothing(name):
    pair = grown(max_total_tokens=100)
    pair.add(3)
    before = pair.snapshot()
    *arguments, message = TREES[name]
    error = pkv.CacheFullError if name == "full" else ValueError
    with pytest.raises(error, match=message):
        pair.cache.begin_forward(*arguments)
    assert pair.snapshot() == before
    pair.step({1: [0, 5], 0: [4, 4]})
    pair.commit({0: 6, 1: 6, 2: 1})


COMMITS = {
    "lengths": (ValueError, [0, 1], [0], "got 2 ids and 1 leaves"),
    "unknown": (KeyError, [0, 9], [0, 0], "no sequence 9"),
    "twice": (ValueError, [0, 1, 0], [0, 0, 0], "sequence 0 is twice in the commit"),
    "beyond": (ValueError, [1, 0], [4, 5], "sequence 0 must be one of its 5 token tree nodes"),
    "negative": (ValueError, [1, 0], [4, -2], "or -1 for none, got -2"),
    "no tree": (ValueError, [1, 3], [4, 0], "sequence 3 must be one of its 0 token tree nodes"),
}


@pytest.mark.parametrize("name", COMMITS)
def test_bad_commits_change_nothing(name):
    pair = grown()
    pair.add(3)
    before = pair.snapshot()
    error, seq_ids, leaves, message = COMMITS[name]
    with pytest.raises(error, match=message):
        pair.cache.commit_tree(seq_ids, leaves)
    assert pair.snapshot() == before
    pair.commit({1: 4, 3: -1, 0: 4})  # to drop nothing is no error


def test_a_tree_is_committed_once_and_between_steps():
    pair = grown()
    pair.commit({0: 4})
    with pytest.raises(ValueError, match="one of its 0 token tree nodes"):
        pair.cache.commit_tree([0], [4])
    pair.commit({0: -1})
    pair.commit({})
    with pair.cache.forward([0], [1]):
        with pytest.raises(ValueError, match="commit_tree is not possible within a step"):
            pair.cache.commit_tree([1], [0])
        pair.cache.check_integrity()


class _Failing:
    """A kernel that fails in its n-th call, after it has done its work."""

    def __init__(self, kernel, n: int):
        self.kernel, self.calls_left = kernel, n

    def __call__(self, *args):
        self.kernel(*args)
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("the kernel fails")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("windows", [(0, 0, 0, 0), (0, 3, 0, 3)], ids=str)
def test_a_failing_move_is_undone(windows, call):
    kernel = _Failing(KERNELS_WITH_TREES["compact_copy"], 0)
    pair = TreePair(windows, kernels={**KERNELS_WITH_TREES, "compact_copy": kernel})
    pair.add(0, 1)
    pair.step({0: 9, 1: 2})
    pair.step({0: [-1, 0, 0, 2, -1, 4], 1: [-1, -1, 1]})
    pair.fork(0, 2, 9)
    kernel.calls_left = call
    before = pair.snapshot()
    with pytest.raises(RuntimeError, match="the kernel fails"):
        pair.cache.commit_tree([1, 0], [2, 5])
    assert pair.snapshot() == before
    pair.cache.check_integrity()
    pair.commit({1: 2, 0: 5})
    pair.step({0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize("call", [1, 2])
def test_a_failing_page_copy_is_undone(call):
    kernel = _Failing(KERNELS["copy_single_page"], 0)
    pair = TreePair(kernels={**KERNELS_WITH_TREES, "copy_single_page": kernel})
    pair.add(0)
    pair.step({0: 5})
    pair.fork(0, 1)
    for operation in (
        lambda: pair.cache.begin_forward([0], [4], [-1, 0, 0, 2]),
        lambda: pair.cache.commit_tree([0], [3]),
    ):
        kernel.calls_left = call
        before = pair.snapshot()
        with pytest.raises(RuntimeError, match="the kernel fails"):
            operation()
        assert pair.snapshot() == before
        pair.cache.check_integrity()
        if not pair.expected.trees[0]:
            pair.step({0: [-1, 0, 0, 2]})
            pair.fork(0, 2, 5)
    pair.commit({0: 3})
    pair.step({0: 1, 1: 1, 2: 1})


def test_a_commit_that_needs_a_page_when_there_is_none():
    pair = TreePair(max_total_tokens=12)
    pair.add(0, 2)
    pair.step({0: 2})
    pair.step({0: [-1, -1]})
    pair.fork(0, 1, 2)
    pair.step({2: 8})
    before = pair.snapshot()
    with pytest.raises(pkv.CacheFullError, match="needs 1 pages, but 0 of 3 are free"):
        pair.cache.commit_tree([2, 0], [-1, 1])
    assert pair.snapshot() == before
    pair.remove(2)
    pair.commit({0: 1})


def test_kernels_that_call_back_find_the_cache_busy():
    calls = []

    def compact_copy(*args):
        with pytest.raises(ValueError, match="not possible within a step"):
            pair.cache.commit_tree([0], [-1])
        calls.append(1)
        KERNELS_WITH_TREES["compact_copy"](*args)

    pair = TreePair(kernels={**KERNELS_WITH_TREES, "compact_copy": compact_copy})
    pair.add(0)
    pair.step({0: [-1, -1]})
    pair.commit({0: 1})
    assert len(calls) == 2


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


@pytest.mark.parametrize(
    ("name", "windows", "layer"),
    [("tree_paged", (0, 3), 0), ("tree_paged_sliding", (0, 3), 1), ("mla_tree", None, 0)],
)
def test_a_missing_kernel_is_named_before_anything_changes(name, windows, layer):
    make = LatentTreePair if windows is None else TreePair
    pair = make(windows or (0,), kernels={**make.kernels, name: None})
    pair.add(0)
    pair.step({0: 3})
    before = pair.snapshot()
    with pytest.raises(ValueError, match=f"layer {layer} has no kernel '{name}'"):
        pair.cache.begin_forward([0], [2], [-1, -1])
    assert pair.snapshot() == before


def test_stock_kernels_do_not_rotate_nodes():
    kernels = {**KERNELS_WITH_TREES, "tree_paged": ["tirx", KERNELS_WITH_TREES["tree_paged"]]}
    pair = TreePair((0,), "inline", kernels=kernels)
    pair.add(0)
    with pytest.raises(ValueError, match="'tree_paged', which does not rotate tree nodes"):
        pair.cache.begin_forward([0], [2], [-1, -1])
    pair.step({0: [-1, 0]})


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


@pytest.mark.parametrize("windows", [(0,), (5,)], ids=str)
@pytest.mark.parametrize("mode", ["none", "inline"])
def test_self_and_cross_attention_merge_to_the_whole(mode, windows):
    pair = TreePair(windows, mode)
    pair.add(0, 1)
    pair.step({0: 9, 1: 4})
    cache = pair.cache
    for seq_ids, lengths, parents in (
        ([1, 0], [3, 4], [-1, 0, 0, -1, 0, -1, 2]),
        ([0, 1], [2, 1], [3, 1, 2]),
        ([1], [2], [3, -1]),
    ):
        pair.expected.grow_trees(seq_ids, lengths, parents)
        qkv = pair.qkv(sum(lengths))
        want = pair.expected.attention(0, seq_ids, lengths, qkv, 2, DIM**-0.5)
        with cache.forward(seq_ids, lengths, parents):
            parts = cache.self_attention(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
            poison(cache)
            merged = cache.merge_attention(*parts, *cache.cross_attention(0, qkv[:, :4]))
        for got, expected in zip(merged, want, strict=True):
            reference.assert_close(got.numpy(), expected, "float32")


def test_cross_attention_reads_the_pages_of_the_step():
    pair = TreePair()
    pair.add(0)
    q = np.ones((2, 4, DIM), "float32")
    for parents in ([-1, -1], [0, 0]):
        pair.cache.begin_forward([0], [2], parents)
        if parents[0] == 0:
            with pytest.raises(ValueError, match="call self_attention before it"):
                pair.cache.cross_attention(0, q)
        else:  # nothing is there that not all rows see
            assert np.isneginf(pair.cache.cross_attention(0, q)[1].numpy()).all()
        pair.cache.self_attention(0, q, q[:, :2], q[:, :2])
        pair.cache.cross_attention(0, q)
        pair.cache.end_forward()
    kernels = {**KERNELS_WITH_TREES, "tree_paged": ["tirx", KERNELS_WITH_TREES["tree_paged"]]}
    pair = TreePair(kernels=kernels)
    pair.add(0)
    pair.step({0: [-1, -1]})
    with pair.cache.forward([0], [1], [1]):
        pair.cache.self_attention(0, q[:1], q[:1, :2], q[:1, :2])
        with pytest.raises(ValueError, match="stock cache's kernel 'tree_paged'; use attention"):
            pair.cache.cross_attention(0, q[:1])


def test_self_attention_without_its_kernel_writes_nothing():
    pair = TreePair(kernels={**KERNELS_WITH_TREES, "tree": None})
    pair.add(0)
    pair.step({0: 2})
    q = np.ones((2, 4, DIM), "float32")
    with pair.cache.forward([0], [2], [-1, -1]):
        before = snapshot(pair.cache, [0])
        with pytest.raises(ValueError, match="without the kernel 'tree'"):
            pair.cache.self_attention(0, q, q[:, :2], q[:, :2])
        assert snapshot(pair.cache, [0]) == before


@pytest.mark.parametrize("window", [0, 3])
def test_layers_that_share_kv(window):
    pair = TreePair((window,))
    pair.add(0)
    pair.step({0: 6})
    for parents in ([-1, 0, 0, -1], [1, 3]):
        pair.expected.grow_trees([0], [len(parents)], parents)
        qkv = pair.qkv(len(parents))
        with pair.cache.forward([0], [len(parents)], parents):
            pair.cache.attention(0, qkv)
            o = pair.cache.attention_with_shared_kv(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
        want, _ = pair.expected.attention(0, [0], [len(parents)], qkv, 2, DIM**-0.5)
        reference.assert_close(o.numpy(), want, "float32")


@pytest.mark.parametrize("is_split", [False, True])
def test_mla_steps(is_split):
    pair = LatentTreePair()
    pair.is_split = is_split
    pair.add(0, 1)
    pair.step({0: 9, 1: 4})
    pair.step({0: [-1, 0, 0, 2], 1: [-1, -1]})
    pair.step({1: [1], 0: [3]})
    pair.commit({0: 4, 1: 2})
    pair.step({0: [-1, 0, 1], 1: [-1, 0]})  # chains: cross attention covers them as well
    pair.step({0: [2], 1: [1]})


def test_mla_calls_out_of_order():
    pair = LatentTreePair((0,))
    pair.add(0)
    q, k = np.ones((2, 4, 24), "float32"), np.ones((2, 4, 16), "float32")
    for parents in ([-1, 0], [-1, 1]):
        with pair.cache.forward([0], [2], parents):
            with pytest.raises(ValueError, match="with token trees, cross_attention .* append_mla"):
                pair.cache.cross_attention(0, q, 1.0)
            pair.cache.append_mla_kv(0, q[:, 0])
            pair.cache.cross_attention(0, q, 1.0)
            with pytest.raises(ValueError, match="with token trees, call self_attention"):
                pair.cache.self_attention(0, k, k, k[:, :, :8])


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
