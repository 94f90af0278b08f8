# SPDX-License-Identifier: Apache-2.0
"""A step that fails leaves nothing behind: lengths, pages, trees, windows and transfers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

from tvm_pagedkv.transfer import _runtime

from ... import reference
from ...support.cases.caches.cache_cases import DIM, HEADS
from ...support.cases.caches.sequence_window_cases import WindowPair
from ...support.cases.caches.tree_cache_cases import TreePair
from ...support.emulators.python_kernels import KERNELS, LAYER, make_cache, shuffle, snapshot
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES

CONFIGS = {
    "plain": dict(layers=[LAYER, LAYER]),
    "window": dict(layers=[LAYER, {**LAYER, "kind": "mha_sliding", "window": 3}]),
}


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HEADS, DIM)).astype("float32")


def append(cache, seq_ids, lengths, seed: int = 0) -> None:
    with cache.forward(seq_ids, lengths):
        for layer in range(2):
            cache.attention(layer, rows(sum(lengths), seed))


def state(cache, seq_ids) -> tuple:
    """All that an aborted step must leave alone; counters of events go on."""
    described = snapshot(cache, seq_ids)
    events = ("num_forwards", "cow_page_copies", "copied_inputs", "pages_read", "step_pages_read")
    described["stats"] = {
        name: value
        for name, value in described["stats"].items()
        if not name.startswith(events) and "bytes" not in name
    }
    return described


@pytest.fixture(params=list(CONFIGS))
def cache(request):
    """Two sequences that share their last page, one of which is shorter; and one alone."""
    cache = make_cache(page_size=4, **CONFIGS[request.param])
    shuffle(cache, 3)
    for seq_id, length in ((0, 11), (2, 5)):
        cache.add_sequence(seq_id)
        append(cache, [seq_id], [length], seed=seq_id)
    cache.fork_sequence(0, 1, 10)
    return cache


IDS = [0, 1, 2]


@pytest.mark.parametrize("ids", [[0], [0, 1], [1, 0], [2, 1], [1, 2, 0]], ids=str)
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("layers_run", [0, 1, 2])
def test_a_step_is_aborted(cache, ids, count, layers_run):
    """Also where the owners of a page are all of the step, so that one of them writes in place."""
    before = state(cache, IDS)
    lengths = [count] * len(ids)
    cache.begin_forward(ids, lengths)
    for layer in range(layers_run):
        cache.attention(layer, rows(sum(lengths), seed=9))
    cache.check_integrity()
    cache.abort_forward()
    cache.check_integrity()
    assert state(cache, IDS) == before
    append(cache, ids, lengths, seed=4)  # the step can be made again
    cache.check_integrity()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_aborts(cache, error):
    before = state(cache, IDS)
    with pytest.raises(error), cache.forward([0, 1], [10, 2]):
        cache.attention(0, rows(12, seed=7))
        raise error
    assert not cache.is_in_forward and state(cache, IDS) == before
    cache.check_integrity()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_cannot_end_is_aborted(cache, error, monkeypatch):
    def fail(_):
        raise error

    before = state(cache, IDS)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(type(cache), "end_forward", fail)
        with cache.forward([0, 1], [10, 2]):
            for layer in range(2):
                cache.attention(layer, rows(12, seed=7))
    assert not cache.is_in_forward and state(cache, IDS) == before
    append(cache, [0, 1], [10, 2], seed=7)


@pytest.mark.parametrize("run", [(), (0,), (1,)], ids=["none", "first", "second"])
def test_a_layer_left_out_aborts(cache, run):
    before = state(cache, IDS)
    missing = [layer for layer in range(2) if layer not in run]
    with pytest.raises(ValueError, match=rf"aborted: layers \[{', '.join(map(str, missing))}\]"):
        with cache.forward([2], [3]):
            for layer in run:
                cache.attention(layer, rows(3))
    assert not cache.is_in_forward and state(cache, IDS) == before


def test_a_kernel_that_fails_aborts(cache):
    left = [3]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no luck")
        KERNELS["prefill"](*arguments)

    cache = make_cache({"prefill": failing})
    cache.add_sequence(0)
    append(cache, [0], [3])
    before = state(cache, [0])
    with pytest.raises(RuntimeError, match="no luck"):
        append(cache, [0], [4])
    assert state(cache, [0]) == before


def test_the_global_functions_stay_permissive(cache):
    """Skipping layers is allowed, as in the stock cache."""
    cache.begin_forward([0], [3])
    tvm_ffi.get_global_func("vm.builtin.kv_state_end_forward")(cache)
    assert cache.sequence_length(0) == 14


def test_abort_outside_a_step(cache):
    with pytest.raises(ValueError, match="abort_forward without begin_forward"):
        cache.abort_forward()
    append(cache, [0], [1])
    with pytest.raises(ValueError, match="abort_forward without begin_forward"):
        cache.abort_forward()


def test_kernels_cannot_end_their_step():
    """A kernel that calls back finds the step busy, whatever it calls."""
    calls = []

    def curious(*arguments):
        for call in (cache.end_forward, cache.abort_forward, lambda: cache.attention(0, rows(2))):
            with pytest.raises(ValueError, match="while a kernel of the step runs"):
                call()
            calls.append(call)
        KERNELS["prefill"](*arguments)

    cache = make_cache({"prefill": curious})
    cache.add_sequence(0)
    append(cache, [0], [2])
    assert len(calls) == 6 and cache.sequence_length(0) == 2


def test_token_trees():
    pair = TreePair((0, 5), kernels=KERNELS_WITH_TREES)
    pair.add(0, 1)
    pair.step({0: 9, 1: 3})
    pair.step({0: [-1, 0, 0], 1: [-1, -1]})
    before = state(pair.cache, [0, 1])
    pair.cache.begin_forward([1, 0], [2, 2], [1, 2, 0, 3])
    assert pair.cache.stats()["uncommitted_tree_nodes"] == 9
    pair.cache.abort_forward()
    assert state(pair.cache, [0, 1]) == before
    pair.step({0: [1, 3], 1: [0]})
    pair.commit({0: 4, 1: 2})
    pair.check_rows()


def test_windows_of_sequences():
    pair = WindowPair(mode="none")
    pair.add(0)
    pair.step([0], [9])
    pair.enable(0, 8, 2)
    before = state(pair.cache, [0])
    window = pair.cache.sequence_window(0)
    pair.cache.begin_forward([0], [6])
    pair.cache.abort_forward()
    assert state(pair.cache, [0]) == before and pair.cache.sequence_window(0) == window
    pair.step([0], [5])


@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("ids", [[0, 1], [1, 0]], ids=str)
def test_a_window_that_has_dropped_positions_of_a_shared_page(mode, ids):
    """Both write to the shared page: the slots count the text, not the positions that are held."""
    pair = WindowPair(mode=mode)
    pair.add(0)
    pair.step([0], [14])
    pair.fork(0, 1)
    pair.enable(1, 6, 0)
    pair.pop(0, 1)
    before = state(pair.cache, [0, 1])
    pair.cache.begin_forward(ids, [1, 1])
    pair.cache.attention(0, rows(2, seed=7))
    pair.cache.abort_forward()
    assert state(pair.cache, [0, 1]) == before
    pair.step(ids, [2, 1])  # compares what both attend to with the reference


def test_receivers_hear_nothing_of_an_aborted_step(cache):
    offered = []
    num_slots = [group["num_pages"] * 4 for group in cache.stats()["groups"]]
    _runtime.set_send_handler(cache, 1, offered.append, num_slots)
    slots = [number for _ in num_slots for number in (1, 0, 20)]
    _runtime.mark_send(cache, 2, 0, slots, 1)
    assert len(offered) == 1
    before = state(cache, IDS)
    with pytest.raises(ZeroDivisionError), cache.forward([2], [4]):
        raise ZeroDivisionError
    assert len(offered) == 1 and state(cache, IDS) == before
    append(cache, [2], [4])
    assert len(offered) == 2
    assert _runtime.send_block(cache, offered[1])["begin"] == 5


def test_a_receive_survives_an_aborted_step(cache):
    """A step ends a receive, and an aborted one has not been."""
    _runtime.prepare_recv(cache, 2, 6)
    receive = _runtime.receive_id(cache, 2)
    before = state(cache, IDS)
    cache.begin_forward([2], [2])
    assert _runtime.receive_id(cache, 2) == 0
    with pytest.raises(ValueError, match="not under way"):
        _runtime.finish_receive(cache, 2, receive)
    cache.abort_forward()
    assert state(cache, IDS) == before and _runtime.receive_id(cache, 2) == receive
    _runtime.cancel_receive(cache, 2, receive)
    assert cache.sequence_length(2) == 5
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_what_follows_is_as_without_the_aborted_step(seed):
    """Two caches, of which one aborts steps between those that both make."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    caches = [make_cache(page_size=4, max_total_tokens=256) for _ in range(2)]
    lengths: dict[int, int] = {}
    for step in range(60):
        ids = [int(i) for i in rng.permutation(list(lengths))[: rng.integers(1, 4)]]
        if len(lengths) < 6 and rng.random() < 0.3 or not ids:
            new = step + 100
            parent = ids[0] if ids and rng.random() < 0.8 else None
            at = int(rng.integers(0, lengths[parent] + 1)) if parent is not None else 0
            for cache in caches:
                if parent is None:
                    cache.add_sequence(new)
                else:
                    cache.fork_sequence(parent, new, at)
            lengths[new] = at
            continue
        counts = [int(rng.integers(1, 6)) for _ in ids]
        if sum(counts) + sum(lengths.values()) > 200:
            for cache in caches:
                cache.remove_sequence(ids[0])
            del lengths[ids[0]]
            continue
        if rng.random() < 0.6:
            with pytest.raises(ZeroDivisionError), caches[0].forward(ids, counts):
                for layer in range(int(rng.integers(0, 3))):
                    caches[0].attention(layer, rows(sum(counts), seed=step + 1))
                raise ZeroDivisionError
            caches[0].check_integrity()
        outs = []
        for cache in caches:
            with cache.forward(ids, counts):
                outs.append([cache.attention(i, rows(sum(counts), seed=step)) for i in range(2)])
        for one, other in zip(*outs, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        for i, n in zip(ids, counts, strict=True):
            lengths[i] += n
            for one, other in zip(*(c.debug_get_kv(i) for c in caches), strict=True):
                np.testing.assert_array_equal(one.numpy(), other.numpy())
    reference.assert_close(outs[0][0].numpy(), outs[1][0].numpy(), "float32")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
