# SPDX-License-Identifier: Apache-2.0
"""The call that stands for a cache in an exported model: 18 arguments."""

import json

import numpy as np
from tvm import relax as rx
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache


def create_generic(attn_kind, capacities, num_layers, heads, dims, rope, dtype):
    """Make the call.

    Parameters
    ----------
    attn_kind : str or list of str
    capacities : five integers or symbolic variables
    heads : query heads, KV heads
    dims : of Q and K, of V
    rope : mode, theta, scaling, extension factors or None, rotated dimensions
    """
    mode, theta, scaling, factors, rotary_dim = rope
    if isinstance(attn_kind, list):
        kind = [rx.StringImm(each) for each in attn_kind]
    else:
        kind = rx.StringImm(attn_kind)
    numbers = (num_layers, *heads, *dims, 0, 0, int(mode), 1, theta)
    if factors is None:
        factors = rx.prim_value(0)
    else:
        factors = rx.const(np.array(factors, "float32"))
    call = rx.call_pure_packed(
        "mlc.create_paged_kv_cache_generic",
        kind,
        rx.ShapeExpr(capacities),
        rx.ShapeExpr([0, num_layers]),
        *(rx.prim_value(number) for number in numbers),
        rx.StringImm(json.dumps(scaling)),
        factors,
        rx.prim_value(rotary_dim),
        rx.prim_value(0),
        rx.DataTypeImm(dtype),
        ty_args=rx.ObjectType(),
    )
    return PagedKVCache(_expr=call, _name="paged_kv_cache")
