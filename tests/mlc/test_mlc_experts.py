# SPDX-License-Identifier: Apache-2.0
"""Kernels that mlc-llm's mixtures of experts get on CPUs, and calls with numbers among tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.script import tirx as T

import tvm_pagedkv as pkv
import tvm_pagedkv.mlc
from tvm_pagedkv.mlc.drift import numbers_before_outputs, take_numbers_behind_outputs
from tvm_pagedkv.mlc.expert_products import Weights, of_chosen, of_groups
from tvm_pagedkv.mlc.experts import order_by_experts, top_k
from tvm_pagedkv.mlc.patches import Patches

from ..support.cases.models.mlc_cases import mlc_llm  # noqa: F401  (a fixture)

CPU = tvm.target.Target("llvm")


def call(kernel: tvm.tirx.PrimFunc, *arrays: np.ndarray) -> list[np.ndarray]:
    """Compile and call a kernel; return its arguments afterwards."""
    module = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(module, target=CPU)["kernel"](*tensors)
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("has_softmax", [False, True])
@pytest.mark.parametrize(("num_experts", "k"), [(6, 3), (5, 1), (8, 8)])
def test_choice(num_experts, k, has_softmax, dtype):
    scores = np.random.default_rng(k).integers(-9, 9, (70, num_experts)).astype(dtype)  # ties
    values, experts = np.zeros((70, k), dtype), np.zeros((70, k), "int32")
    _, values, experts = call(top_k(num_experts, k, dtype, has_softmax), scores, values, experts)
    want = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(experts, want)
    chosen = np.take_along_axis(scores, want, 1).astype("float64")
    if has_softmax:
        chosen = np.exp(chosen - chosen[:, :1])
        chosen /= chosen.sum(1, keepdims=True)
    atol = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
    np.testing.assert_allclose(values.astype("float64"), chosen, atol=atol)


def test_scores_that_are_no_numbers():
    """A wrong expert is an answer, an expert that is not there would be read behind the weights."""
    scores = np.array(
        [[np.nan] * 4, [5, np.nan, np.nan, 1], [-np.inf] * 4, [np.inf, 0, np.inf, np.nan]],
        "float32",
    )
    arrays = np.zeros((4, 3), "float32"), np.full((4, 3), -1, "int32")
    _, values, experts = call(top_k(4, 3, "float32", True), scores, *arrays)
    np.testing.assert_array_equal(experts[:3], [[0, 1, 2], [0, 3, 1], [0, 1, 2]])
    np.testing.assert_array_equal(experts[3], [0, 2, 1])
    np.testing.assert_allclose(values[1], [1 / (1 + np.exp(-4)), 1 / (1 + np.exp(4)), 0], atol=1e-6)


def test_order():
    num_tokens, num_experts, k = 9, 5, 2
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(num_experts)[:k] for _ in range(num_tokens)])
    mask = np.zeros((num_experts, num_tokens), "int32")
    mask[experts, np.arange(num_tokens)[:, None]] = 1
    out = np.zeros(num_tokens * k, "int32")
    cumsum = mask.reshape(-1).cumsum().astype("int32")
    *_, places, tokens = call(order_by_experts(k), cumsum, experts.astype("int32"), out, out)
    np.testing.assert_array_equal(tokens, np.nonzero(mask)[1])
    np.testing.assert_array_equal(tokens, places // k)
    np.testing.assert_array_equal(experts.reshape(-1)[places], np.nonzero(mask)[0])


def weights_of(dtype: str, bits: int | None, shape=(5, 48, 64)):
    """Random matrices: their form, the arrays of a kernel, and their numbers."""
    rng = np.random.default_rng(0)
    if bits is None:
        w = rng.standard_normal(shape).astype(dtype)
        return Weights(shape, dtype), [w], w.astype("float64")
    weights = Weights(shape, dtype, bits)
    codes = rng.integers(0, 2**bits, shape).astype("uint32")
    per_word = 32 // bits
    shifts = (np.arange(per_word) * bits).astype("uint32")
    words = (codes.reshape(*shape[:2], -1, per_word) << shifts).sum(-1, dtype="uint32")
    scales = rng.random((*shape[:2], weights.num_groups)).astype(dtype)
    numbers = (codes.astype("float64") - (2 ** (bits - 1) - 1)) * scales.repeat(32, -1)
    return weights, [words, scales], numbers


parametrize_weights = pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", None), ("float16", None), ("float32", 4), ("float16", 8)]
)


@parametrize_weights
def test_rows_in_the_order_of_experts(dtype, bits):
    weights, arrays, numbers = weights_of(dtype, bits)
    rows = np.random.default_rng(1).standard_normal((19, 64)).astype(dtype)
    indptr = np.array([0, 9, 9, 10, 14, 19], "int32")
    out = np.full((19, 48), np.nan, dtype)
    found = call(of_groups(weights, "int32"), rows, *arrays, indptr, out)[-1]
    experts = np.repeat(np.arange(5), np.diff(indptr))
    want = np.einsum("rk,rnk->rn", rows.astype("float64"), numbers[experts])
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=1e-3 * np.abs(want).max())


@parametrize_weights
@pytest.mark.parametrize("num_rows", [1, 3])
def test_one_token(dtype, bits, num_rows):
    weights, arrays, numbers = weights_of(dtype, bits)
    rows = np.random.default_rng(2).standard_normal((num_rows, 64)).astype(dtype)
    experts, out = np.array([[4, 0, 2]], "int32"), np.full((3, 48), np.nan, dtype)
    found = call(of_chosen(weights, 3, num_rows == 1), rows, *arrays, experts, out)[-1]
    own = np.broadcast_to(rows, (3, 64)).astype("float64")
    want = np.einsum("rk,rnk->rn", own, numbers[experts[0]])
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=1e-3 * np.abs(want).max())


def test_only_cpus_get_other_kernels(mlc_llm):  # noqa: F811
    pkv.mlc.install()
    from mlc_llm.op import moe_matmul, moe_misc

    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        assert moe_misc.gating_softmax_topk(None, 2) == ("for GPUs", 2, True)
        assert moe_matmul.gemv(None, None, None) == "for GPUs"

    class Gate(nn.Module):
        def forward(self, x: nn.Tensor):
            return moe_misc.gating_softmax_topk(x, 2, norm_topk_prob=False)

    with CPU:
        module, _ = Gate().export_tvm({"forward": {"x": spec.Tensor(["n", 4], "float32")}})
    run = relax.VirtualMachine(tvm.compile(module, target=CPU), tvm.cpu())["forward"]
    scores = np.array([[1, 3, 2, 0], [0, 0, 5, 5]], "float32")
    values, experts = (each.numpy() for each in run(tvm.runtime.tensor(scores)))
    np.testing.assert_array_equal(experts, [[1, 2], [2, 3]])
    softmax = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(values, np.take_along_axis(softmax, experts, 1), rtol=1e-5)
    pkv.mlc.uninstall()
    with CPU:
        assert moe_misc.gating_topk(None, 2) == ("for GPUs", 2)


@T.prim_func(private=True, s_tir=True)
def _multiple_behind(x_handle: T.handle, o_handle: T.handle, factor: T.int64):
    n = T.int64()
    x = T.match_buffer(x_handle, (n,), "float32")
    o = T.match_buffer(o_handle, (n,), "float32")
    for i in range(n):
        with T.sblock("multiple"):
            at = T.axis.spatial(n, i)
            o[at] = x[at] * T.cast(factor, "float32")


def test_numbers_behind_outputs():
    """mlc-llm's kernels take them there, and this apache-tvm passes them before."""

    class Multiple(nn.Module):
        def forward(self, x: nn.Tensor):
            out = nn.Tensor.placeholder(x.shape, "float32")
            return op.tensor_ir_op(_multiple_behind, "f", [x, tvm.tirx.const(3, "int64")], out)

    patches = Patches()
    take_numbers_behind_outputs(patches)
    try:
        module, _ = Multiple().export_tvm({"forward": {"x": spec.Tensor(["n"], "float32")}})
    finally:
        patches.undo()
    run = relax.VirtualMachine(tvm.compile(module, target=CPU), tvm.cpu())["forward"]
    x = np.arange(5, dtype="float32")
    np.testing.assert_array_equal(run(tvm.runtime.tensor(x)).numpy(), 3 * x)


def test_kernels_in_the_order_of_their_call_stay():
    number = tvm.tirx.const(3, "int64")
    x = nn.Tensor.placeholder([4], "float32")
    moved = numbers_before_outputs(_multiple_behind, [x, number])
    assert not moved.same_as(_multiple_behind)
    assert numbers_before_outputs(moved, [x, number]).same_as(moved)
    assert numbers_before_outputs(_multiple_behind, x).same_as(_multiple_behind)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
