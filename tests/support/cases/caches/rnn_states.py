# SPDX-License-Identifier: Apache-2.0
"""RNN states with compiled kernels, and the calls of a model on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.script import tirx as T
from tvm_ffi import Shape

import tvm_pagedkv as pkv

RNN, STATE = "vm.builtin.rnn_state_", "vm.builtin.kv_state_"
SHAPES = [((4, 8), "float16"), ((3, 5), "float32")]
INITIAL = [np.full(shape, i, dtype) for i, (shape, dtype) in enumerate(SHAPES)]


def call(name: str, *args: Any) -> Any:
    return tvm_ffi.get_global_func(name)(*args)


def kernels(num_seqs: int, history: int) -> tuple[list, list]:
    """Compile `f_get` and `f_set` for each state, with the storage's shape as a constant."""

    def make_get(rows, columns, dtype):
        @T.prim_func
        def get(a: T.handle, b: T.handle, c: T.handle, d: T.handle):
            batch = T.int32()
            storage = T.match_buffer(a, (num_seqs, history, rows, columns), dtype)
            seq_slots = T.match_buffer(b, (batch,), "int32")
            history_slots = T.match_buffer(c, (batch,), "int32")
            out = T.match_buffer(d, (batch, rows, columns), dtype)
            for i, j, k in T.grid(batch, rows, columns):
                out[i, j, k] = storage[seq_slots[i], history_slots[i], j, k]

        return get

    def make_set(rows, columns, dtype):
        @T.prim_func
        def set_(a: T.handle, b: T.handle, c: T.handle, d: T.handle):
            batch = T.int32()
            storage = T.match_buffer(a, (num_seqs, history, rows, columns), dtype)
            seq_slots = T.match_buffer(b, (batch,), "int32")
            history_slots = T.match_buffer(c, (batch,), "int32")
            data = T.match_buffer(d, (batch, rows, columns), dtype)
            for i, j, k in T.grid(batch, rows, columns):
                storage[seq_slots[i], (history_slots[i] + 1) % history, j, k] = data[i, j, k]

        return set_

    functions = {}
    for i, ((rows, columns), dtype) in enumerate(SHAPES):
        for name, make in (("get", make_get), ("set", make_set)):
            function = make(rows, columns, dtype)
            functions[f"{name}{i}"] = function.with_attr("global_symbol", f"rnn_{name}{i}")
    built = tvm.tirx.build(tvm.IRModule(functions), target=tvm.target.Target("llvm"))
    gets, sets = ([built[f"rnn_{name}{i}"] for i in range(len(SHAPES))] for name in ("get", "set"))
    return gets, sets


def create(whose: str, num_layers: int, num_seqs: int, history: int, gets, sets) -> Any:
    """An RNN state inside apache-tvm ("stock") or ours."""
    if whose == "stock":
        pkv.use_stock_runtime()
    try:
        initial = [tvm.runtime.tensor(value) for value in INITIAL]
        return call(RNN + "create", num_layers, num_seqs, history, gets, sets, initial)
    finally:
        pkv.use_pagedkv_runtime()


def python_kernels(history: int) -> tuple[list, list]:
    """The same functions in NumPy, for any number of states."""

    def get(storage, seq_slots, history_slots, out):
        at = np.from_dlpack(seq_slots), np.from_dlpack(history_slots)
        np.from_dlpack(out)[...] = np.from_dlpack(storage)[at]

    def set_(storage, seq_slots, history_slots, data):
        at = np.from_dlpack(seq_slots), (np.from_dlpack(history_slots) + 1) % history
        np.from_dlpack(storage)[at] = np.from_dlpack(data)

    return tuple([tvm_ffi.convert(f)] * len(SHAPES) for f in (get, set_))


def begin(state: Any, seq_ids, lengths) -> None:
    call(STATE + "begin_forward", state, Shape(seq_ids), Shape(lengths))


def end(state: Any) -> None:
    call(STATE + "end_forward", state)


def get(state: Any, layer: int, state_id: int, batch: int) -> np.ndarray:
    shape, dtype = SHAPES[state_id]
    out = tvm.runtime.empty((batch, *shape), dtype)
    call(RNN + "get", state, layer, state_id, out)
    return out.numpy()


def set_values(state: Any, layer: int, state_id: int, values) -> None:
    """Set the state of each sequence of the step to a number."""
    shape, dtype = SHAPES[state_id]
    data = np.stack([np.full(shape, value, dtype) for value in values])
    call(RNN + "set", state, layer, state_id, tvm.runtime.tensor(data))


def value_of(state: Any, layer: int, state_id: int, seq_id: int) -> float:
    """The number that a state is full of."""
    array = call(RNN + "debug_get", state, layer, state_id, seq_id).numpy()
    assert array.shape == SHAPES[state_id][0] and array.dtype == SHAPES[state_id][1]
    assert (array == array.flat[0]).all()
    return float(array.flat[0])


def refused(error: type[Exception] | tuple, f: Callable, *args: Any) -> str:
    """The text of the error that a call raises."""
    try:
        f(*args)
    except error as caught:
        return str(caught)
    raise AssertionError("the call was taken")
