# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around the experts of a layer: routing, groups of rows, and the weighted sum.

Token rows and chosen experts make ``n * num_chosen`` pairs. Pair ``p`` belongs to row
``p // num_chosen``. Experts work through the pairs in the order of `group_pairs`: those of the
first expert, then those of the second, and so on.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import F32, Register, broadcast, constant, exp2, load, store, temp
from tir_kernels.spec import LOG2E, VectorTarget

from ...config.expert_config import Experts
from ..linear.packed_products import UNIT_ROWS
from .emit import parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS, sigmoid

_LOWEST = -3.4028234663852886e38
_TINY = 1e-20  # added to a sum of scores before a division, as models of this kind were trained


def route(experts: Experts, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that chooses experts for each row.

    Of equal scores the expert with the lower index is chosen. The experts of a row are ordered by
    falling scores.

    Arguments of the kernel: logits float32 [n, num_experts], correction float32 [num_experts] where
    there is one, expert_scale float32 [num_experts] likewise, ids int32 [n, num_chosen], factors
    float32 [n, num_chosen].
    """
    num_experts, num_chosen = experts.num_experts, experts.num_chosen

    def body(n, logits, *others):
        *arrays, ids, factors = others
        correction = arrays[:1] if experts.has_correction else []

        def row(i):
            scores = T.alloc_buffer((num_experts,), F32)
            choice = T.alloc_buffer((num_experts,), F32)
            with T.serial(num_experts) as e:
                score = temp(logits[i, e])
                if experts.scores == "sigmoid":
                    score = temp(sigmoid(score, 1))
                T.buffer_store(scores, score, [e])
                T.buffer_store(choice, score + correction[0][e] if correction else score, [e])
            if experts.num_groups > 1:
                _mask_groups(choice, experts)
            best = T.alloc_buffer((num_chosen,), F32)
            chosen = T.alloc_buffer((num_chosen,), "int32")
            _choose(num_experts, lambda e: choice[e], best, chosen)
            with T.serial(num_chosen) as j:
                T.buffer_store(ids, chosen[j], [i, j])
            _weight(scores, chosen, factors, i, experts)
            if experts.has_expert_scale:
                with T.serial(num_chosen) as j:
                    T.buffer_store(factors, factors[i, j] * arrays[-1][chosen[j]], [i, j])

        parallel_if(n * num_experts >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("logits", (n, num_experts), F32),
            *([("correction", (num_experts,), F32)] if experts.has_correction else []),
            *([("expert_scale", (num_experts,), F32)] if experts.has_expert_scale else []),
            ("ids", (n, num_chosen), "int32"),
            ("factors", (n, num_chosen), F32),
        ]

    return rows_kernel(arguments, body, target)


def _choose(count: int, value_of, best, chosen) -> None:
    """Put the largest of `count` values into `best`, and their indices into `chosen`, in order."""
    num_chosen = int(best.shape[0])
    with T.serial(num_chosen) as j:
        T.buffer_store(best, T.float32(_LOWEST), [j])
        T.buffer_store(chosen, j, [j])
    with T.serial(count) as e:
        value = temp(value_of(e))
        with T.If(value > best[num_chosen - 1]), T.Then():
            place = Register(1, "int32", init=T.int32(num_chosen - 1))
            with T.serial(num_chosen - 1) as step:
                j = T.int32(num_chosen - 1) - step
                with T.If(value > best[j - 1]), T.Then():
                    T.buffer_store(best, best[j - 1], [j])
                    T.buffer_store(chosen, chosen[j - 1], [j])
                    place.set(j - 1)
            T.buffer_store(best, value, [place.get()])
            T.buffer_store(chosen, e, [place.get()])


def _mask_groups(choice, experts: Experts) -> None:
    """Give the lowest score to all experts of the groups that are not chosen."""
    num_groups, size = experts.num_groups, experts.num_experts // experts.num_groups
    sums = T.alloc_buffer((num_groups,), F32)
    best_of = T.alloc_buffer((experts.ranked_by,), F32)
    best_ids = T.alloc_buffer((experts.ranked_by,), "int32")
    is_chosen = T.alloc_buffer((num_groups,), "int32")
    with T.serial(num_groups) as g:
        _choose(size, lambda e: choice[g * size + e], best_of, best_ids)
        T.buffer_store(sums, sum(best_of[j] for j in range(experts.ranked_by)), [g])
        T.buffer_store(is_chosen, T.int32(0), [g])
    best = T.alloc_buffer((experts.num_chosen_groups,), F32)
    groups = T.alloc_buffer((experts.num_chosen_groups,), "int32")
    _choose(num_groups, lambda g: sums[g], best, groups)
    with T.serial(experts.num_chosen_groups) as j:
        T.buffer_store(is_chosen, T.int32(1), [groups[j]])
    with T.serial(experts.num_experts) as e:
        with T.If(is_chosen[e // size] == 0), T.Then():
            T.buffer_store(choice, T.float32(_LOWEST), [e])


def _weight(scores, chosen, factors, i, experts: Experts) -> None:
    """Store the factors of the chosen experts of a row."""
    num_chosen = experts.num_chosen
    total = Register(1, init=T.float32(0.0))
    if experts.scores == "softmax":
        # The first chosen logit is the largest. Over all experts the factors are probabilities,
        # over the chosen ones these divided by their sum.
        largest = temp(scores[chosen[0]])

        def score(e):
            return exp2((scores[e] - largest) * T.float32(LOG2E), 1)

        if not experts.normalizes:
            with T.serial(experts.num_experts) as e:
                total.set(total.get() + score(e))
    else:

        def score(e):
            return scores[e]

    with T.serial(num_chosen) as j:
        value = temp(score(chosen[j]))
        T.buffer_store(factors, value, [i, j])
        if experts.normalizes:
            total.set(total.get() + value)
    scale = T.float32(experts.scale)
    if experts.scores == "softmax" or experts.normalizes:
        scale = scale / (total.get() + T.float32(_TINY))
    scale = temp(scale)
    with T.serial(num_chosen) as j:
        T.buffer_store(factors, factors[i, j] * scale, [i, j])


def group_pairs(experts: Experts, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that orders pairs by expert, and cuts each expert's into units.

    Arguments of the kernel: ids int32 [n, num_chosen], pairs int32 [n * num_chosen], units int32
    [n * num_chosen, 3] (expert, its first pair, number of pairs up to `UNIT_ROWS`), num_units
    int32 [1].
    """
    num_experts, num_chosen = experts.num_experts, experts.num_chosen

    def body(n, ids, pairs, units, num_units):
        ends = T.alloc_buffer((num_experts,), "int32")
        with T.serial(num_experts) as e:
            T.buffer_store(ends, T.int32(0), [e])
        with T.serial(n) as i, T.serial(num_chosen) as j:
            T.buffer_store(ends, ends[ids[i, j]] + 1, [ids[i, j]])
        unit, begin = Register(1, "int32", init=T.int32(0)), Register(1, "int32", init=T.int32(0))
        with T.serial(num_experts) as e:
            count = temp(ends[e], 1, "int32")
            with T.serial((count + UNIT_ROWS - 1) // UNIT_ROWS) as k:
                left = count - k * UNIT_ROWS
                values = (e, begin.get() + k * UNIT_ROWS, T.min(left, T.int32(UNIT_ROWS)))
                for column, value in enumerate(values):
                    T.buffer_store(units, value, [unit.get(), column])
                unit.set(unit.get() + 1)
            T.buffer_store(ends, begin.get(), [e])
            begin.set(begin.get() + count)
        T.buffer_store(num_units, unit.get(), [0])
        with T.serial(n) as i, T.serial(num_chosen) as j:
            at = temp(ends[ids[i, j]], 1, "int32")
            T.buffer_store(pairs, T.cast(i * num_chosen + j, "int32"), [at])
            T.buffer_store(ends, at + 1, [ids[i, j]])

    def arguments(n):
        return [
            ("ids", (n, num_chosen), "int32"),
            ("pairs", (n * num_chosen,), "int32"),
            ("units", (n * num_chosen, 3), "int32"),
            ("num_units", (1,), "int32"),
        ]

    return rows_kernel(arguments, body, target)


def scale_pairs(features: int, num_chosen: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that multiplies rows in the order of `group_pairs` by their factors.

    Arguments of the kernel: x [n * num_chosen, features], factors float32 [n, num_chosen], pairs
    int32 [n * num_chosen], out like x.
    """
    lanes = math.gcd(features, target.lanes)

    def body(n, x, factors, pairs, out):
        def row(i):
            pair = T.cast(pairs[i], "int64")
            factor = temp(factors[pair // num_chosen, pair % num_chosen])
            with T.serial(T.int64(features // lanes)) as column:
                at = [i, column * lanes]
                store(out, at, lanes, load(x, at, lanes) * broadcast(factor, lanes))

        count = n * num_chosen
        parallel_if(count * features >= PARALLEL_ELEMENTS, count, row)

    def arguments(n):
        return [
            ("x", (n * num_chosen, features), dtype),
            ("factors", (n, num_chosen), F32),
            ("pairs", (n * num_chosen,), "int32"),
            ("out", (n * num_chosen, features), dtype),
        ]

    return rows_kernel(arguments, body, target)


def combine(
    features: int,
    num_chosen: int,
    out_dtype: str,
    target: VectorTarget,
    *,
    weighted: bool = True,
    shared: str | None = None,
    shared_gate: bool = False,
    residual: str | None = None,
) -> tirx.PrimFunc:
    """Build the kernel that sums the chosen experts of each row, and adds what is given besides.

    Arguments of the kernel: x float32 [n * num_chosen, features], factors float32 [n, num_chosen]
    if `weighted`, shared [n, features] of the type `shared`, gate float32 [n, 1] whose sigmoid
    multiplies it if `shared_gate`, residual [n, features] of the type `residual`, out [n,
    features] of `out_dtype`.
    """
    lanes = math.gcd(features, target.lanes)

    def body(n, x, *others):
        *optional, out = others
        given = iter(optional)
        factors = next(given) if weighted else None
        shared_rows = next(given) if shared else None
        gate = next(given) if shared_gate else None
        added = next(given) if residual else None

        def row(i):
            share = None if gate is None else temp(sigmoid(temp(gate[i, 0]), 1))
            with T.serial(T.int64(features // lanes)) as column:
                at = [i, column * lanes]
                total = Register(lanes, init=constant(0.0, lanes))
                with T.serial(T.int64(num_chosen)) as j:
                    value = load(x, [i * num_chosen + j, column * lanes], lanes)
                    if factors is None:
                        total.set(total.get() + value)
                    else:
                        total.fma(broadcast(factors[i, j], lanes), value)
                value = total.get()
                if shared_rows is not None:
                    more = load(shared_rows, at, lanes)
                    value = value + (more if share is None else broadcast(share, lanes) * more)
                if added is not None:
                    value = value + load(added, at, lanes)
                store(out, at, lanes, value)

        parallel_if(n * (features * num_chosen) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n * num_chosen, features), F32),
            *([("factors", (n, num_chosen), F32)] if weighted else []),
            *([("shared", (n, features), shared)] if shared else []),
            *([("gate", (n, 1), F32)] if shared_gate else []),
            *([("residual", (n, features), residual)] if residual else []),
            ("out", (n, features), out_dtype),
        ]

    return rows_kernel(arguments, body, target)
