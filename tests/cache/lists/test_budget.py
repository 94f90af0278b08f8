# SPDX-License-Identifier: Apache-2.0
"""Decode steps that attend within a budget: to the pages with the largest bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv
from tvm_pagedkv import LayerSpec
from tvm_pagedkv.transfer import Receiver, Sender, _runtime, local_channels

from ... import reference
from ...reference.listed import attention_by_heads, expand_blocks
from ...reference.page_bounds import bound_scores, choose_pages, page_bounds
from ...support.emulators.python_kernels import LAYER, make_cache

HEADS, KV_HEADS, DIM, PAGE, SCALE = 4, 2, 16, 4, 0.25
BUDGET = 18  # four whole pages, two of which are always the first and the last
BOUNDED, PLAIN = 0, 1
CONFIG = pkv.KVCacheConfig(
    num_layers=2,
    num_qo_heads=HEADS,
    num_kv_heads=KV_HEADS,
    qk_head_dim=DIM,
    dtype="float32",
    page_size=PAGE,
    max_num_sequences=6,
    max_total_tokens=400,
    prefill_chunk_size=64,
    rope=pkv.RopeConfig(mode="none"),
    layers=[LayerSpec(page_bounds=True), LayerSpec()],
)


def expected(q, k, v, own: int, num_pages: int) -> np.ndarray:
    """What the row at position `own` gets."""
    scores = bound_scores(q, *page_bounds(k[: own + 1], PAGE))
    positions = expand_blocks(choose_pages(scores, num_pages)[None], PAGE, [own])
    return attention_by_heads(q[None], k, v, positions, [own], SCALE)[0][0]


class World:
    """A cache, whose K and V are read back to say what a step should have given."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.cache = pkv.create(CONFIG)
        self.saved = -1  # the sequence in the file
        self.num_chosen = 0  # rows that did not see everything

    def normal(self, *shape: int) -> np.ndarray:
        # Columns of different sizes let the pages of a text differ.
        return self.rng.standard_normal(shape).astype("float32") * self.rng.lognormal(
            size=shape[-1]
        )

    def attend(self, count: int, **how):
        qkv = self.normal(count, HEADS + 2 * KV_HEADS, DIM).astype("float32")
        o = self.cache.attention(BOUNDED, qkv, SCALE, **how).numpy()
        self.cache.attention(PLAIN, qkv, SCALE)
        return qkv[:, :HEADS], o

    def step(self, seq_ids: list[int], counts: list[int], budget: int | None = BUDGET) -> None:
        with self.cache.forward(seq_ids, counts):
            q, o = self.attend(sum(counts), budget=budget)
        is_decode = budget is not None and len(seq_ids) == sum(counts)
        row = 0
        for seq_id, count in zip(seq_ids, counts, strict=True):
            length = self.cache.sequence_length(seq_id)
            k, v = (x.numpy()[BOUNDED] for x in self.cache.debug_get_kv(seq_id))
            for own in range(length - count, length):
                num_pages = BUDGET // PAGE if is_decode else length
                self.num_chosen += num_pages * PAGE < length
                want = expected(q[row], k, v, own, num_pages)
                reference.assert_close(o[row], want, "float32", f"position {own} of {seq_id}")
                row += 1
        self.cache.check_integrity()

    def change(self, seq_id: int, file: Path) -> None:
        """Do something to a sequence that may leave bounds behind that no longer hold."""
        cache = self.cache
        length = cache.sequence_length(seq_id)
        what = self.rng.integers(5)
        if what == 0:
            cache.pop_n(seq_id, int(self.rng.integers(0, min(length, 9))))
        elif what == 1:
            other = next(i for i in range(6) if i not in cache.sequence_ids())
            cache.fork_sequence(seq_id, other, int(self.rng.integers(1, length + 1)))
            cache.remove_sequence(seq_id)
        elif what == 2:
            begin = int(self.rng.integers(0, length))
            count = int(self.rng.integers(1, length - begin + 1))
            rows = [self.normal(2, count, KV_HEADS, DIM).astype("float32") for _ in range(2)]
            cache.debug_set_kv(seq_id, begin, *rows)
        elif what == 3:  # older rows into pages of later ones
            if self.saved in cache.sequence_ids():
                cache.remove_sequence(self.saved)
                cache.load(file, [self.saved])
            self.saved = int(self.rng.choice(cache.sequence_ids()))
            cache.save(file, [self.saved])
        else:
            with cache.forward([seq_id], [6], token_tree_parents=[-1, 0, 0, 2, 1, 3]):
                self.attend(6, budget=BUDGET)
            cache.commit_tree([seq_id], [int(self.rng.choice([3, 4, 5]))])


def test_random_steps(tmp_path):
    seed = 1
    print(f"seed {seed}")
    world = World(seed)
    rng = world.rng
    assert world.cache.stats()["allocated_bytes"] == CONFIG.memory_bytes()
    for seq_id in range(3):
        world.cache.add_sequence(seq_id)
        world.step([seq_id], [int(rng.integers(20, 40))])
    for _ in range(60):
        world.change(int(rng.choice(world.cache.sequence_ids())), tmp_path / "file")
        seq_ids = [int(i) for i in rng.permutation(world.cache.sequence_ids())]
        seq_ids = seq_ids[: rng.integers(1, 4)]
        if rng.random() < 0.3:
            world.step(seq_ids, [int(n) for n in rng.integers(1, 9, len(seq_ids))])
        world.step(seq_ids, [1] * len(seq_ids), BUDGET if rng.random() < 0.8 else None)
    assert world.num_chosen > 60


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rotated_and_quantized_rows(kv_dtype):
    """K is bounded as it lies in the pages, and Q is rotated before."""
    layers = [LayerSpec(page_bounds=True, kv_dtype=kv_dtype, sink_logits=True)]
    config = replace(CONFIG, num_layers=1, layers=layers, rope=pkv.RopeConfig())
    cache, rng = pkv.create(config), np.random.default_rng(0)
    rope = reference.Rope(rotary_dim=DIM)
    cache.add_sequence(0)
    sinks = rng.standard_normal(HEADS).astype("float32")
    for n in (50, 1, 1):
        qkv = rng.standard_normal((n, HEADS + 2 * KV_HEADS, DIM)).astype("float32")
        with cache.forward([0], [n]):
            o = cache.attention(0, qkv, SCALE, budget=3 * PAGE, sink_logits=sinks).numpy()
    k, v = (x.numpy()[0].astype("float32") for x in cache.debug_get_kv(0))
    q = reference.rotate(qkv[:, :HEADS], np.array([51]), rope)
    scores = bound_scores(q[0], *(x for x in page_bounds(k, PAGE)))
    positions = expand_blocks(choose_pages(scores, 3)[None], PAGE, [51])
    want = reference.apply_sinks(*attention_by_heads(q, k, v, positions, [51], SCALE), sinks)[0]
    # Products of codes: see `AttentionCase.compare`.
    dtype, times = ("float32", 8.0) if kv_dtype == "int8" else (kv_dtype, 1.0)
    reference.assert_close(o, want, dtype, "o", times=times)


def test_received_rows_have_bounds():
    """Rows that come in place of others, into a full page whose bounds later steps have used."""
    world, other = World(0), World(1)
    for each in (world, other):
        each.cache.add_sequence(0)
        each.step([0], [43])
    for _ in range(3):
        world.step([0], [1])
    other.step([0], [1])
    rows = [other.normal(2, 3, KV_HEADS, DIM).astype("float32") for _ in range(2)]
    rows[0] *= 20  # larger keys than all others: their page must be chosen
    other.cache.debug_set_kv(0, 41, *rows)
    world.cache.pop_n(0, 5)
    sending, receiving = local_channels()
    with Sender(other.cache, sending) as sender, Receiver(world.cache, receiving) as receiver:
        ticket = receiver.request(0, length=3)
        send = sender.send(sender.next_request(), 0)
        sender.finish(send)
        while not (ticket.is_done and send.is_done):
            receiver.poll()
            sender.poll()
    for _ in range(8):
        world.step([0], [1])


@pytest.mark.parametrize("seed", range(2))
def test_nodes_of_several_steps_that_move(seed):
    """A page of nodes has bounds, and then one of a later step comes into it."""
    world = World(seed)
    world.cache.add_sequence(0)
    world.step([0], [22])
    for parent in (-1, 0, 1, 0):
        with world.cache.forward([0], [1], token_tree_parents=[parent]):
            world.attend(1, budget=BUDGET)
    world.cache.commit_tree([0], [3])
    for _ in range(9):
        world.step([0], [1])


@pytest.mark.parametrize("seed", range(2))
def test_received_rows_without_an_end(seed):
    """A step may end a receive, as with the functions of the stock runtime."""
    world = World(seed)
    world.cache.add_sequence(0)
    world.step([0], [23])
    world.step([0], [1])
    world.cache.pop_n(0, 2)
    _, first, count = _runtime.prepare_recv(world.cache, 0, 2)
    for layer in (BOUNDED, PLAIN):
        pages = np.from_dlpack(_runtime.pages_of(world.cache, layer))
        for slot in range(first, first + count):
            pages[slot // PAGE, :, :, slot % PAGE] = world.normal(2, KV_HEADS, DIM)
    for _ in range(9):
        world.step([0], [1])


def test_bounds_that_could_not_be_computed():
    """The step that failed may be made again, and all of its pages still lack bounds."""
    calls = []

    def bounds(pages, ids, lengths, out):
        calls.append(np.from_dlpack(ids).tolist())
        if len(calls) == 1:
            raise MemoryError("once")

    others = {"choose_pages": lambda *_: None, "attend_blocks": lambda *_: None}
    cache = make_cache({"page_bounds": bounds, **others}, layers=[LAYER])
    cache.add_sequence(0)
    rows = np.zeros((17, 8, 8), "float32")
    with cache.forward([0], [17]):
        cache.attention(0, rows)
    with pytest.raises(MemoryError, match="once"), cache.forward([0], [1]):
        cache.attention(0, rows[:1], budget=8)
    with cache.forward([0], [1]):
        cache.attention(0, rows[:1], budget=8)
    assert len(calls[0]) == 5 and calls[1] == calls[0]


def test_errors():
    cache = pkv.create(CONFIG)
    cache.add_sequence(0)
    qkv = np.zeros((1, HEADS + 2 * KV_HEADS, DIM), "float32")
    lists = {"blocks": np.zeros((1, 1), np.int32), "block_size": PAGE}
    with cache.forward([0], [1]):
        for layer, how, message in (
            (PLAIN, {"budget": 8}, "layer 1 was made without bounds of its pages"),
            (BOUNDED, {"budget": 7}, "budget must be between 8 positions, two pages, and"),
            (BOUNDED, {"budget": 2**31}, "budget must be between"),
            (BOUNDED, {"budget": 8, **lists}, "not possible with positions or blocks"),
            (BOUNDED, {"budget": 8, "sm_scale": -1.0}, "a budget needs a positive sm_scale"),
        ):
            with pytest.raises(ValueError, match=message):
                cache.attention(layer, qkv, **how)
        missing = tvm_ffi.get_global_func("pagedkv.missing_layers")
        assert list(missing(cache)) == [BOUNDED, PLAIN]
        cache.attention(BOUNDED, qkv, budget=8)
        cache.attention(PLAIN, qkv)


def test_layers_with_a_window_have_no_bounds():
    """Layers with and without one may share kernels, so the layer decides."""
    names = "page_bounds", "choose_pages", "attend_blocks"
    kernels = {name: lambda *_: pytest.fail("called") for name in names}
    cache = make_cache(kernels, layers=[LAYER | {"kind": "mha_sliding", "window": 6}])
    cache.add_sequence(0)
    with cache.forward([0], [12]):
        cache.attention(0, np.zeros((12, 8, 8), "float32"))
    with cache.forward([0], [1]):
        with pytest.raises(ValueError, match="needs page_bounds=True, and no window"):
            cache.attention(0, np.zeros((1, 8, 8), "float32"), budget=8)
        cache.attention(0, np.zeros((1, 8, 8), "float32"))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kind": "mha_sliding", "window": 4}, ValueError, "layer.page_bounds is for kind 'mha'"),
        ({"page_bounds": 1}, TypeError, "layer.page_bounds must be a bool"),
        ({"alibi": True}, ValueError, "layer 0: page_bounds are not possible with ALiBi"),
        ({"rope": pkv.RopeConfig(mode="inline")}, ValueError, 'page_bounds need .*"inline"'),
        (
            {"kv_dtype": "int4", "qk_head_dim": 32, "v_head_dim": 32},
            ValueError,
            "keeps K rotated",
        ),
        ({"v_head_dim": 24}, ValueError, "page_bounds need rows of K and V of one width"),
    ],
)
def test_layers_without_bounds(fields, error, message):
    with pytest.raises(error, match=message):
        replace(CONFIG, num_layers=1, layers=[LayerSpec(**{"page_bounds": True, **fields})])
