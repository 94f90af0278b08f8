# SPDX-License-Identifier: Apache-2.0
"""Token trees and commits that are refused or fail: the cache stays as it was."""

from __future__ import annotations

import pytest

import tvm_pagedkv as pkv

from ...support.cases.caches.tree_cache_cases import LatentTreePair, TreePair, grown
from ...support.emulators.python_kernels import KERNELS
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step

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
    with permissive_step(pair.cache, [0], [1]):
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
    with pytest.raises(pkv.CacheFullError, match="needs 1 pages, but 0 of 3 are available"):
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


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
