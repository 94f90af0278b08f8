# SPDX-License-Identifier: Apache-2.0
"""The RNN state as models of apache-tvm use it: ours, next to theirs where theirs is right."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ..support.cases.caches.rnn_states import (
    RNN,
    STATE,
    begin,
    call,
    create,
    end,
    get,
    kernels,
    python_kernels,
    set_values,
    value_of,
)

BOTH = pytest.mark.parametrize("whose", ["stock", "ours"])
NUM_SEQS, HISTORY = 4, 4


@functools.cache
def _kernels(history: int):
    return kernels(NUM_SEQS, history)


def make(whose: str = "ours", history: int = HISTORY, num_layers: int = 1):
    return create(whose, num_layers, NUM_SEQS, history, *_kernels(history))


def step(state, values: dict[int, float], lengths=None) -> None:
    """Set both states of sequences to a number, and its double."""
    begin(state, values, lengths or [1] * len(values))
    set_values(state, 0, 0, values.values())
    set_values(state, 0, 1, [2 * value for value in values.values()])
    end(state)


def states(state, *seq_ids: int) -> list[tuple[float, float]]:
    return [(value_of(state, 0, 0, i), value_of(state, 0, 1, i)) for i in seq_ids]


# --- upstream's cases -----------------------------------------------------------------------------


@BOTH
def test_get_before_set_gives_the_initial_values(whose):
    state = make(whose)
    call(STATE + "clear", state)
    call(STATE + "add_sequence", state, 0)
    begin(state, [0], [1])
    assert (get(state, 0, 0, 1) == 0).all() and (get(state, 0, 1, 1) == 1).all()
    end(state)


@BOTH
def test_set_changes_the_sequences_of_the_step(whose):
    state = make(whose)
    for seq_id in range(3):
        call(STATE + "add_sequence", state, seq_id)
    step(state, {0: 2, 2: 3})
    assert states(state, 0, 1, 2) == [(2, 4), (0, 1), (3, 6)]


@BOTH
def test_popn_returns_to_the_state_before(whose):
    state = make(whose)
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 2})
    assert states(state, 0) == [(2, 4)]
    call(STATE + "popn", state, 0, 1)
    assert states(state, 0) == [(0, 1)]
    with pytest.raises((tvm.error.InternalError, ValueError)):
        call(STATE + "popn", state, 0, 1)


@BOTH
def test_a_fork_pops_alone(whose):
    state = make(whose)
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 2})
    call(STATE + "fork_sequence", state, 0, 1, -1)
    assert states(state, 0, 1) == [(2, 4), (2, 4)]
    call(STATE + "popn", state, 1, 1)
    assert states(state, 0, 1) == [(2, 4), (0, 1)]


# --- one page for each sequence, as models have by default ----------------------------------------


@BOTH
def test_all_sequences_step_with_a_history_of_one(whose):
    state = make(whose, history=1)
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 1}, [7])
    for seq_id in range(1, NUM_SEQS):
        call(STATE + "fork_sequence", state, 0, seq_id, -1)
    step(state, {i: 10 + i for i in range(NUM_SEQS)})
    begin(state, range(NUM_SEQS), [1] * NUM_SEQS)
    assert get(state, 0, 0, NUM_SEQS)[:, 0, 0].tolist() == [10, 11, 12, 13]
    end(state)
    assert states(state, *range(NUM_SEQS)) == [(10 + i, 20 + 2 * i) for i in range(NUM_SEQS)]


# --- where theirs is wrong ------------------------------------------------------------------------


def test_a_fork_at_a_snapshot_holds_its_state():
    state = make()
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 5}, [5])
    step(state, {0: 8}, [3])
    call(STATE + "fork_sequence", state, 0, 1, 5)
    call(STATE + "fork_sequence", state, 0, 2, 0)
    assert states(state, 0, 1, 2) == [(8, 16), (5, 10), (0, 1)]
    with pytest.raises(ValueError, match="sequence 0 at position 6 is not kept"):
        call(STATE + "fork_sequence", state, 0, 3, 6)
    step(state, {1: 9})
    assert states(state, 0, 1, 2) == [(8, 16), (9, 18), (0, 1)]


def test_popn_passes_over_prefills():
    state = make()
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 5}, [5])
    step(state, {0: 8}, [3])
    assert not call("pagedkv.rnn_state_can_popn", state, 0, 2)
    with pytest.raises(ValueError, match="position 6 is not kept"):
        call(STATE + "popn", state, 0, 2)
    assert states(state, 0) == [(8, 16)]
    call(STATE + "popn", state, 0, 3)
    assert states(state, 0) == [(5, 10)]
    call(STATE + "popn", state, 0, 5)
    assert states(state, 0) == [(0, 1)]


def test_sequences_of_unequal_lengths_step_together():
    state = make()
    for seq_id in (0, 1):
        call(STATE + "add_sequence", state, seq_id)
    step(state, {0: 1, 1: 2}, [3, 10])
    step(state, {1: 3, 0: 4}, [1, 6])
    call(STATE + "popn", state, 0, 6)
    call(STATE + "popn", state, 1, 1)
    assert states(state, 0, 1) == [(1, 2), (2, 4)]


def test_a_state_that_a_step_does_not_set_stays():
    state = make(num_layers=2)
    call(STATE + "add_sequence", state, 0)
    for layer in (0, 1):
        begin(state, [0], [1])
        set_values(state, layer, 1, [7 + layer])
        assert (get(state, layer, 1, 1) == 7 + layer).all()  # what has been set
        end(state)
    found = [[value_of(state, layer, i, 0) for i in (0, 1)] for layer in (0, 1)]
    assert found == [[0, 7], [0, 8]]
    call(STATE + "popn", state, 0, 1)
    assert value_of(state, 1, 1, 0) == 1


def test_abort_forward_restores_the_states():
    state = make(history=2)
    call(STATE + "add_sequence", state, 0)
    step(state, {0: 1})
    begin(state, [0], [4])
    set_values(state, 0, 0, [2])
    assert call("pagedkv.is_in_forward", state)
    call("pagedkv.abort_forward", state)
    assert states(state, 0) == [(1, 2)]
    step(state, {0: 3})
    call(STATE + "popn", state, 0, 1)  # the length is that before the abort
    assert states(state, 0) == [(1, 2)]


def test_a_step_in_place_cannot_be_aborted():
    state = make(history=1)
    for seq_id in range(NUM_SEQS):
        call(STATE + "add_sequence", state, seq_id)
    begin(state, [0], [1])
    call("pagedkv.abort_forward", state)  # nothing has been set
    begin(state, [0], [1])
    set_values(state, 0, 0, [2])
    with pytest.raises(ValueError, match="max_history of at least 2"):
        call("pagedkv.abort_forward", state)
    end(state)
    assert states(state, 0, 1) == [(2, 1), (0, 1)]


# --- errors ---------------------------------------------------------------------------------------


def test_failed_calls_change_nothing():
    state = make()
    for seq_id in range(NUM_SEQS - 1):
        call(STATE + "add_sequence", state, seq_id)
    step(state, {0: 5, 1: 6}, [2, 3])
    call(STATE + "fork_sequence", state, 0, 3, -1)
    before = states(state, 0, 1, 2, 3), dict(call("pagedkv.stats", state))
    wrong = [
        (pkv.CacheFullError, STATE + "add_sequence", 9),
        (pkv.CacheFullError, STATE + "fork_sequence", 0, 9, -1),
        (ValueError, STATE + "add_sequence", 0),
        (ValueError, STATE + "add_sequence", -1),
        (ValueError, STATE + "fork_sequence", 0, 1, -1),
        (ValueError, STATE + "fork_sequence", 0, 9, 3),
        (ValueError, STATE + "fork_sequence", 0, 9, -2),
        (KeyError, STATE + "fork_sequence", 8, 9, -1),
        (KeyError, STATE + "remove_sequence", 9),
        (KeyError, STATE + "popn", 9, 0),
        (ValueError, STATE + "popn", 0, 3),
        (ValueError, STATE + "popn", 0, -1),
        (ValueError, STATE + "begin_forward", Shape([0, 0]), Shape([1, 1])),
        (ValueError, STATE + "begin_forward", Shape([0]), Shape([1, 1])),
        (ValueError, STATE + "begin_forward", Shape([0]), Shape([0])),
        (ValueError, STATE + "begin_forward", Shape([0]), Shape([2**31])),
        (ValueError, STATE + "begin_forward", Shape([]), Shape([])),
        (ValueError, STATE + "begin_forward", Shape([0]), Shape([2]), Shape([-1, -1])),
        (ValueError, STATE + "begin_forward", Shape([0]), Shape([2]), Shape([-1])),
        (KeyError, STATE + "begin_forward", Shape([0, 9]), Shape([1, 1])),
        (ValueError, STATE + "end_forward"),
        (ValueError, "pagedkv.abort_forward"),
        (ValueError, RNN + "get", 0, 0, tvm.runtime.empty((1, 4, 8), "float16")),
        (ValueError, RNN + "set", 0, 0, tvm.runtime.empty((1, 4, 8), "float16")),
        (KeyError, RNN + "debug_get", 0, 0, 9),
        (IndexError, RNN + "debug_get", 1, 0, 0),
        (IndexError, RNN + "debug_get", 0, 2, 0),
        (IndexError, RNN + "debug_get", -1, 0, 0),
        (TypeError, STATE + "popn", 0),
        (TypeError, STATE + "popn", 0, "1"),
        (TypeError, RNN + "debug_get", 0, 0, None),
        (TypeError, "vm.builtin.attention_kv_cache_empty"),
        (KeyError, "pagedkv.rnn_state_can_fork", 9, 0),
        (ValueError, "pagedkv.rnn_state_can_fork", 0, 3),
        (KeyError, "pagedkv.rnn_state_can_popn", 9, 0),
        (ValueError, "pagedkv.rnn_state_can_popn", 0, 3),
        (TypeError, "pagedkv.rnn_state_can_popn", 0, "1"),
    ]
    for error, name, *args in wrong:
        with pytest.raises(error):
            call(name, state, *args)
        call("pagedkv.check_integrity", state)
        assert (states(state, 0, 1, 2, 3), dict(call("pagedkv.stats", state))) == before, name


def test_wrong_tensors_in_a_step():
    state = make()
    for seq_id in (0, 1):
        call(STATE + "add_sequence", state, seq_id)
    begin(state, [0, 1], [1, 1])
    strided = tvm_ffi.from_dlpack(np.zeros((2, 8, 4), "float16").transpose(0, 2, 1))
    for name in ("get", "set"):
        for wrong in (
            tvm.runtime.empty((1, 4, 8), "float16"),
            tvm.runtime.empty((2, 8, 4), "float16"),
            tvm.runtime.empty((2, 4, 8), "float32"),
            strided,
        ):
            with pytest.raises(ValueError, match="must"):
                call(RNN + name, state, 0, 0, wrong)
        right = tvm.runtime.empty((2, 4, 8), "float16")
        for layer, state_id in ((1, 0), (-1, 0), (0, 2), (0, -1)):
            with pytest.raises(IndexError):
                call(RNN + name, state, layer, state_id, right)
        with pytest.raises(TypeError):
            call(RNN + name, state, 0, 0, None)
    for name, *args in (
        ("begin_forward", Shape([0]), Shape([1])), ("add_sequence", 3), ("remove_sequence", 0),
        ("popn", 0, 0), ("fork_sequence", 0, 3, -1), ("clear",),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="within a step"):
            call(STATE + name, state, *args)
    end(state)
    assert states(state, 0, 1) == [(0, 1), (0, 1)]


def test_a_kernel_that_fails_or_calls_back():
    gets, sets = python_kernels(HISTORY)
    state = None

    def fail(*_):
        raise RuntimeError("in a kernel")

    def end_the_step(*_):
        end(state)

    state = create("ours", 1, NUM_SEQS, HISTORY, gets, [tvm_ffi.convert(fail), sets[1]])
    call(STATE + "add_sequence", state, 0)
    begin(state, [0], [1])
    with pytest.raises(RuntimeError, match="in a kernel"):
        set_values(state, 0, 0, [3])
    set_values(state, 0, 1, [4])
    end(state)
    assert states(state, 0) == [(0, 4)]
    state = create("ours", 1, NUM_SEQS, HISTORY, [tvm_ffi.convert(end_the_step)] * 2, sets)
    call(STATE + "add_sequence", state, 0)
    begin(state, [0], [1])
    with pytest.raises(ValueError, match="while a kernel of the step runs"):
        get(state, 0, 0, 1)
    end(state)


def test_wrong_arguments_of_creation():
    gets, sets = python_kernels(HISTORY)
    values = [tvm.runtime.tensor(np.zeros((2, 3), "float32"))] * 2
    right = [1, 2, 3, gets, sets, values]
    call(RNN + "create", *right)
    empty = tvm.runtime.empty((0, 3), "float32")
    for index, wrong in (
        (0, 0), (0, -1), (1, 0), (1, 2**31), (2, 0), (2, 2**30), (3, gets[:1]), (4, []),
        (5, values[:1]), (5, []), (5, [empty] * 2), (0, "1"), (3, None), (5, [None, None]),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            call(RNN + "create", *(right[:index] + [wrong] + right[index + 1 :]))
    with pytest.raises(TypeError):
        call(RNN + "create", *right[:5])


OF_STATES = [f"{RNN}{name}" for name in ("get", "set", "debug_get")]
OF_STATES += [f"pagedkv.rnn_state_can_{name}" for name in ("fork", "popn")]


@pytest.mark.parametrize("name", OF_STATES)
@pytest.mark.parametrize("args", [(), (None,), (1,)])
def test_other_first_arguments_are_type_errors(name, args):
    with pytest.raises(TypeError):
        call(name, *args)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
