# SPDX-License-Identifier: Apache-2.0
"""The copies of mlc-llm's RNN states, whose own text the parser of apache-tvm 0.27 refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import tvm
from tvm.script import tirx as T

from .modules import find
from .patches import Patches


def copy_rnn_states(patches: Patches) -> None:
    """Let mlc-llm's models with an RNN state make its kernels.

    mlc-llm binds names within a block, which the parser takes for variables in memory. An mlc-llm
    without RNN states is left as it is.
    """
    if importlib.util.find_spec("mlc_llm.nn.rnn_state") is None:
        return
    state = find("mlc_llm.nn.rnn_state", "RNNState").RNNState
    patches.set(state, "create_get_func", staticmethod(get_function))
    patches.set(state, "create_set_func", staticmethod(set_function))


def get_function(
    shape: Sequence[int],
    dtype: str,
    max_batch_size: int | tvm.tirx.Var,
    max_history: int | tvm.tirx.Var,
    state_id: int,
) -> tvm.tirx.PrimFunc:
    """Make the kernel that copies the states of a step out of the snapshots.

    Parameters
    ----------
    shape : sequence of int
        Of one state.
    dtype : str
    max_batch_size, max_history : int or Var
        The sequences, and the snapshots of each.
    state_id : int
        Of the state within a layer.

    Returns
    -------
    PrimFunc
        Its arguments: the snapshots ``[max_batch_size, max_history, *shape]``, int32 ``[batch]``
        the slot of each sequence and the snapshot in it, and the states ``[batch, *shape]``.
    """
    return _copy(shape, dtype, max_batch_size, max_history, f"rnn_state_get_{state_id}", False)


def set_function(
    shape: Sequence[int],
    dtype: str,
    max_batch_size: int | tvm.tirx.Var,
    max_history: int | tvm.tirx.Var,
    state_id: int,
) -> tvm.tirx.PrimFunc:
    """Make the kernel that writes the states of a step behind their snapshots.

    Parameters
    ----------
    shape, dtype, max_batch_size, max_history, state_id
        As in `get_function`.

    Returns
    -------
    PrimFunc
        Its arguments are those of `get_function`; a state goes to the snapshot after the given one.
    """
    return _copy(shape, dtype, max_batch_size, max_history, f"rnn_state_set_{state_id}", True)


def _copy(
    shape: Sequence[int],
    dtype: str,
    max_batch_size: int | tvm.tirx.Var,
    max_history: int | tvm.tirx.Var,
    name: str,
    writes: bool,
) -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def copy(
        snapshots_handle: T.handle,
        slots_handle: T.handle,
        histories_handle: T.handle,
        states_handle: T.handle,
    ):
        T.func_attr({"global_symbol": name})
        batch = T.int32()
        snapshots = T.match_buffer(snapshots_handle, (max_batch_size, max_history, *shape), dtype)
        slots = T.match_buffer(slots_handle, (batch,), "int32")
        histories = T.match_buffer(histories_handle, (batch,), "int32")
        states = T.match_buffer(states_handle, (batch, *shape), dtype)
        for i, *s in T.grid(batch, *shape):
            with T.sblock("copy"):
                vi, *vs = T.axis.remap("S" * (len(shape) + 1), [i, *s])
                if writes:
                    following = T.meta_var((histories[vi] + 1) % T.cast(max_history, "int32"))
                    place = T.meta_var([slots[vi], following, *vs])
                    T.buffer_store(snapshots, T.BufferLoad(states, [vi, *vs]), place)
                else:
                    source = T.meta_var([slots[vi], histories[vi], *vs])
                    T.buffer_store(states, T.BufferLoad(snapshots, source), [vi, *vs])

    return copy
