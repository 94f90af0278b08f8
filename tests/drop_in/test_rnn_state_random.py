# SPDX-License-Identifier: Apache-2.0
"""Random calls on an RNN state, and a hybrid's cache and state in step, against models in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ..support.cases.caches.rnn_states import (
    SHAPES,
    STATE,
    begin,
    call,
    create,
    end,
    get,
    python_kernels,
    set_values,
    value_of,
)
from ..support.emulators.python_kernels import make_cache, make_config

NUM_SEQS, NUM_LAYERS = 3, 2
EVERY = [(layer, i) for layer in range(NUM_LAYERS) for i in range(len(SHAPES))]
ERRORS = (ValueError, KeyError, pkv.CacheFullError)


class Model:
    """The states of each sequence at every position where a step has ended, or the last pop."""

    def __init__(self, rng: np.random.Generator, history: int):
        self.rng, self.history = rng, history
        self.state = create("ours", NUM_LAYERS, NUM_SEQS, history, *python_kernels(history))
        self.texts: dict[int, dict[int, np.ndarray]] = {}
        self.counts = dict.fromkeys(("evicted", "pops", "forks", "aborts", "full"), 0)
        self.next_value = 2

    def draw(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def length(self, seq_id: int) -> int:
        return max(self.texts[seq_id])

    def draw_position(self, seq_id: int) -> int:
        """Mostly one where a step has ended, whose state may have been evicted."""
        known = list(self.texts[seq_id])[-4:]
        return known[self.draw(len(known))] if self.draw(3) else self.draw(self.length(seq_id) + 1)

    def cut(self, seq_id: int, position: int) -> dict[int, np.ndarray]:
        return {p: values for p, values in self.texts[seq_id].items() if p <= position}

    def random_call(self) -> None:
        seq_id, other = self.draw(5), self.draw(5)
        calls = [self.add, self.remove, self.fork, self.pop, self.step, self.step, self.step]
        calls[self.draw(len(calls))](seq_id, other)
        self.check()

    def add(self, seq_id: int, _) -> None:
        is_full = seq_id not in self.texts and len(self.texts) == NUM_SEQS
        self.counts["full"] += is_full
        if seq_id in self.texts or is_full:
            with pytest.raises(pkv.CacheFullError if is_full else ValueError):
                call(STATE + "add_sequence", self.state, seq_id)
        else:
            call(STATE + "add_sequence", self.state, seq_id)
            self.texts[seq_id] = {0: np.array([i for _, i in EVERY])}

    def remove(self, seq_id: int, _) -> None:
        if seq_id in self.texts:
            call(STATE + "remove_sequence", self.state, seq_id)
            del self.texts[seq_id]
        else:
            with pytest.raises(KeyError):
                call(STATE + "remove_sequence", self.state, seq_id)

    def fork(self, parent: int, child: int) -> None:
        if parent not in self.texts:
            with pytest.raises(KeyError):
                call(STATE + "fork_sequence", self.state, parent, child, -1)
            return
        position = self.draw_position(parent) if self.draw(3) else -1
        is_kept = call("pagedkv.rnn_state_can_fork", self.state, parent, position)
        if child in self.texts or len(self.texts) == NUM_SEQS or not is_kept:
            with pytest.raises(ERRORS):
                call(STATE + "fork_sequence", self.state, parent, child, position)
            return
        call(STATE + "fork_sequence", self.state, parent, child, position)
        self.counts["forks"] += position > 0
        self.texts[child] = self.cut(parent, self.length(parent) if position == -1 else position)
        assert position in (-1, self.length(child))

    def pop(self, seq_id: int, _) -> None:
        if seq_id not in self.texts:
            return
        length, position = self.length(seq_id), self.draw_position(seq_id)
        count = length - position
        if call("pagedkv.rnn_state_can_popn", self.state, seq_id, count):
            call(STATE + "popn", self.state, seq_id, count)
            self.texts[seq_id] = self.cut(seq_id, position)
            self.counts["pops"] += 0 < position < length
            assert self.length(seq_id) == position
        else:
            self.counts["evicted"] += position in self.texts[seq_id]
            with pytest.raises(ValueError, match="not kept"):
                call(STATE + "popn", self.state, seq_id, count)

    def step(self, *_) -> None:
        seq_ids = [i for i in self.texts if self.draw(3)]
        if not seq_ids:
            return
        self.rng.shuffle(seq_ids)
        lengths = [1 + self.draw(3) for _ in seq_ids]
        before = np.array([self.texts[i][self.length(i)] for i in seq_ids])
        after = before.copy()
        begin(self.state, seq_ids, lengths)
        for column, (layer, i) in enumerate(EVERY):
            if self.draw(4) == 0:
                continue
            found = get(self.state, layer, i, len(seq_ids))
            assert (found.reshape(len(seq_ids), -1).T == before[:, column]).all()
            if self.draw(5) == 0:
                continue
            after[:, column] = np.arange(len(seq_ids)) + self.next_value
            self.next_value = (self.next_value + len(seq_ids)) % 2000  # exact in float16
            set_values(self.state, layer, i, after[:, column])
            found = get(self.state, layer, i, len(seq_ids))
            assert (found.reshape(len(seq_ids), -1).T == after[:, column]).all()
        if self.draw(4) == 0 and self.history > 1:
            self.counts["aborts"] += 1
            return call("pagedkv.abort_forward", self.state)
        end(self.state)
        for seq_id, length, values in zip(seq_ids, lengths, after, strict=True):
            self.texts[seq_id][self.length(seq_id) + length] = values

    def check(self) -> None:
        call("pagedkv.check_integrity", self.state)
        assert call("pagedkv.stats", self.state)["num_sequences"] == len(self.texts)
        for seq_id in self.texts:
            found = [value_of(self.state, layer, i, seq_id) for layer, i in EVERY]
            assert found == self.texts[seq_id][self.length(seq_id)].tolist()


@pytest.mark.parametrize("history", [1, 2, 4])
def test_random_calls(history):
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    wanted = {"full", "evicted", *(("pops", "forks", "aborts") if history > 1 else ())}
    for turn in range(40):  # some things are rare
        model = Model(rng, history)
        for _ in range(300):
            model.random_call()
        wanted -= {name for name, n in model.counts.items() if n}
        if turn >= 3 and not wanted:
            return
    raise AssertionError(f"never: {', '.join(sorted(wanted))}")


def test_memory_is_told_and_constant():
    state = create("ours", NUM_LAYERS, NUM_SEQS, 2, *python_kernels(2))
    page_bytes = sum(np.dtype(dtype).itemsize * shape[0] * shape[1] for shape, dtype in SHAPES)
    initial = call("pagedkv.stats", state)["memory_bytes"]
    assert initial == page_bytes * (1 + NUM_LAYERS * NUM_SEQS * 2)  # and the initial values
    call(STATE + "add_sequence", state, 0)
    call(STATE + "fork_sequence", state, 0, 1, -1)
    stats = call("pagedkv.stats", state)
    assert stats["memory_bytes"] == initial
    assert (stats["num_used_pages"], stats["num_shared_pages"]) == (1, 1)  # no copy


# --- a hybrid: each call on a cache and on a state ------------------------------------------------


IN_CACHE_ONLY = 3  # an id that the cache refuses and the state takes


class Hybrid:
    """One cache and one state, as mlc-llm's kHybrid has them, that stay in step.

    The state is asked before a pop or a fork changes anything, and comes first where it can be
    taken back: a step of it is aborted, and a sequence of it is removed.
    """

    def __init__(self):
        fields = {"max_num_sequences": 2, "max_total_tokens": 16, "page_size": 4}
        self.cache, self.config = make_cache(**fields), make_config(**fields)
        self.layer = self.config["layers"][0]
        self.state = create("ours", 1, 3, 4, *python_kernels(4))

    def both(self, name: str, *args, undo: str, undo_args: tuple = ()) -> None:
        call(STATE + name, self.state, *args)
        try:
            call(STATE + name, self.cache, *args)
        except Exception:
            call(undo, self.state, *undo_args)
            raise

    def add(self, seq_id: int) -> None:
        self.both("add_sequence", seq_id, undo=STATE + "remove_sequence", undo_args=(seq_id,))

    def fork(self, parent: int, child: int, position: int) -> None:
        undo = {"undo": STATE + "remove_sequence", "undo_args": (child,)}
        self.both("fork_sequence", parent, child, position, **undo)

    def pop(self, seq_id: int, count: int) -> None:
        if not call("pagedkv.rnn_state_can_popn", self.state, seq_id, count):
            raise ValueError("the state is not kept")
        call(STATE + "popn", self.cache, seq_id, count)
        call(STATE + "popn", self.state, seq_id, count)

    def begin(self, seq_ids, lengths) -> None:
        args = Shape(seq_ids), Shape(lengths)
        self.both("begin_forward", *args, undo="pagedkv.abort_forward")

    def step(self, seq_id: int, length: int, value: float) -> None:
        self.begin([seq_id], [length])
        set_values(self.state, 0, 0, [value])
        for layer in range(len(self.config["layers"])):
            shape = self.rows(length)
            self.cache.attention(layer, np.zeros(shape, self.config["dtype"]))
        end(self.cache)
        end(self.state)

    def rows(self, length: int) -> tuple[int, int, int]:
        heads = self.layer["num_qo_heads"] + 2 * self.layer["num_kv_heads"]
        return length, heads, self.layer["qk_head_dim"]

    def found(self) -> list:
        """Lengths and states; the state's length is where its pop to 0 ends."""
        result = []
        for seq_id in sorted({*self.cache.sequence_ids()} - {IN_CACHE_ONLY}):
            length = self.cache.sequence_length(seq_id)
            assert call("pagedkv.rnn_state_can_popn", self.state, seq_id, length)
            with pytest.raises(ValueError, match="cannot pop"):
                call("pagedkv.rnn_state_can_popn", self.state, seq_id, length + 1)
            result.append((seq_id, length, value_of(self.state, 0, 0, seq_id)))
        assert call("pagedkv.stats", self.state)["num_sequences"] == len(result)
        assert not call("pagedkv.is_in_forward", self.state)
        assert not call("pagedkv.is_in_forward", self.cache)
        return result


def test_a_hybrid_stays_in_step_when_one_side_refuses():
    hybrid = Hybrid()
    hybrid.add(0)
    hybrid.step(0, 5, 7)
    hybrid.step(0, 1, 8)
    hybrid.fork(0, 1, 5)
    before = hybrid.found()
    assert before == [(0, 6, 8), (1, 5, 7)]
    call(STATE + "add_sequence", hybrid.cache, IN_CACHE_ONLY)
    for error, refused in (
        (ValueError, lambda: hybrid.add(IN_CACHE_ONLY)),  # by the cache
        (ValueError, lambda: hybrid.fork(0, IN_CACHE_ONLY, 5)),  # by the cache
        (ValueError, lambda: hybrid.fork(0, 2, 3)),  # by the state
        (ValueError, lambda: hybrid.pop(0, 2)),  # by the state
        (ValueError, lambda: hybrid.begin([0, 1], [20, 20])),  # by the cache: too many rows
        (KeyError, lambda: hybrid.begin([2], [1])),  # by the state
    ):
        with pytest.raises(error):
            refused()
        assert hybrid.found() == before
    hybrid.pop(0, 1)
    hybrid.step(1, 2, 9)
    assert hybrid.found() == [(0, 5, 7), (1, 7, 9)]


def test_stock_states_are_forwarded():
    state = create("stock", 1, 2, 2, *python_kernels(2))
    call(STATE + "add_sequence", state, 0)
    begin(state, [0], [1])
    set_values(state, 0, 0, [5])
    end(state)
    assert value_of(state, 0, 0, 0) == 5
    with pytest.raises(TypeError):
        call("pagedkv.rnn_state_can_popn", state, 0, 1)
    with pytest.raises(TypeError):
        tvm_ffi.get_global_func("pagedkv.abort_forward")(state)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
