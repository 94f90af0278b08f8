# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around the experts of a layer: routing, groups of rows, and the weighted sum.

Token rows and chosen experts make ``n * num_chosen`` pairs. Pair ``p`` belongs to row
``p // num_chosen``. Experts work through the pairs in the order of `group_pairs`: those of the
first expert, then those of the second, and so on.
"""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import exp2
from tir_kernels.script import inline, prim_func
from tir_kernels.spec import LOG2E, VectorTarget
from tir_kernels.targets import row_worker

from ...config.expert_config import Experts
from ..define import attributes, built_once, match_float32, match_int32, matcher, unused
from ..linear.packed_products import TASK_ROWS
from .gates import sigmoid

_LOWEST = -3.4028234663852886e38
_TINY = 1e-20  # added to a sum of scores before a division, as models of this kind were trained


@built_once
def route(experts: Experts, target: VectorTarget):
    """Build the kernel that chooses experts for each row.

    Of equal scores the expert with the lower index is chosen. The experts of a row are ordered by
    falling scores.

    Arguments of the kernel: logits float32 [n, num_experts], correction float32 [num_experts] where
    there is one, expert_scale float32 [num_experts] likewise, ids int32 [n, num_chosen], factors
    float32 [n, num_chosen].
    """
    num_experts, num_chosen = experts.num_experts, experts.num_chosen
    has_correction, has_scale = experts.has_correction, experts.has_expert_scale

    @prim_func(absent=unused(correction=has_correction, expert_scale=has_scale))
    def route(
        var_logits: T.handle,
        var_correction: T.handle,
        var_expert_scale: T.handle,
        var_ids: T.handle,
        var_factors: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        logits = match_float32(var_logits, n, num_experts)
        correction = match_float32(var_correction, num_experts)
        expert_scale = match_float32(var_expert_scale, num_experts)
        ids = match_int32(var_ids, n, num_chosen)
        factors = match_float32(var_factors, n, num_chosen)
        worker = row_worker(target)
        one = worker.vectors(1)
        for row in worker.items(n, num_experts):
            scores = T.alloc_buffer((num_experts,), "float32")
            choice = T.alloc_buffer((num_experts,), "float32")
            for e in range(num_experts):
                score = logits[row, e]
                if experts.scores == "sigmoid":
                    score = sigmoid(one.temp(score), one)
                scores[e] = score
                choice[e] = score + correction[e] if has_correction else score
            if experts.num_groups > 1:
                _mask_groups(choice, experts)
            best = T.alloc_buffer((num_chosen,), "float32")
            chosen = T.alloc_buffer((num_chosen,), "int32")
            _choose(choice, 0, num_experts, best, chosen)
            for j in range(num_chosen):
                ids[row, j] = chosen[j]
            _weight(scores, chosen, factors, row, experts)
            if has_scale:
                for j in range(num_chosen):
                    factors[row, j] = factors[row, j] * expert_scale[chosen[j]]

    return route


@inline
def _choose(values, begin, count, best, chosen):
    """Put the largest of `count` values into `best`, and their indices into `chosen`, in order.

    The values are those from `begin` on, and their indices are relative to it.
    """
    num_chosen = T.meta_var(int(best.shape[0]))
    for j in range(num_chosen):
        best[j] = T.float32(_LOWEST)
        chosen[j] = j
    for e in range(count):
        value = values[begin + e]
        if value > best[num_chosen - 1]:
            rank = num_chosen - 1
            for step in range(num_chosen - 1):
                j = T.meta_var(num_chosen - 1 - step)
                if value > best[j - 1]:
                    best[j] = best[j - 1]
                    chosen[j] = chosen[j - 1]
                    rank = j - 1
            best[rank] = value
            chosen[rank] = e


@inline
def _mask_groups(choice, experts):
    """Give the lowest score to all experts of the groups that are not chosen."""
    num_groups = T.meta_var(experts.num_groups)
    size = T.meta_var(experts.num_experts // num_groups)
    sums = T.alloc_buffer((num_groups,), "float32")
    best_of = T.alloc_buffer((experts.ranked_by,), "float32")
    best_ids = T.alloc_buffer((experts.ranked_by,), "int32")
    is_chosen = T.alloc_buffer((num_groups,), "int32")
    for g in range(num_groups):
        _choose(choice, g * size, size, best_of, best_ids)
        sums[g] = sum(best_of[j] for j in range(experts.ranked_by))
        is_chosen[g] = 0
    best = T.alloc_buffer((experts.num_chosen_groups,), "float32")
    groups = T.alloc_buffer((experts.num_chosen_groups,), "int32")
    _choose(sums, 0, num_groups, best, groups)
    for j in range(experts.num_chosen_groups):
        is_chosen[groups[j]] = 1
    for e in range(experts.num_experts):
        if is_chosen[e // size] == 0:
            choice[e] = T.float32(_LOWEST)


@inline
def _weight(scores, chosen, factors, row, experts):
    """Store the factors of the chosen experts of a row."""
    is_softmax = T.meta_var(experts.scores == "softmax")
    total = T.float32(0.0)
    if is_softmax:
        # The first chosen logit is the largest. Over all experts the factors are probabilities,
        # over the chosen ones these divided by their sum.
        largest = scores[chosen[0]]
        score = T.meta_var(lambda e: exp2((scores[e] - largest) * T.float32(LOG2E), 1))
        if not experts.normalizes:
            for e in range(experts.num_experts):
                total += score(e)
    else:
        score = T.meta_var(lambda e: scores[e])
    for j in range(experts.num_chosen):
        value = score(chosen[j])
        factors[row, j] = value
        if experts.normalizes:
            total += value
    scale = T.float32(experts.scale)
    if is_softmax or experts.normalizes:
        scale = T.float32(experts.scale) / (total + T.float32(_TINY))
    for j in range(experts.num_chosen):
        factors[row, j] = factors[row, j] * scale


@built_once
def group_pairs(experts: Experts, target: VectorTarget):
    """Build the kernel that orders pairs by expert, and cuts each expert's into tasks.

    Arguments of the kernel: ids int32 [n, num_chosen], pairs int32 [n * num_chosen], tasks int32
    [n * num_chosen, 3] (expert, its first pair, number of pairs up to `TASK_ROWS`), num_tasks
    int32 [1].
    """
    num_experts, num_chosen = experts.num_experts, experts.num_chosen

    @prim_func
    def group_pairs(
        var_ids: T.handle, var_pairs: T.handle, var_tasks: T.handle, var_num_tasks: T.handle
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        ids = match_int32(var_ids, n, num_chosen)
        pairs = match_int32(var_pairs, n * num_chosen)
        tasks = match_int32(var_tasks, n * num_chosen, 3)
        num_tasks = match_int32(var_num_tasks, 1)
        ends = T.alloc_buffer((num_experts,), "int32")  # of the pairs of an expert so far
        for e in range(num_experts):
            ends[e] = 0
        for i in range(n):
            for j in range(num_chosen):
                ends[ids[i, j]] = ends[ids[i, j]] + 1
        task, begin = T.int32(0), T.int32(0)
        for e in range(num_experts):
            count = ends[e]
            for k in range((count + TASK_ROWS - 1) // TASK_ROWS):
                tasks[task, 0] = e
                tasks[task, 1] = begin + k * TASK_ROWS
                tasks[task, 2] = T.min(count - k * TASK_ROWS, TASK_ROWS)
                task += 1
            ends[e] = begin
            begin += count
        num_tasks[0] = task
        for i in range(n):
            for j in range(num_chosen):
                at = ends[ids[i, j]]
                pairs[at] = T.cast(i * num_chosen + j, "int32")
                ends[ids[i, j]] = at + 1

    return group_pairs


@built_once
def scale_pairs(features: int, num_chosen: int, dtype: str, target: VectorTarget):
    """Build the kernel that multiplies rows in the order of `group_pairs` by their factors.

    Arguments of the kernel: x [n * num_chosen, features], factors float32 [n, num_chosen], pairs
    int32 [n * num_chosen], out like x.
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def scale_pairs(var_x: T.handle, var_factors: T.handle, var_pairs: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n * num_chosen, features)
        factors = match_float32(var_factors, n, num_chosen)
        pairs = match_int32(var_pairs, n * num_chosen)
        out = match_rows(var_out, n * num_chosen, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n * num_chosen, features):
            pair = T.meta_var(T.cast(pairs[row], "int64"))
            factor = factors[pair // num_chosen, pair % num_chosen]
            for column in v.columns():
                v.store(out, (row, column), v.load(x, (row, column)) * v.filled(factor))

    return scale_pairs


@built_once
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
):
    """Build the kernel that sums the chosen experts of each row, and adds what is given besides.

    Arguments of the kernel: x float32 [n * num_chosen, features], factors float32 [n, num_chosen]
    if `weighted`, shared [n, features] of the type `shared`, gate float32 [n, 1] whose sigmoid
    multiplies it if `shared_gate`, residual [n, features] of the type `residual`, out [n,
    features] of `out_dtype`.
    """
    match_out, match_shared, match_residual = (
        matcher(target, dtype or "float32") for dtype in (out_dtype, shared, residual)
    )
    chosen = {"factors": weighted, "shared": shared, "gate": shared_gate, "residual": residual}

    @prim_func(absent=unused(**chosen))
    def combine(
        var_x: T.handle,
        var_factors: T.handle,
        var_shared: T.handle,
        var_gate: T.handle,
        var_residual: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_float32(var_x, n * num_chosen, features)
        factors = match_float32(var_factors, n, num_chosen)
        shared_rows = match_shared(var_shared, n, features)
        gate = match_float32(var_gate, n, 1)
        added = match_residual(var_residual, n, features)
        out = match_out(var_out, n, features)
        worker = row_worker(target)
        v, one = worker.vectors(features), worker.vectors(1)
        for row in worker.items(n, features * num_chosen):
            if shared_gate:
                share = sigmoid(one.temp(gate[row, 0]), one)
            for column in v.columns():
                total = v.constant(0.0)
                for j in range(T.int64(num_chosen)):
                    value = T.meta_var(v.load(x, (row * num_chosen + j, column)))
                    total += v.filled(factors[row, j]) * value if weighted else value
                if shared is not None:
                    more = T.meta_var(v.load(shared_rows, (row, column)))
                    total += v.filled(share) * more if shared_gate else more
                if residual is not None:
                    total += v.load(added, (row, column))
                v.store(out, (row, column), total)

    return combine
