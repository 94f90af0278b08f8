# SPDX-License-Identifier: Apache-2.0
"""Attention to lists of positions through the cache: all kinds of steps, forks, pops, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv
from tvm_pagedkv import LayerSpec

from ... import reference
from ...reference.listed import listed_attention, listed_latent_attention
from ...support.emulators.python_kernels import LAYER, make_cache, share_every_prefix

HEADS, KV_HEADS, WIDTH, V_WIDTH = 4, 2, 32, 24
SCALE = 0.25
LISTS = pkv.KVCacheConfig(
    num_layers=3,
    num_qo_heads=HEADS,
    num_kv_heads=KV_HEADS,
    qk_head_dim=WIDTH,
    dtype="float32",
    page_size=4,
    max_num_sequences=6,
    max_total_tokens=1024,
    prefill_chunk_size=64,
    layers=[
        LayerSpec(lists=True),
        LayerSpec("mla", v_head_dim=V_WIDTH, lists=True),
        LayerSpec(lists=True),
    ],
)
ROPE = reference.Rope(rotary_dim=WIDTH)


class World:
    """A cache and its references; every step attends to random lists."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.cache = pkv.create(LISTS)
        self.rows = reference.ReferenceCache(3, np.dtype("float32"), ROPE, "normal")
        self.latent = reference.ReferenceLatentCache(1, np.dtype("float32"))

    def change(self, name: str, *args) -> None:
        for each in (self.cache, self.rows, self.latent):
            getattr(each, name)(*args)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype("float32")

    def lists(self, owns: list[int], width: int) -> np.ndarray:
        """Positions up to each row's own, repeated ones among them, and holes."""
        rows = [self.rng.integers(-1, own + 1, width) for own in owns]
        return np.array(rows, np.int32).reshape(len(owns), width)

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        begins = [self.rows.length(i) for i in seq_ids]
        owns = [[*range(begin, begin + n)] for begin, n in zip(begins, lengths, strict=True)]
        lists = self.lists(sum(owns, []), int(self.rng.integers(1, 40)))
        parts, end = [], 0
        for n in lengths:
            parts.append(slice(end, end + n))
            end += n
        with self.cache.forward(seq_ids, lengths):
            for layer in (0, 2):
                qkv = self.normal(end, HEADS + 2 * KV_HEADS, WIDTH)
                sinks = self.normal(HEADS) if layer else None
                o = self.cache.attention(
                    layer, qkv, SCALE, positions=lists, sink_logits=sinks
                ).numpy()
                self.rows.attention(layer, seq_ids, lengths, qkv, KV_HEADS, SCALE)
                for seq_id, own, at in zip(seq_ids, owns, parts, strict=True):
                    q = reference.rotate(qkv[at, :HEADS], np.array(own), ROPE)
                    k, v = self.rows.kv(seq_id, layer)
                    want, lse = listed_attention(q, k, v, lists[at], own, SCALE)
                    if sinks is not None:
                        natural = lse * np.log(2)
                        total = np.logaddexp(natural, sinks)
                        want = want * np.exp(natural - total)[..., None]
                    reference.assert_close(o[at], want, "float32", f"layer {layer}")
            rows, q = self.normal(end, WIDTH), self.normal(end, HEADS, WIDTH)
            self.cache.append_mla_kv(1, rows)
            self.latent.append(0, seq_ids, lengths, rows)
            got = self.cache.cross_attention(1, q, SCALE, positions=lists)
            for seq_id, own, at in zip(seq_ids, owns, parts, strict=True):
                latent = self.latent.latent(seq_id, 0)
                want = listed_latent_attention(q[at], latent, V_WIDTH, lists[at], own, SCALE)
                part = [x.numpy()[at] for x in got]
                reference.assert_state_close(part, want, "float32")


def test_random_steps():
    """Forks share pages, also where a batch would read them once for all its sequences."""
    seed = 4
    print(f"seed {seed}")
    world, rng = World(seed), np.random.default_rng(seed)
    world.change("add_sequence", 0)
    share_every_prefix(world.cache)
    world.step([0], [50])
    for child in range(1, 5):
        world.change("fork_sequence", 0, child, int(rng.integers(1, 40)))
    world.step([1, 2, 3, 4], [1, 1, 1, 1])
    for _ in range(12):
        seq_ids = [int(i) for i in rng.permutation(5)[: rng.integers(1, 6)]]
        for i in seq_ids[:1]:
            world.change("pop_n", i, int(rng.integers(0, world.rows.length(i))))
        world.step(seq_ids, [int(n) for n in rng.choice([1, 1, 2, 9], len(seq_ids))])
        world.cache.check_integrity()


def test_a_list_of_all_is_whole_attention():
    """To the bit where a row attends alone."""
    cache = pkv.create(LISTS)
    rng = np.random.default_rng(0)
    whole, listed = 5, 7
    for seq_id in (whole, listed):
        cache.add_sequence(seq_id)
    for n in (17, 1, 1):
        qkv = rng.standard_normal((n, HEADS + 2 * KV_HEADS, WIDTH)).astype("float32")
        begin = cache.sequence_length(whole)
        everything = np.tile(np.arange(begin + n, dtype=np.int32), (n, 1))
        everything[everything > begin + np.arange(n)[:, None]] = -1
        outputs = []
        for seq_id, lists in ((whole, None), (listed, everything)):
            with cache.forward([seq_id], [n]):
                outputs.append(cache.attention(0, qkv, positions=lists).numpy())
                cache.attention(2, qkv)
                cache.append_mla_kv(1, qkv[:, 0])
        np.testing.assert_allclose(*outputs, rtol=2e-6, atol=2e-6)
        if n == 1:
            np.testing.assert_array_equal(*outputs)


@pytest.fixture
def in_step():
    """A cache within a step of two rows, at positions 3 and 4."""
    cache = pkv.create(LISTS)
    cache.add_sequence(0)
    qkv = np.zeros((3, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with cache.forward([0], [3]):
        for layer in (0, 2):
            cache.attention(layer, qkv)
        cache.append_mla_kv(1, qkv[:, 0])
    with cache.forward([0], [2]):
        yield cache
        for layer in (0, 2):
            cache.attention(layer, qkv[:2])
        cache.append_mla_kv(1, qkv[:2, 0])


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([[0, 4], [0, 0]], ValueError, r"positions\[0, 1\] is 4, but this row is at 3: it may"),
        ([[0, 1], [-2, 0]], ValueError, r"positions\[1, 0\] is -2, but this row is at 4"),
        ([[0, 1]], ValueError, "positions must have shape"),
        ([0, 1], ValueError, r"positions must have shape \[rows, width\]"),
        ([[0.0], [1.0]], ValueError, "positions must be int32, got float32"),
    ],
)
def test_wrong_lists_change_nothing(in_step, positions, error, message):
    lists = np.array(positions)
    lists = lists.astype(np.int32) if lists.dtype == np.int64 else lists.astype(np.float32)
    qkv = np.ones((2, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with pytest.raises(error, match=message):
        in_step.attention(0, qkv, positions=lists)
    missing = tvm_ffi.get_global_func("pagedkv.missing_layers")
    assert list(missing(in_step)) == [0, 1, 2]
    with pytest.raises(error, match=message):
        in_step.cross_attention(1, qkv[:, :HEADS], 1.0, positions=lists)


def test_lists_of_rows_that_are_not_appended(in_step):
    q = np.ones((2, HEADS, WIDTH), "float32")
    with pytest.raises(ValueError, match="call append_mla_kv before it"):
        in_step.cross_attention(1, q, 1.0, positions=np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match="call attention before it"):
        in_step.cross_attention(0, q, 1.0, positions=np.zeros((2, 1), np.int32))


def test_lists_with_strides(in_step):
    """Every second column of an array of the caller's."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((2, HEADS + 2 * KV_HEADS, WIDTH)).astype("float32")
    lists = torch.from_numpy(np.array([[2, 99, 0, 99], [4, 99, -1, 99]], np.int32))[:, ::2]
    got = in_step.attention(0, qkv, positions=lists).numpy()
    again = in_step.attention(2, qkv, positions=lists.contiguous()).numpy()
    np.testing.assert_array_equal(got, again)


def test_layers_without_lists():
    config = replace(LISTS, num_layers=1, layers=[LayerSpec()])
    cache = pkv.create(config)
    cache.add_sequence(0)
    qkv = np.zeros((1, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with cache.forward([0], [1]):
        with pytest.raises(ValueError, match="layer 0 was made without attention to lists"):
            cache.attention(0, qkv, positions=np.zeros((1, 1), np.int32))
        cache.attention(0, qkv)


def test_layers_with_a_window():
    """Layers with and without one may share kernels, so the layer decides."""
    kernels = {
        name: lambda *_: pytest.fail("called") for name in ("attend_listed", "attend_blocks")
    }
    cache = make_cache(kernels, layers=[LAYER, LAYER | {"kind": "mha_sliding", "window": 6}])
    cache.add_sequence(0)
    qkv = np.zeros((1, 8, 8), "float32")
    with cache.forward([0], [1]):
        cache.attention(0, qkv)
        first = np.zeros((1, 1), np.int32)
        for lists in ({"positions": first}, {"blocks": first, "block_size": 4}):
            with pytest.raises(ValueError, match="not possible in layer 1, which has a window"):
                cache.attention(1, qkv, **lists)
        cache.attention(1, qkv)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kind": "mha_sliding", "window": 4}, ValueError, "layer.lists is for kinds"),
        ({"lists": 1}, TypeError, "layer.lists must be a bool"),
        ({"alibi": True}, ValueError, "layer 0: lists are not possible with ALiBi"),
        ({"rope": pkv.RopeConfig(mode="inline")}, ValueError, 'rope mode "inline"'),
    ],
)
def test_layers_that_cannot_list(fields, error, message):
    with pytest.raises(error, match=message):
        replace(LISTS, num_layers=1, layers=[LayerSpec(**{"lists": True, **fields})])


def test_branching_trees_are_refused():
    cache = pkv.create(LISTS)
    cache.add_sequence(0)
    qkv = np.zeros((3, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with cache.forward([0], [3], token_tree_parents=[-1, 0, 0]):
        with pytest.raises(ValueError, match="token trees branch"):
            cache.attention(0, qkv, positions=np.zeros((3, 1), np.int32))
        for layer in (0, 2):
            cache.attention(layer, qkv)
        cache.append_mla_kv(1, qkv[:, 0])
