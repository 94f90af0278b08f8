# SPDX-License-Identifier: Apache-2.0
"""Norms of rows: RMS norms and layer norms, on any target."""

from tvm.script import tirx as T

from tir_kernels.script import inline, prim_func
from tir_kernels.targets import row_worker

from ..define import Target, attributes, built_once, match_float32, matcher, unused
from .copies import copy_columns


@T.meta_class
class Norm:
    """The statistics of columns of a row; to be made for each row.

    Parameters
    ----------
    v : Vectors
        They cover the columns.
    epsilon : float
        Added to the mean square.
    subtracts_mean : bool
        Whether it is a layer norm; otherwise it is an RMS norm.
    """

    def __init__(self, v, epsilon: float, *, subtracts_mean: bool = False):
        self.v, self.epsilon, self.subtracts_mean = v, epsilon, subtracts_mean
        self.scale = T.local_scalar("float32")
        if subtracts_mean:
            self.mean = T.local_scalar("float32")

    @inline
    def measure(self, x, row, begin):
        """Take the statistics of the columns of x from `begin` on."""
        v = T.meta_var(self.v)
        if self.subtracts_mean:
            total = v.constant(0.0)
            for column in v.columns():
                total += v.load(x, (row, column + begin))
            self.mean = v.sum(total) / T.float32(v.width)
        squares = v.constant(0.0)
        for column in v.columns():
            value = self._centered(v.load(x, (row, column + begin)))
            squares += value * value
        mean_square = T.meta_var(v.sum(squares) / T.float32(v.width))
        self.scale = T.float32(1.0) / T.sqrt(mean_square + T.float32(self.epsilon))

    def of(self, value):
        """Return a vector of the columns, normalized."""
        return self._centered(value) * self.v.filled(self.scale)

    def _centered(self, value):
        return value - self.v.filled(self.mean) if self.subtracts_mean else value


@inline
def normalize(x_norm, x, row, begin, weight, out, to, bias=None):
    """Write the norm of the columns of x from `begin` on to those of out from `to` on.

    Parameters
    ----------
    x_norm : Norm
    weight, bias : float32 Buffer, optional
        Those of the columns.
    """
    v = T.meta_var(x_norm.v)
    x_norm.measure(x, row, begin)
    for column in v.columns():
        value = x_norm.of(v.load(x, (row, column + begin)))
        if weight is not None:
            value *= v.load(weight, (column,))
        if bias is not None:
            value += v.load(bias, (column,))
        v.store(out, (row, column + to), value)


@built_once
def norm(
    features: int,
    epsilon: float,
    dtype: str,
    target: Target,
    *,
    residual: bool = False,
    scaled: bool = False,
    subtracts_mean: bool = False,
):
    """Build the kernel of ``x / sqrt(mean(x ** 2) + epsilon) * weight (+ residual) (* scale)``.

    A layer norm first subtracts the mean from x.

    Arguments of the kernel: x [n, features], weight float32 [features], residual [n, features] and
    scale float32 [1] where chosen, out [n, features].
    """
    match_rows = matcher(target, dtype)

    @prim_func(absent=unused(residual=residual, scale=scaled))
    def norm(
        var_x: T.handle,
        var_weight: T.handle,
        var_residual: T.handle,
        var_scale: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, features)
        weight = match_float32(var_weight, features)
        added = match_rows(var_residual, n, features)
        scale = match_float32(var_scale, 1)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n, features):
            x_norm = Norm(v, epsilon, subtracts_mean=subtracts_mean)
            x_norm.measure(x, row, 0)
            for column in v.columns():
                value = x_norm.of(v.load(x, (row, column))) * v.load(weight, (column,))
                if residual:
                    value += v.load(added, (row, column))
                if scaled:
                    value *= v.filled(scale[0])
                v.store(out, (row, column), value)

    return norm


@built_once
def qk_norm(
    q: tuple[int, int],
    k: tuple[int, int],
    v_width: int,
    epsilon: float,
    dtype: str,
    target: Target,
    *,
    v: str = "as_is",
):
    """Build the kernel of RMS norms of the Q and K of fused rows, and of V where chosen.

    Parameters
    ----------
    q, k : (count, width)
        Parts that are normalized by themselves, with the same weights, and how wide each is: the
        heads, or one part that holds them all.
    v : {"as_is", "unit", "unit_of_k"}
        V is copied, or normalized in parts like those of K, but without weights. "unit_of_k": x has
        no V, which is K with the norm of V.

    Arguments of the kernel: x [n, width of Q, K and V], weights of Q and of K float32 [width of a
    part], out [n, width of Q, K and V].
    """
    (num_q, q_width), (num_k, k_width) = q, k
    k_begin = num_q * q_width
    v_begin = k_begin + num_k * k_width
    features = v_begin + v_width
    v_source = k_begin if v == "unit_of_k" else v_begin
    match_rows = matcher(target, dtype)

    @prim_func
    def qk_norm(var_x: T.handle, var_q_weight: T.handle, var_k_weight: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, v_begin if v == "unit_of_k" else features)
        q_weight = match_float32(var_q_weight, q_width)
        k_weight = match_float32(var_k_weight, k_width)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        q_vectors, k_vectors = worker.vectors(q_width), worker.vectors(k_width)
        v_vectors = worker.vectors(v_width)
        for row in worker.items(n, features):
            for part in range(T.int64(num_q)):
                begin = T.meta_var(part * q_width)
                normalize(Norm(q_vectors, epsilon), x, row, begin, q_weight, out, begin)
            for part in range(T.int64(num_k)):
                begin = T.meta_var(part * k_width + k_begin)
                normalize(Norm(k_vectors, epsilon), x, row, begin, k_weight, out, begin)
            if v == "as_is":
                copy_columns(v_vectors, x, (row,), v_begin, out, (row,), v_begin)
            else:
                for part in range(T.int64(num_k)):
                    first = T.meta_var(part * k_width)
                    k_norm = Norm(k_vectors, epsilon)
                    normalize(k_norm, x, row, first + v_source, None, out, first + v_begin)

    return qk_norm
