# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of mlc-llm on CPUs, where its own kernels cannot be compiled.

They bind GPU threads. These give the same results by loops.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import tvm
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

from .expert_products import ATTRIBUTES, MATMUL
from .modules import find
from .patches import Patches

_MISC, _MATMUL = "mlc_llm.op.moe_misc", "mlc_llm.op.moe_matmul"


def run_experts_on_cpus(patches: Patches) -> None:
    """Give mlc-llm's mixtures of experts other kernels where the target is a CPU.

    An mlc-llm without them is left as it is.
    """
    if importlib.util.find_spec("mlc_llm.op") is None:
        return
    for module, functions in ((_MISC, MISC), (_MATMUL, MATMUL)):
        owner = find(module, *functions)
        for name, function in functions.items():
            patches.set(owner, name, _on_cpus(function, getattr(owner, name)))


def _on_cpus(own: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        target = tvm.target.Target.current(allow_none=True)
        is_cpu = target is not None and target.kind.name == "llvm"
        return (own if is_cpu else original)(*args, **kwargs)

    return choose


# --- the choice of experts ----------------------------------------------------------------------


def gating_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of the scores ``[rows, experts]``, the largest first, and their experts."""
    return _gating(scores, k, has_softmax=False)


def gating_softmax_topk(x: Tensor, k: int, norm_topk_prob: bool = True) -> tuple[Tensor, Tensor]:
    """The same of the softmax of logits, over the chosen ones or, else, over all of them."""
    if norm_topk_prob:
        return _gating(x, k, has_softmax=True)
    return gating_topk(op.softmax(x.astype("float32"), axis=-1).astype(x.dtype), k)


def _gating(x: Tensor, k: int, has_softmax: bool) -> tuple[Tensor, Tensor]:
    rows, num_experts = x.shape
    outputs = Tensor.placeholder([rows, k], x.dtype), Tensor.placeholder([rows, k], "int32")
    kernel = top_k(int(num_experts), k, x.dtype, has_softmax)
    return op.tensor_ir_op(kernel, f"top{k}_of_experts", args=[x], out=outputs)


def top_k(num_experts: int, k: int, dtype: str, has_softmax: bool) -> tvm.tirx.PrimFunc:
    """Make the kernel: scores ``[rows, num_experts]``, values and int32 experts ``[rows, k]``.

    Of equal scores the first experts are chosen, NaN after all others: each expert once at most,
    whatever the scores are. With a softmax, values are that of the chosen scores, in float32.
    """
    # Compared in float32, which LLVM can for every type of scores.
    lowest = tvm.tirx.const(float("-inf"), "float32")

    @T.prim_func(private=True, s_tir=True)
    def choose(scores_handle: T.handle, values_handle: T.handle, experts_handle: T.handle):
        T.func_attr(ATTRIBUTES)
        rows = T.int64()
        scores = T.match_buffer(scores_handle, (rows, num_experts), dtype)
        values = T.match_buffer(values_handle, (rows, k), dtype)
        experts = T.match_buffer(experts_handle, (rows, k), "int32")
        for r in T.parallel(rows):
            with T.sblock("row"):
                row = T.axis.spatial(rows, r)
                chosen = T.sblock_alloc_buffer((k,), "float32")
                total = T.sblock_alloc_buffer((1,), "float32")
                for i in range(k):
                    chosen[i] = lowest
                for e in range(num_experts):
                    score = T.meta_var(_number(T.cast(scores[row, e], "float32"), lowest))
                    if T.Or(e < k, score > chosen[k - 1]):
                        last = T.meta_var(T.min(e, k - 1))
                        experts[row, last] = e
                        chosen[last] = score
                        for back in range(k - 1):  # it moves up while it is larger
                            i = T.meta_var(k - 2 - back)
                            if chosen[i + 1] > chosen[i]:
                                _swap(chosen, experts, row, i)
                if has_softmax:
                    total[0] = T.float32(0)
                    for i in range(k):
                        total[0] += T.exp(chosen[i] - chosen[0])
                    for i in range(k):
                        values[row, i] = T.cast(T.exp(chosen[i] - chosen[0]) / total[0], dtype)
                else:
                    for i in range(k):
                        values[row, i] = T.cast(chosen[i], dtype)

    return choose


def _number(score, lowest):
    return T.if_then_else(T.isnan(score), lowest, score)


def _swap(chosen, experts, row, i) -> None:
    value, expert = T.bind(chosen[i]), T.bind(experts[row, i])
    T.buffer_store(chosen, chosen[i + 1], [i])
    T.buffer_store(experts, experts[row, i + 1], [row, i])
    T.buffer_store(chosen, value, [i + 1])
    T.buffer_store(experts, expert, [row, i + 1])


def get_indices(cumsum: Tensor, expert_indices: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of the order by experts, its place in the order by tokens, and its token.

    Parameters
    ----------
    cumsum : int32 ``[experts * tokens]``
        How many rows of the order come up to a token of an expert.
    expert_indices : int32 ``[tokens, k]``
    """
    tokens, k = expert_indices.shape
    outputs = [Tensor.placeholder([tokens * k], "int32") for _ in range(2)]
    kernel = order_by_experts(int(k))
    return op.tensor_ir_op(kernel, "get_indices", args=[cumsum, expert_indices], out=outputs)


def order_by_experts(k: int) -> tvm.tirx.PrimFunc:
    """Make the kernel of `get_indices`."""

    @T.prim_func(private=True, s_tir=True)
    def order(
        cumsum_handle: T.handle, experts_handle: T.handle, places: T.handle, tokens: T.handle
    ):
        T.func_attr(ATTRIBUTES)
        num_tokens, length = T.int64(), T.int64()
        cumsum = T.match_buffer(cumsum_handle, (length,), "int32")
        experts = T.match_buffer(experts_handle, (num_tokens, k), "int32")
        place_of = T.match_buffer(places, (num_tokens * k,), "int32")
        token_of = T.match_buffer(tokens, (num_tokens * k,), "int32")
        for t, j in T.grid(num_tokens, k):
            with T.sblock("row"):
                token, choice = T.axis.remap("SS", [t, j])
                last = T.meta_var(experts[token, choice] * num_tokens + token)
                place_of[cumsum[last] - 1] = T.cast(token * k + choice, "int32")
                token_of[cumsum[last] - 1] = T.cast(token, "int32")

    return order


MISC: dict[str, Callable] = {
    "gating_topk": gating_topk,
    "gating_softmax_topk": gating_softmax_topk,
    "get_indices": get_indices,
}
