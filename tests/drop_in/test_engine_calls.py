# SPDX-License-Identifier: Apache-2.0
"""Calls of serving engines, in their order: ours, next to the cache inside apache-tvm.

The sequences of calls are those of mlc-llm's engine: prefill in chunks beside decode, forks and
rollbacks of a prefix cache, token trees of speculative decoding.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ..relax.test_frontend import export_model
from ..support.cases.caches.engine_calls import CACHE, STATE, call, make_engine
from ..support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ..support.harness.fast_compilation import MODEL_TARGET

BOTH = pytest.mark.parametrize("whose", ["stock", "ours"])


# --- creation -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> relax.VirtualMachine:
    """A compiled model whose function `create` makes the cache."""
    module = export_model(pkv.PagedKVCache)
    return relax.VirtualMachine(tvm.compile(module, target=MODEL_TARGET), tvm.cpu())


@pytest.mark.parametrize("has_windows", [0, 1])
def test_creation_from_five_shapes_of_one_number(model, has_windows):
    """Sequences, tokens, chunk, page size, sliding window; the pages are those of the stock cache.

    An engine admits requests by the pages that are available, and lets a sequence grow to
    max_total_tokens: without a page more than these need it would stop one page before.
    """
    cache = model["create"](*(Shape([n]) for n in (3, 100, 32, 16, has_windows)))
    described = cache.description
    sizes = ("max_num_sequences", "max_total_tokens", "prefill_chunk_size", "page_size")
    assert [described[name] for name in sizes] == [3, 100, 32, 16]
    assert described["sliding_window"] == bool(has_windows)
    fields = {"sliding_window": bool(has_windows), "page_size": 16, "max_num_sequences": 3}
    stock = make_engine("stock", max_total_tokens=100, **fields)
    expected = 7 + 1 + 2 * 3 * has_windows
    assert stock.num_available_pages == cache.num_available_pages() == expected


def test_another_page_size_than_the_compiled_one(model):
    message = (
        r"compiled for pages of 16 slots, but page_size is 32: create the cache with page_size "
        r"16, or compile the model with kernel_page_size=32"
    )
    with pytest.raises(ValueError, match=message):
        model["create"](*(Shape([n]) for n in (3, 100, 32, 32, 0)))


# --- sequences and steps --------------------------------------------------------------------------


@BOTH
def test_steps_that_mix_prefill_and_decode(whose):
    """Hybrid prefill: rows of running sequences beside chunks of new ones, in any order."""
    engine = make_engine(whose)
    engine.add(0, 1)
    engine.step([0], [20])
    engine.step([0, 1], [1, 31])
    engine.step([1, 0], [5, 1])
    for _ in range(5):
        engine.step([0, 1], [1, 1])
    engine.add(2, 3)
    engine.step([2, 0, 3, 1], [12, 1, 17, 1])
    engine.step([0, 1, 2, 3], [1, 1, 1, 1])
    engine.remove(0, 2)
    engine.step([3, 1], [1, 1])
    engine.clear()
    assert call(CACHE + "empty", engine.cache)
    engine.add(0)
    engine.step([0], [9])


@BOTH
def test_pages_that_are_available(whose):
    """Along the way: they fall by what sequences take, and come back when these go."""
    engine = make_engine(whose)
    available = [engine.num_available_pages]
    engine.add(0, 1)
    for seq_ids, lengths in (([0], [8]), ([0], [1]), ([1, 0], [3, 3]), ([1], [1]), ([1], [1])):
        engine.step(seq_ids, lengths)
        available.append(engine.num_available_pages)
    engine.pop(0, 4)
    available.append(engine.num_available_pages)
    engine.remove(1)
    available.append(engine.num_available_pages)
    engine.clear()
    available.append(engine.num_available_pages)
    assert available == [65, 63, 62, 61, 61, 60, 61, 63, 65]


@BOTH
def test_a_sequence_may_fill_the_cache(whose):
    """With max_total_tokens in one sequence an engine still sees a page, so it goes on to there."""
    engine = make_engine(whose, max_total_tokens=64)
    engine.add(0)
    engine.step([0], [32])
    engine.step([0], [31])
    assert engine.num_available_pages >= 1
    engine.step([0], [1])
    assert engine.total_length == 64


# --- a prefix cache -------------------------------------------------------------------------------


@BOTH
def test_finished_sequences_stay_beside_the_running_ones(whose):
    """max_num_sequences bounds the batch; a prefix cache keeps as many finished ones and more."""
    engine = make_engine(whose)  # 4
    for first in (0, 4, 8):
        batch = list(range(first, first + 4))
        engine.add(*batch)
        engine.step(batch, [7, 5, 8, 3])
        engine.step(batch, [1] * 4)
    assert len(engine.expected.sequences) == 12
    # A match with a finished sequence: part of it is forked, the rest is computed.
    for parent, position in ((2, 6), (5, 4), (0, 8), (8, 1)):
        child = 100 + parent
        engine.fork(parent, child, position)
    engine.step([102, 105, 100, 108], [4, 1, 2, 6])
    engine.step([105, 102, 108, 100], [1] * 4)
    # A finished one is used again: rolled back to the match and continued.
    engine.pop(4, 3)
    engine.step([4, 105], [9, 1])
    engine.remove(*range(4))  # the oldest ones go
    engine.step([100, 102], [1, 1])


def test_too_many_sequences_in_a_step():
    """Both numbers are in the message, and nothing has changed."""
    engine = make_engine("ours")
    engine.add(*range(5))
    with pytest.raises(ValueError, match=r"has 5 sequences, more than max_num_sequences \(4\)"):
        engine.begin(range(5), [1] * 5)
    engine.check()
    engine.step(range(4), [1] * 4)


@BOTH
def test_forks_and_pops_around_each_other(whose):
    engine = make_engine(whose)
    engine.add(0)
    engine.step([0], [21])
    engine.fork(0, 1, 13)  # within a page
    engine.fork(0, 2, 16)  # at a page's end
    engine.remove(0)
    engine.fork(1, 3)  # right after a removal, with the number of nobody
    engine.fork(2, 0, 8)  # and with the number that was removed
    engine.check()
    engine.pop(3, 2)  # what was forked
    engine.pop(2, 7)
    engine.pop(0, 0)
    engine.check()
    engine.step([3, 2, 0, 1], [1, 5, 2, 1])
    engine.pop(1, 14)  # everything
    engine.step([1, 3], [3, 1])
    engine.fork(3, 7, 0)  # nothing
    engine.step([7, 0], [2, 1])


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(whose, seed):
    """Forks at any position, pops, removals and mixed steps; the reference knows what is right."""
    rng = np.random.default_rng(seed)
    print("seed", seed)
    engine = make_engine(whose)
    next_id = 0
    for _ in range(60):
        ids = list(engine.expected.sequences)
        long_ids = [i for i in ids if engine.expected.length(i) > 1]
        draw = rng.random()
        if len(ids) < 2 or (draw < 0.15 and len(ids) < 9):
            engine.add(next_id)
            next_id += 1
        elif draw < 0.3 and long_ids and len(ids) < 9:
            parent = int(rng.choice(long_ids))
            engine.fork(parent, next_id, int(rng.integers(1, engine.expected.length(parent))))
            next_id += 1
        elif draw < 0.4 and long_ids:
            seq_id = int(rng.choice(long_ids))
            engine.pop(seq_id, int(rng.integers(1, engine.expected.length(seq_id))))
        elif draw < 0.5 and len(ids) > 4:
            engine.remove(int(rng.choice(ids)))
        elif engine.total_length < 120:
            batch = rng.permutation(ids)[: rng.integers(1, 5)].tolist()
            lengths = [int(n) for n in rng.choice([1, 1, 1, 3, 7], len(batch))]
            engine.step(batch, lengths)
        else:
            engine.remove(max(ids, key=engine.expected.length))
        engine.check()


# --- token trees ----------------------------------------------------------------------------------


TREE = ([5, 3], [-1, 0, 0, 1, 1, -1, 0, 0])
LEAVES = [3, 2]


def test_trees_of_speculative_decoding():
    """Nodes count in the lengths until a commit, which keeps the path to a leaf."""
    engine = make_engine("ours", KERNELS_WITH_TREES)
    engine.add(0, 1)
    engine.step([0, 1], [9, 14])
    engine.step([1, 0], *TREE)
    assert engine.total_length == 9 + 14 + 8
    engine.commit([1, 0], LEAVES)
    assert engine.total_length == 14 + 3 + 9 + 2
    engine.step([0, 1], [1, 1])
    engine.step([0], [4], [-1, 0, 1, 2])  # a chain
    engine.commit([0], [-1])  # nothing of it
    engine.step([0, 1], [2, 1])


@BOTH
def test_uncommitted_nodes(whose):
    """They count in both lengths; plain steps and forks are refused on them, removal is not."""
    engine = make_engine(whose, KERNELS_WITH_TREES)
    engine.add(0, 1, 2)
    engine.step([0, 1], [9, 14])
    available = engine.num_available_pages
    engine.begin([0, 1], *TREE)
    call(STATE + "end_forward", engine.cache)
    engine.expected.grow_trees([0, 1], *TREE)
    for seq_id, length in ((0, 9 + 5), (1, 14 + 3)):
        assert call(CACHE + "get_sequence_length", engine.cache, seq_id) == length
    assert engine.total_length == 9 + 5 + 14 + 3
    with pytest.raises(Exception, match="not been committed|not committed"):
        call(STATE + "fork_sequence", engine.cache, 0, 9, -1)
    if whose == "ours":  # the other one has counted the rows when it finds out
        with pytest.raises(ValueError, match="token tree nodes that are not committed"):
            engine.begin([0], [1])
        with pytest.raises(ValueError, match="token tree nodes that are not committed"):
            call(STATE + "fork_sequence", engine.cache, 0, 9, 11)
        call(STATE + "fork_sequence", engine.cache, 0, 9, 9)  # in front of them it may
        call(STATE + "popn", engine.cache, 0, 2)  # of the nodes the last two
        assert engine.total_length == 9 + 3 + 14 + 3 + 9
        call(STATE + "remove_sequence", engine.cache, 9)
    for seq_id in (0, 1):
        call(STATE + "remove_sequence", engine.cache, seq_id)
    assert engine.total_length == 0
    assert engine.num_available_pages == available + 3 + 4
    if whose == "ours":
        engine.cache.check_integrity()


def test_plain_steps_on_uncommitted_nodes_are_refused_by_the_stock_cache_too():
    engine = make_engine("stock")
    engine.add(0)
    engine.begin([0], [2], [-1, 0])
    call(STATE + "end_forward", engine.cache)
    with pytest.raises(Exception, match="CommitAcceptedTokenTreeNodes"):
        engine.begin([0], [1])


# --- RNN states -----------------------------------------------------------------------------------


def test_rnn_states_of_apache_tvm_are_left_alone():
    """Hybrid models call the same functions on their recurrent state."""
    nothing = tvm_ffi.convert(lambda *_: None)
    initial = tvm.runtime.tensor(np.zeros((2, 3), "float32"))
    create = tvm_ffi.get_global_func("vm.builtin.rnn_state_create")
    pkv.use_stock_runtime()
    try:
        state = create(1, 4, 2, [nothing], [nothing], [initial])
    finally:
        pkv.use_pagedkv_runtime()
    engine = make_engine("ours")
    for each in (state, engine.cache):
        call(STATE + "add_sequence", each, 0)
        call(STATE + "begin_forward", each, Shape([0]), Shape([3]))
        call(STATE + "end_forward", each)
        call(STATE + "fork_sequence", each, 0, 1, -1)
        call(STATE + "begin_forward", each, Shape([0, 1]), Shape([1, 1]))
        call(STATE + "end_forward", each)
        call(STATE + "popn", each, 0, 1)
        call(STATE + "remove_sequence", each, 1)
        call(STATE + "clear", each)
    with pytest.raises(Exception, match="cannot be found"):
        call(STATE + "remove_sequence", state, 0)
    with pytest.raises(Exception, match="type|expected|Mismatched"):
        call(CACHE + "get_num_available_pages", state)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
