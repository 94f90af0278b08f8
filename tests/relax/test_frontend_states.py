# SPDX-License-Identifier: Apache-2.0
"""The calls that models make for layers with a state, and their errors."""

from __future__ import annotations

import pytest
import tvm.testing
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec

from tvm_pagedkv import PagedKVCacheObject

SHAPES = {
    "q": ([5, 2, 16], "float16"),
    "k": ([5, 2, 16], "float16"),
    "v": ([5, 4, 24], "float16"),
    "log_decay": ([5, 4], "float32"),
    "beta": ([5, 4], "float32"),
    "x": ([5, 12], "float16"),
    "weight": ([12, 4], "float16"),
    "bias": ([12], "float16"),
}


def calls_of(forward, **changes) -> list[relax.Call]:
    """Return the calls in a Relax function of a cache and the tensors of `SHAPES`."""

    class Model(nn.Module):
        def run(self, cache: PagedKVCacheObject, tensors):
            return forward(cache, **dict(zip(SHAPES, tensors, strict=True)))

    tensors = [spec.Tensor(*shape) for shape in (SHAPES | changes).values()]
    arguments = {"cache": spec.Object(object_type=PagedKVCacheObject), "tensors": tuple(tensors)}
    module, _, _ = Model().export_tvm({"run": arguments}, allow_extern=True)
    found: list[relax.Call] = []

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op.name == "relax.call_dps_packed":
            found.append(expr)

    relax.analysis.post_order_visit(module["run"], visit)
    return found


def recurrent(cache, q, k, v, log_decay, beta, **_):
    return cache.recurrent(7, q, k, v, log_decay, beta, scale=0.25)


def without_beta(cache, q, k, v, log_decay, **_):
    return cache.recurrent(7, q, k, v, log_decay)


def conv(cache, x, weight, bias, **_):
    return cache.conv(3, x, weight, bias)


def without_bias(cache, x, weight, **_):
    return cache.conv(3, x, weight)


@pytest.mark.parametrize(
    ("forward", "name", "scalars", "num_tensors", "out"),
    [
        (recurrent, "pagedkv.recurrent", [7, 0.25], 5, [5, 4, 24]),
        (without_beta, "pagedkv.recurrent", [7, 1.0], 4, [5, 4, 24]),
        (conv, "pagedkv.conv", [3], 3, [5, 12]),
        (without_bias, "pagedkv.conv", [3], 2, [5, 12]),
    ],
)
def test_calls(forward, name, scalars, num_tensors, out):
    (call,) = calls_of(forward)
    assert call.args[0].global_symbol == name
    _, *arguments = call.args[1]
    assert [number.value for number in arguments[: len(scalars)]] == scalars
    assert len(arguments) - len(scalars) == num_tensors
    assert [int(x) for x in call.ty.shape] == out and str(call.ty.dtype) == "float16"


@pytest.mark.parametrize(
    ("forward", "changes", "message"),
    [
        (recurrent, {"k": ([5, 32], "float16")}, "k must be of type float16 and have 3 dimensions"),
        (recurrent, {"v": ([5, 4, 24], "float32")}, "v must be of type float16 .* got float32"),
        (recurrent, {"log_decay": ([5, 4], "float16")}, "log_decay must be of type float32 and ha"),
        (recurrent, {"beta": ([5, 4, 1], "float32")}, "beta must be .* 2 dimensions, got float32 "),
        (conv, {"x": ([5, 3, 4], "float16")}, "x must be of type float16 and have 2 dimensions"),
        (conv, {"weight": ([12, 4], "float32")}, "weight must be of type float16"),
        (conv, {"bias": ([12, 1], "float16")}, "bias must be .* have 1 dimensions, got float16"),
    ],
)
def test_errors(forward, changes, message):
    with pytest.raises(ValueError, match=message):
        calls_of(forward, **changes)


if __name__ == "__main__":
    tvm.testing.main()
