# SPDX-License-Identifier: Apache-2.0
"""Kernels that mlc-llm's recurrent models get where their own cannot be compiled."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm_ffi import Shape

import tvm_pagedkv as pkv
import tvm_pagedkv.mlc
from tvm_pagedkv.mlc.gated_delta import gated_delta_net
from tvm_pagedkv.mlc.rnn_state import get_function, set_function

from ..reference.recurrent import recurrence
from ..support.cases.models.mlc_cases import mlc_llm  # noqa: F401  (a fixture)

CPU = tvm.target.Target("llvm")


def _compiled(kernel: tvm.tirx.PrimFunc, name: str):
    module = tvm.IRModule({name: kernel.with_attr("global_symbol", name)})
    return tvm.compile(module, target=CPU)[name]


@pytest.mark.parametrize(
    ("num_key_heads", "value_dim", "dtype"),
    [(2, 24, "float32"), (1, 16, "bfloat16"), (4, 5, "float32")],
)
def test_gated_delta_rule(num_key_heads, value_dim, dtype):
    num_heads, key_dim, batch, tokens = 4, 32, 2, 5
    rng = np.random.default_rng(num_key_heads)
    rows = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    keys = (batch, tokens, num_key_heads, key_dim)
    q, k = (rng.standard_normal(keys).astype(rows) for _ in range(2))
    k /= np.linalg.norm(k.astype("float32"), axis=-1, keepdims=True).astype(rows)
    v = rng.standard_normal((batch, tokens, num_heads, value_dim)).astype(rows)
    gate, beta = (rng.random((batch, tokens, num_heads), dtype="float32") for _ in range(2))
    before = rng.standard_normal((batch, num_heads, key_dim, value_dim), dtype="float32")
    arrays = [q, k, v, gate, beta, before, np.zeros(v.shape, "float32"), np.zeros_like(before)]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    kernel = gated_delta_net(num_key_heads, num_heads, key_dim, value_dim, dtype)
    _compiled(kernel, "gated_delta_net")(*tensors)
    for i in range(batch):
        inputs = [array[i].astype("float64") for array in (q, k, v)]
        scale = key_dim**-0.5
        out, states = recurrence(*inputs, np.log(gate[i]), beta[i], before[i], scale)
        np.testing.assert_allclose(tensors[6].numpy()[i], out, atol=1e-5)
        np.testing.assert_allclose(tensors[7].numpy()[i], states[-1], atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4)])
def test_rnn_states_are_copied(shape):
    """Snapshots of three sequences, in a ring of two."""
    max_batch, history, slots = 4, 2, np.array([3, 0, 2], "int32")
    rng = np.random.default_rng(len(shape))
    snapshots = rng.standard_normal((max_batch, history, *shape), dtype="float32")
    states = rng.standard_normal((3, *shape), dtype="float32")
    histories = np.array([0, 1, 1], "int32")
    out, written = (tvm.runtime.tensor(array) for array in (np.zeros_like(states), snapshots))
    places = [tvm.runtime.tensor(array) for array in (slots, histories)]
    _compiled(get_function(shape, "float32", max_batch, history, 0), "get")(written, *places, out)
    np.testing.assert_array_equal(out.numpy(), snapshots[slots, histories])
    data = tvm.runtime.tensor(states)
    _compiled(set_function(shape, "float32", max_batch, history, 0), "set")(written, *places, data)
    snapshots[slots, (histories + 1) % history] = states
    np.testing.assert_array_equal(written.numpy(), snapshots)


def test_they_make_an_rnn_state():
    """A step from zeros, and a pop back to them."""
    shape = (2, 3)
    kernels = [
        _compiled(make(shape, "float32", 4, 3, 0), "kernel")
        for make in (get_function, set_function)
    ]
    call = tvm.get_global_func
    zeros = tvm.runtime.tensor(np.zeros(shape, "float32"))
    state = call("vm.builtin.rnn_state_create")(1, 4, 3, [kernels[0]], [kernels[1]], [zeros])
    call("vm.builtin.kv_state_add_sequence")(state, 7)
    values = np.arange(6, dtype="float32").reshape(1, *shape)
    call("vm.builtin.kv_state_begin_forward")(state, Shape([7]), Shape([5]))
    state = call("vm.builtin.rnn_state_set")(state, 0, 0, tvm.runtime.tensor(values))
    call("vm.builtin.kv_state_end_forward")(state)
    read = call("vm.builtin.rnn_state_debug_get")
    np.testing.assert_array_equal(read(state, 0, 0, 7).numpy(), values[0])
    call("vm.builtin.kv_state_popn")(state, 7, 5)
    np.testing.assert_array_equal(read(state, 0, 0, 7).numpy(), np.zeros(shape))


def test_only_cpus_get_another_kernel(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    from mlc_llm.model.qwen35 import qwen35_model
    from mlc_llm.nn.rnn_state import RNNState

    sizes = {
        "num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8,
        "dtype": "float32",
    }  # fmt: skip
    with CPU:
        kernel = qwen35_model.create_gated_delta_net_func(**sizes)
    assert isinstance(kernel, tvm.tirx.PrimFunc)
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        assert qwen35_model.create_gated_delta_net_func(**sizes) == ("a kernel for GPUs", sizes)
    assert RNNState.create_get_func is get_function
    pkv.mlc.uninstall()
    assert qwen35_model.create_gated_delta_net_func(**sizes)[0] == "a kernel for GPUs"
    with pytest.raises(SyntaxError):
        RNNState.create_set_func((1,), "float32", 1, 1, 0)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
