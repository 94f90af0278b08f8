# SPDX-License-Identifier: Apache-2.0
"""Kernels of the residual streams of AltUp, on any target.

Streams lie beside each other: a row of `num_streams` streams has ``num_streams * width`` features.
"""

from tvm.script import tirx as T

from tir_kernels.script import inline, prim_func
from tir_kernels.targets import row_worker

from ..define import Target, attributes, built_once, match_float32, matcher
from .copies import copy_columns
from .gates import sigmoid

_SMALLEST = 1e-5  # mean square of a projected stream, as models were trained
MAX_STREAMS = 8


@T.meta_class
class _RootMeanSquare:
    def __init__(self, v):
        self.v, self.value = v, T.local_scalar("float32")

    @inline
    def measure(self, x, row, begin, smallest):
        v = T.meta_var(self.v)
        squares = v.constant(0.0)
        for column in v.columns():
            value = v.load(x, (row, column + begin))
            squares += value * value
        mean_square = T.meta_var(v.sum(squares) / T.float32(v.width))
        if smallest > 0.0:
            self.value = T.sqrt(T.max(mean_square, T.float32(smallest)))
        else:
            self.value = T.sqrt(mean_square)


def root_mean_square(v, x, row, begin=0, smallest: float = 0.0):
    """Return that of the columns of x from `begin` on, which the `Vectors` v cover.

    `smallest` bounds their mean square from below.
    """
    found = _RootMeanSquare(v)
    found.measure(x, row, begin, smallest)
    return found.value


def routed_shares(worker, routed, row) -> list:
    """Return the hyperbolic tangents of a row of logits, which weigh streams."""
    one, shares = worker.vectors(1), []
    temp = one.arithmetic.temp
    for s in range(int(routed.shape[-1])):
        double = temp(routed[row, s] * T.float32(2.0))
        shares.append(temp(T.float32(2.0) * sigmoid(double, one) - T.float32(1.0)))
    return shares


def dot(v, weight, row: int, shares: list):
    """Return the sum of the products of a row of weights and shares."""
    return v.arithmetic.temp(sum(weight[row, r] * share for r, share in enumerate(shares)))


@built_once
def stack_streams(num_streams: int, width: int, dtype: str, target: Target):
    """Build the kernel that makes the streams: x, and what it was projected to.

    Each projected stream is scaled to the root mean square of x.

    Arguments of the kernel: x [n, width], projected [n, (num_streams - 1) * width], out [n,
    num_streams * width].
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def stack_streams(var_x: T.handle, var_projected: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, width)
        projected = match_rows(var_projected, n, (num_streams - 1) * width)
        out = match_rows(var_out, n, num_streams * width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, num_streams * width):
            copy_columns(v, x, (row,), 0, out, (row,), 0)
            size = T.meta_var(root_mean_square(v, x, row))
            for s in range(T.int64(num_streams - 1)):
                begin = T.meta_var(s * width)
                scale = size / root_mean_square(v, projected, row, begin, _SMALLEST)
                for column in v.columns():
                    value = v.load(projected, (row, begin + column)) * v.filled(scale)
                    v.store(out, (row, begin + width + column), value)

    return stack_streams


@built_once
def merge_streams(num_streams: int, width: int, dtype: str, target: Target):
    """Build the kernel of the mean of the first stream and what the others were projected to.

    Each projected stream is scaled to the root mean square of the first one.

    Arguments of the kernel: x [n, num_streams * width], one projected stream [n, width] for each
    other stream, out [n, width].

    Raises
    ------
    ValueError
        If there are more than `MAX_STREAMS` streams.
    """
    if num_streams > MAX_STREAMS:
        raise ValueError(f"there may be {MAX_STREAMS} streams, got {num_streams}")
    match_rows = matcher(target, dtype)

    @prim_func(absent=[f"var_projected_{i}" for i in range(num_streams, MAX_STREAMS)])
    def merge_streams(
        var_x: T.handle,
        var_projected_1: T.handle,
        var_projected_2: T.handle,
        var_projected_3: T.handle,
        var_projected_4: T.handle,
        var_projected_5: T.handle,
        var_projected_6: T.handle,
        var_projected_7: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, num_streams * width)
        handles = T.meta_var(
            [
                *(var_projected_1, var_projected_2, var_projected_3, var_projected_4),
                *(var_projected_5, var_projected_6, var_projected_7),
            ][: num_streams - 1]
        )
        projected = T.meta_var([match_rows(handle, n, width) for handle in handles])
        out = match_rows(var_out, n, width)
        worker = row_worker(target)
        v = worker.vectors(width)
        temp = T.meta_var(v.arithmetic.temp)
        for row in worker.items(n, num_streams * width):
            size = T.meta_var(root_mean_square(v, x, row))
            scales = T.meta_var(
                [temp(size / root_mean_square(v, each, row, 0, _SMALLEST)) for each in projected]
            )
            for column in v.columns():
                at = T.meta_var((row, column))
                scaled = T.meta_var(
                    v.load(each, at) * v.filled(scale)
                    for each, scale in zip(projected, scales, strict=True)
                )
                total = T.meta_var(sum(scaled, v.load(x, at)))
                v.store(out, at, total * v.constant(1 / num_streams))

    return merge_streams


@built_once
def predict_streams(num_streams: int, width: int, dtype: str, target: Target):
    """Build the kernel that predicts the streams after a layer: x plus a mixture of its streams.

    Stream `to` gets stream `of` times the sum over r of ``weight[to * num_streams + of, r]`` times
    ``tanh(routed[r])``.

    Arguments of the kernel: x [n, num_streams * width], routed float32 [n, num_streams], weight
    float32 [num_streams ** 2, num_streams], out like x.
    """
    match_rows, streams = matcher(target, dtype), range(num_streams)

    @prim_func
    def predict_streams(
        var_x: T.handle, var_routed: T.handle, var_weight: T.handle, var_out: T.handle
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, num_streams * width)
        routed = match_float32(var_routed, n, num_streams)
        weight = match_float32(var_weight, num_streams**2, num_streams)
        out = match_rows(var_out, n, num_streams * width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, num_streams * width):
            shares = T.meta_var(routed_shares(worker, routed, row))
            mixture = T.meta_var([dot(v, weight, i, shares) for i in range(num_streams**2)])
            for column in v.columns():
                values = T.meta_var([v.temp(v.load(x, (row, column + s * width))) for s in streams])
                _store_mixtures(v, values, mixture, out, row, column)

    return predict_streams


def _store_mixtures(v, values: list, mixture: list, out, row, column) -> None:
    """Store each of the vectors of all streams plus their mixture."""
    for to, value in enumerate(values):
        factors = mixture[to * len(values) : (to + 1) * len(values)]
        parts = (each * v.filled(by) for each, by in zip(values, factors, strict=True))
        v.store(out, (row, column + to * v.width), sum(parts, value))


@built_once
def correct_streams(num_streams: int, active: int, width: int, dtype: str, target: Target):
    """Build the kernel that adds to each stream a share of what a layer changed in the active one.

    The share of stream s is 1 plus the sum over r of ``weight[s, r] * tanh(routed[r])``.

    Arguments of the kernel: predicted [n, num_streams * width], computed [n, width], routed float32
    [n, num_streams], weight float32 [num_streams, num_streams], out like `predicted`.
    """
    match_rows, streams = matcher(target, dtype), range(num_streams)

    @prim_func
    def correct_streams(
        var_predicted: T.handle,
        var_computed: T.handle,
        var_routed: T.handle,
        var_weight: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        predicted = match_rows(var_predicted, n, num_streams * width)
        computed = match_rows(var_computed, n, width)
        routed = match_float32(var_routed, n, num_streams)
        weight = match_float32(var_weight, num_streams, num_streams)
        out = match_rows(var_out, n, num_streams * width)
        worker = row_worker(target)
        v = worker.vectors(width)
        temp = T.meta_var(v.arithmetic.temp)
        for row in worker.items(n, num_streams * width):
            shares = T.meta_var(routed_shares(worker, routed, row))
            factors = T.meta_var(
                [temp(dot(v, weight, s, shares) + T.float32(1.0)) for s in streams]
            )
            for column in v.columns():
                before = T.meta_var(v.load(predicted, (row, column + active * width)))
                change = v.load(computed, (row, column)) - before
                _store_corrected(v, predicted, change, factors, out, row, column)

    return correct_streams


def _store_corrected(v, predicted, change, factors: list, out, row, column) -> None:
    """Store the vectors of all streams plus their shares of a change."""
    for s, factor in enumerate(factors):
        at = (row, column + s * v.width)
        v.store(out, at, v.load(predicted, at) + change * v.filled(factor))


@built_once
def add_to_streams(num_streams: int, width: int, dtype: str, target: Target):
    """Build the kernel that adds rows to all streams but the first.

    Arguments of the kernel: x [n, num_streams * width], added [n, width], out like x.
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def add_to_streams(var_x: T.handle, var_added: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, num_streams * width)
        added = match_rows(var_added, n, width)
        out = match_rows(var_out, n, num_streams * width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, num_streams * width):
            for column in v.columns():
                value = v.load(added, (row, column))
                v.store(out, (row, column), v.load(x, (row, column)))
                for s in T.unroll(1, num_streams):
                    at = T.meta_var((row, column + s * width))
                    v.store(out, at, v.load(x, at) + value)

    return add_to_streams
