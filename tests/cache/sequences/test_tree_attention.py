# SPDX-License-Identifier: Apache-2.0
"""Attention calls of steps with token trees: in parts, with shared KV, of MLA layers."""

from __future__ import annotations

import numpy as np
import pytest

from ... import reference
from ...support.cases.caches.cache_cases import DIM
from ...support.cases.caches.tree_cache_cases import LatentTreePair, TreePair
from ...support.emulators.python_kernels import snapshot
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step


@pytest.mark.parametrize("windows", [(0,), (5,)], ids=str)
@pytest.mark.parametrize("mode", ["none", "inline"])
def test_self_and_cross_attention_merge_to_the_whole(mode, windows):
    pair = TreePair(windows, mode)
    pair.add(0, 1)
    pair.step({0: 9, 1: 4})
    for seq_ids, lengths, parents in (
        ([1, 0], [3, 4], [-1, 0, 0, -1, 0, -1, 2]),
        ([0, 1], [2, 1], [3, 1, 2]),
        ([1], [2], [3, -1]),
    ):
        pair.expected.grow_trees(seq_ids, lengths, parents)
        with pair.cache.forward(seq_ids, lengths, parents):
            pair.attend_in_parts(0, seq_ids, lengths, pair.qkv(sum(lengths)))


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
    with permissive_step(pair.cache, [0], [1], [1]):
        pair.cache.self_attention(0, q[:1], q[:1, :2], q[:1, :2])
        with pytest.raises(ValueError, match="stock cache's kernel 'tree_paged'; use attention"):
            pair.cache.cross_attention(0, q[:1])


def test_self_attention_without_its_kernel_writes_nothing():
    pair = TreePair(kernels={**KERNELS_WITH_TREES, "tree": None})
    pair.add(0)
    pair.step({0: 2})
    q = np.ones((2, 4, DIM), "float32")
    with permissive_step(pair.cache, [0], [2], [-1, -1]):
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
        want, _ = pair.whole(0, [0], [len(parents)], qkv)
        reference.assert_close(o.numpy(), want, "float32")


@pytest.mark.parametrize("windows", [(0, 0), (5, 2)], ids=str)
@pytest.mark.parametrize("is_split", [False, True])
def test_mla_steps(is_split, windows):
    pair = LatentTreePair(windows)
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


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
