# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of mlc-llm's Qwen3.5 on CPUs, where its own kernel cannot be compiled."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import tvm
from tvm.script import tirx as T

from .modules import find
from .patches import Patches

_MODEL = "mlc_llm.model.qwen35.qwen35_model"


def run_recurrent_layers_on_cpus(patches: Patches) -> None:
    """Give mlc-llm's Qwen3.5 another kernel where the target is a CPU: its own binds GPU threads.

    An mlc-llm without Qwen3.5 is left as it is.
    """
    if importlib.util.find_spec("mlc_llm.model.qwen35") is None:
        return
    name = "create_gated_delta_net_func"
    model = find(_MODEL, name)
    original = getattr(model, name)

    def create(**arguments: Any) -> tvm.tirx.PrimFunc:
        target = tvm.target.Target.current(allow_none=True)
        is_cpu = target is not None and target.kind.name == "llvm"
        return (gated_delta_net if is_cpu else original)(**arguments)

    patches.set(model, name, create)


def gated_delta_net(
    num_key_heads: int, num_value_heads: int, key_head_dim: int, value_head_dim: int, dtype: str
) -> tvm.tirx.PrimFunc:
    """Make the kernel with the arguments and the results of mlc-llm's.

    A token changes the state S of its head, then reads it::

        S = gate * S
        S = S + k (beta * (v - k S))
        out = q S / sqrt(key_head_dim)

    A task takes some columns of a head through all tokens, as no column depends on another one.

    Parameters
    ----------
    num_key_heads, num_value_heads : int
        Value heads share key heads in groups of neighbours.
    key_head_dim, value_head_dim : int
    dtype : str
        Of q, k and v.

    Returns
    -------
    PrimFunc
        Its arguments: q and k ``[batch, tokens, num_key_heads, key_head_dim]``, v ``[batch, tokens,
        num_value_heads, value_head_dim]``; float32: gate and beta ``[batch, tokens,
        num_value_heads]``, the states before ``[batch, num_value_heads, key_head_dim,
        value_head_dim]``, the output like v, and the states after.
    """
    group = num_value_heads // num_key_heads
    rows, width = key_head_dim, math.gcd(value_head_dim, 16)
    num_blocks = value_head_dim // width
    scale = 1.0 / math.sqrt(key_head_dim)

    @T.prim_func(s_tir=True)
    def gated_delta_net(
        q_handle: T.handle, k_handle: T.handle, v_handle: T.handle,
        gate_handle: T.handle, beta_handle: T.handle, before_handle: T.handle,
        out_handle: T.handle, state_handle: T.handle,
    ):  # fmt: skip
        T.func_attr({"op_pattern": 8, "tirx.noalias": True, "tirx.is_scheduled": 1})
        batch, tokens = T.int64(), T.int64()
        keys = (batch, tokens, num_key_heads, key_head_dim)
        values = (batch, tokens, num_value_heads, value_head_dim)
        states = (batch, num_value_heads, key_head_dim, value_head_dim)
        q = T.match_buffer(q_handle, keys, dtype)
        k = T.match_buffer(k_handle, keys, dtype)
        v = T.match_buffer(v_handle, values, dtype)
        gate = T.match_buffer(gate_handle, (batch, tokens, num_value_heads), "float32")
        beta = T.match_buffer(beta_handle, (batch, tokens, num_value_heads), "float32")
        before = T.match_buffer(before_handle, states, "float32")
        out = T.match_buffer(out_handle, values, "float32")
        state = T.match_buffer(state_handle, states, "float32")

        for task in T.parallel(batch * num_value_heads * num_blocks):
            with T.sblock("columns"):
                b = T.axis.spatial(batch, task // (num_value_heads * num_blocks))
                h = T.axis.spatial(num_value_heads, task // num_blocks % num_value_heads)
                block = T.axis.spatial(num_blocks, task % num_blocks)
                change = T.sblock_alloc_buffer((width,), "float32")
                answer = T.sblock_alloc_buffer((width,), "float32")
                for row in range(rows):
                    for c in T.vectorized(width):
                        state[b, h, row, block * width + c] = before[b, h, row, block * width + c]
                for t in range(tokens):
                    for c in T.vectorized(width):
                        change[c] = 0.0
                        answer[c] = 0.0
                    for row in range(rows):
                        for c in T.vectorized(width):
                            state[b, h, row, block * width + c] *= gate[b, t, h]
                        for c in T.vectorized(width):
                            change[c] += state[b, h, row, block * width + c] * T.cast(
                                k[b, t, h // group, row], "float32"
                            )
                    for c in T.vectorized(width):
                        change[c] = beta[b, t, h] * (
                            T.cast(v[b, t, h, block * width + c], "float32") - change[c]
                        )
                    for row in range(rows):
                        for c in T.vectorized(width):
                            state[b, h, row, block * width + c] += change[c] * T.cast(
                                k[b, t, h // group, row], "float32"
                            )
                        for c in T.vectorized(width):
                            answer[c] += state[b, h, row, block * width + c] * T.cast(
                                q[b, t, h // group, row], "float32"
                            )
                    for c in T.vectorized(width):
                        out[b, t, h, block * width + c] = answer[c] * T.float32(scale)

    return gated_delta_net
