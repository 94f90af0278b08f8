# SPDX-License-Identifier: Apache-2.0
"""Attention to lists of blocks through the cache, and their choice by an index lane."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv
from tvm_pagedkv import LayerSpec

from ... import reference
from ...reference.index import assert_chosen_blocks, block_scores
from ...reference.listed import attention_by_heads, expand_blocks, listed_latent_attention
from .test_lists import HEADS, KV_HEADS, LISTS, ROPE, SCALE, V_WIDTH, WIDTH

INDEX_DIM, BLOCK = 16, 8
K, KEPT = 4, (1, 2)
KV, MLA, INDEX = 0, 1, 2
CONFIG = replace(
    LISTS,
    layers=[
        LayerSpec(lists=True),
        LayerSpec("mla", v_head_dim=V_WIDTH, lists=True),
        LayerSpec("index", num_qo_heads=KV_HEADS, qk_head_dim=INDEX_DIM),
    ],
)


class World:
    """A cache and its references. Heads choose blocks by their keys, latent rows get any."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.cache = pkv.create(CONFIG)
        self.rows = reference.ReferenceCache(1, np.dtype("float32"), ROPE, "normal")
        self.latent = reference.ReferenceLatentCache(1, np.dtype("float32"))
        self.keys = reference.ReferenceLatentCache(1, np.dtype("float32"))

    def change(self, name: str, *args) -> None:
        for each in (self.cache, self.rows, self.latent, self.keys):
            getattr(each, name)(*args)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype("float32")

    def lists(self, owns: list[int], width: int) -> np.ndarray:
        """Blocks up to each row's own, and holes."""
        rows = np.full((len(owns), width), -1, np.int32)
        for row, own in zip(rows, owns, strict=True):
            blocks = self.rng.permutation(own // BLOCK + 1)[:width]
            row[self.rng.permutation(width)[: len(blocks)]] = blocks
        return rows

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        begins = [self.rows.length(i) for i in seq_ids]
        owns = [[*range(begin, begin + n)] for begin, n in zip(begins, lengths, strict=True)]
        total, width = sum(lengths), int(self.rng.integers(1, 9))
        ends = np.cumsum(lengths)
        parts = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        lists = self.lists(sum(owns, []), width)
        with self.cache.forward(seq_ids, lengths):
            keys, q_index = self.normal(total, INDEX_DIM), self.normal(total, KV_HEADS, INDEX_DIM)
            self.cache.append_index(INDEX, keys)
            init, local = KEPT
            chosen = self.cache.index_top_blocks(
                INDEX, q_index, K, BLOCK, init_blocks=init, local_blocks=local
            )
            self.keys.append(0, seq_ids, lengths, keys)
            qkv, sinks = self.normal(total, HEADS + 2 * KV_HEADS, WIDTH), self.normal(HEADS)
            o = self.cache.attention(
                KV, qkv, SCALE, blocks=chosen, block_size=BLOCK, sink_logits=sinks
            ).numpy()
            self.rows.attention(0, seq_ids, lengths, qkv, KV_HEADS, SCALE)
            latent, q = self.normal(total, WIDTH), self.normal(total, HEADS, WIDTH)
            self.cache.append_mla_kv(MLA, latent)
            got = self.cache.cross_attention(MLA, q, SCALE, blocks=lists, block_size=BLOCK)
            self.latent.append(0, seq_ids, lengths, latent)
        chosen = chosen.numpy()
        for seq_id, own, at in zip(seq_ids, owns, parts, strict=True):
            known = self.keys.latent(seq_id, 0)
            for row, position in zip(range(at.start, at.stop), own, strict=True):
                scores = block_scores(q_index[row], known[: position + 1], BLOCK)
                assert_chosen_blocks(chosen[row], scores, KEPT, "float32")
            rotated = reference.rotate(qkv[at, :HEADS], np.array(own), ROPE)
            positions = expand_blocks(chosen[at], BLOCK, own)
            k, v = self.rows.kv(seq_id, 0)
            want, lse = attention_by_heads(rotated, k, v, positions, own, SCALE)
            natural = lse * np.log(2)
            want = want * np.exp(natural - np.logaddexp(natural, sinks))[..., None]
            reference.assert_close(o[at], want, "float32", "K and V")
            positions = expand_blocks(lists[at][:, None], BLOCK, own)[:, 0]
            rows = self.latent.latent(seq_id, 0)
            want = listed_latent_attention(q[at], rows, V_WIDTH, positions, own, SCALE)
            reference.assert_state_close([x.numpy()[at] for x in got], want, "float32")
        self.cache.check_integrity()


def test_random_steps():
    seed = 3
    print(f"seed {seed}")
    world, rng = World(seed), np.random.default_rng(seed)
    world.change("add_sequence", 0)
    world.step([0], [60])
    for child in range(1, 4):
        world.change("fork_sequence", 0, child, int(rng.integers(1, 50)))
    world.step([1, 2, 3], [1, 1, 1])
    for _ in range(6):
        seq_ids = [int(i) for i in rng.permutation(4)[: rng.integers(1, 5)]]
        for i in seq_ids[:1]:
            world.change("pop_n", i, int(rng.integers(0, world.rows.length(i))))
        world.step(seq_ids, [int(n) for n in rng.choice([1, 1, 2, 11], len(seq_ids))])


@pytest.fixture
def in_step():
    """A cache within a step of two rows, at positions 15 and 16, with keys and latent rows."""
    cache = pkv.create(CONFIG)
    cache.add_sequence(0)
    qkv = np.random.default_rng(0).standard_normal((17, HEADS + 2 * KV_HEADS, WIDTH))
    qkv = qkv.astype("float32")
    for rows in (qkv[:15], qkv[15:]):
        with cache.forward([0], [len(rows)]):
            cache.append_index(INDEX, np.ascontiguousarray(rows[:, 0, :INDEX_DIM]))
            cache.append_mla_kv(MLA, rows[:, 0])
            if len(rows) == 2:
                yield cache
            cache.attention(KV, rows)


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ([[0], [3]], ValueError, r"blocks\[1, 0, 0\] is 3, but this row is in block 2 of 8 pos"),
        ([[0], [-2]], ValueError, r"blocks\[1, 0, 0\] is -2"),
        ([[1, 0], [2, 2]], ValueError, r"blocks\[1, 0, 1\] is 2, which this list names twice"),
        ([[[0], [1]], [[1], [3]]], ValueError, r"blocks\[1, 1, 0\] is 3"),
        ([[0]], ValueError, "blocks must have shape"),
        ([0, 1], ValueError, r"blocks must have shape \[rows, width\] or"),
        ([[[0], [1], [-1]]] * 2, ValueError, "must divide the 2 KV heads"),
        ([[0.0], [1.0]], ValueError, "blocks must be int32, got float32"),
    ],
)
def test_wrong_blocks_change_nothing(in_step, blocks, error, message):
    lists = np.array(blocks)
    lists = lists.astype(np.int32) if lists.dtype == np.int64 else lists.astype(np.float32)
    qkv = np.ones((2, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with pytest.raises(error, match=message):
        in_step.attention(KV, qkv, blocks=lists, block_size=BLOCK)
    assert list(tvm_ffi.get_global_func("pagedkv.missing_layers")(in_step)) == [KV]


def test_the_lists_of_latent_rows_are_for_all_heads(in_step):
    q, lists = np.ones((2, HEADS, WIDTH), "float32"), np.zeros((2, 2, 1), np.int32)
    with pytest.raises(ValueError, match="must divide the 1 KV heads"):
        in_step.cross_attention(MLA, q, 1.0, blocks=lists, block_size=BLOCK)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": [[0], [0]]}, ValueError, "need each other, got blocks alone"),
        ({"block_size": 8}, ValueError, "list either positions or blocks, got neither"),
        ({"positions": [[0], [0]], "block_size": 8}, ValueError, "got block_size alone"),
        ({"positions": [[0], [0]], "blocks": [[0], [0]]}, ValueError, "got both"),
        ({"blocks": [[0], [0]], "block_size": 6}, ValueError, r"multiple of the page size \(4\)"),
        ({"blocks": [[0], [0]], "block_size": 0}, ValueError, "must be a positive multiple"),
        ({"blocks": [[0], [0]], "block_size": 8.0}, TypeError, "float"),
    ],
)
def test_arguments_that_do_not_fit(in_step, arguments, error, message):
    arguments = {
        name: np.array(x, np.int32) if isinstance(x, list) else x for name, x in arguments.items()
    }
    qkv = np.ones((2, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with pytest.raises(error, match=message):
        in_step.attention(KV, qkv, **arguments)
    with pytest.raises(error, match=message):
        in_step.cross_attention(MLA, qkv[:, :HEADS], 1.0, **arguments)


def test_blocks_with_strides(in_step):
    """Columns of arrays of the caller's, with and without lists for heads."""
    torch = pytest.importorskip("torch")
    q = np.random.default_rng(1).standard_normal((2, HEADS, WIDTH)).astype("float32")
    wide = torch.tensor([[1, 99, 0, 99], [2, 99, -1, 99]], dtype=torch.int32)
    outputs = [
        in_step.cross_attention(MLA, q, 1.0, blocks=blocks, block_size=BLOCK)[0].numpy()
        for blocks in (wide[:, ::2], wide[:, ::2].contiguous(), wide[:, None, ::2])
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be"),
        ({"block_size": 12.0}, TypeError, "float"),
        ({"block_size": 10}, ValueError, "multiple of the page size"),
        ({"init_blocks": 3, "local_blocks": 2}, ValueError, "must be 0 or more and at most k"),
        ({"init_blocks": -1}, ValueError, "must be 0 or more"),
        ({"layer": KV}, ValueError, "layer 0 is no index lane"),
    ],
)
def test_choices_that_cannot_be(in_step, arguments, error, message):
    arguments = {"layer": INDEX, "k": 4, "block_size": BLOCK, **arguments}
    with pytest.raises(error, match=message):
        in_step.index_top_blocks(q=np.ones((2, KV_HEADS, INDEX_DIM), "float32"), **arguments)


def test_layers_without_lists():
    cache = pkv.create(replace(LISTS, num_layers=1, layers=[LayerSpec()]))
    cache.add_sequence(0)
    qkv = np.zeros((1, HEADS + 2 * KV_HEADS, WIDTH), "float32")
    with cache.forward([0], [1]):
        with pytest.raises(ValueError, match="layer 0 was made without attention to lists"):
            cache.attention(0, qkv, blocks=np.zeros((1, 1), np.int32), block_size=8)
        cache.attention(0, qkv)
