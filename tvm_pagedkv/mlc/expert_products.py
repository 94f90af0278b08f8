# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrices of their experts, for mlc-llm on CPUs.

A task takes some output features of an expert. It multiplies a few rows together, so that the
weights of an expert are read once for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import DataType
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

LANES = 16
ROWS = 4  # that are multiplied together
FEATURES = 32  # of a task
ATTRIBUTES = {"op_pattern": 8, "tirx.noalias": True, "tirx.is_scheduled": 1}


@dataclass(frozen=True)
class Weights:
    """The matrices of the experts of a layer, as mlc-llm keeps them.

    Parameters
    ----------
    shape : (int, int, int)
        Experts, output features, input features.
    dtype : str
        Of rows, and of weights or their scales.
    bits : int, optional
        Of a code; None: weights are numbers.
    storage_dtype : str
        Of the words that hold several codes.
    group_size : int
        Codes that share a scale.
    """

    shape: tuple[int, int, int]
    dtype: str
    bits: int | None = None
    storage_dtype: str = "uint32"
    group_size: int = 32

    @staticmethod
    def of_numbers(w: Tensor) -> Weights:
        """Numbers in a tensor."""
        num_experts, num_outputs, num_inputs = map(int, w.shape)
        return Weights((num_experts, num_outputs, num_inputs), w.dtype)

    @staticmethod
    def of_codes(x: Tensor, w: Tensor, quantize_dtype: str, group_size: int) -> Weights:
        """Codes in a tensor of words."""
        num_experts, num_outputs, _ = w.shape
        shape = (int(num_experts), int(num_outputs), int(x.shape[1]))
        bits = DataType(quantize_dtype).bits
        return Weights(shape, x.dtype, bits, w.dtype, group_size)

    @property
    def codes_per_word(self) -> int:
        """Codes in a word."""
        return DataType(self.storage_dtype).bits // self.bits if self.bits else 1

    @property
    def num_groups(self) -> int:
        """Groups of a row of a matrix."""
        return -(-self.shape[2] // self.group_size)

    @property
    def num_words(self) -> int:
        """Words, or numbers, of a row of a matrix."""
        if self.bits is None:
            return self.shape[2]
        return self.group_size // self.codes_per_word * self.num_groups

    def value(self, w, scale, expert, feature, column):
        """The weight of an input feature: float32."""
        if self.bits is None:
            return T.cast(w[expert, feature, column], "float32")
        word, largest = w[expert, feature, column // self.codes_per_word], 2 ** (self.bits - 1) - 1
        shift = T.cast(column % self.codes_per_word * self.bits, self.storage_dtype)
        mask = tvm.tirx.const(2**self.bits - 1, self.storage_dtype)
        code = T.cast(T.bitwise_and(T.shift_right(word, shift), mask), "float32")
        own_scale = T.cast(scale[expert, feature, column // self.group_size], "float32")
        return (code - T.float32(largest)) * own_scale


def of_chosen(weights: Weights, k: int, has_one_row: bool) -> tvm.tirx.PrimFunc:
    """Make the kernel for one token: its `k` experts times one row, or each times its own.

    Arguments: rows ``[1 or k, inputs]``, weights, their scales if they are codes, the experts int32
    ``[1, k]``, and the results ``[k, outputs]``.
    """
    num_experts, num_outputs, num_inputs = weights.shape
    num_rows, lanes = 1 if has_one_row else k, math.gcd(num_inputs, LANES)

    def multiply(x, w, scale, experts, o):
        with T.parallel(k * num_outputs) as task, T.sblock("feature"):
            row = T.axis.spatial(k, task // num_outputs)
            feature = T.axis.spatial(num_outputs, task % num_outputs)
            sums = T.sblock_alloc_buffer((lanes,), "float32")
            _clear(sums, 1, lanes)
            expert, own = experts[0, row], 0 if has_one_row else row
            with T.serial(num_inputs // lanes) as i, T.vectorized(lanes) as c:
                weight = weights.value(w, scale, expert, feature, i * lanes + c)
                value = T.cast(x[own, i * lanes + c], "float32")
                T.buffer_store(sums, sums[c] + weight * value, [c])
            T.buffer_store(o, T.cast(_total(sums, 0, lanes), weights.dtype), [row, feature])

    return _kernel(weights, multiply, num_rows, (1, k), k)


def of_groups(weights: Weights, indptr_dtype: str) -> tvm.tirx.PrimFunc:
    """Make the kernel for rows in the order of their experts.

    Arguments: rows ``[n, inputs]``, weights, their scales if they are codes, where the rows of each
    expert begin ``[experts + 1]``, and the results ``[n, outputs]``.
    """
    num_experts, num_outputs, num_inputs = weights.shape
    lanes, features = math.gcd(num_inputs, LANES), math.gcd(num_outputs, FEATURES)
    tasks = num_outputs // features

    def multiply(x, w, scale, indptr, o):
        with T.parallel(num_experts * tasks) as task, T.sblock("features"):
            expert = T.axis.spatial(num_experts, task // tasks)
            part = T.axis.spatial(tasks, task % tasks)
            T.reads(*(_whole(each) for each in (x, w, scale, indptr) if each is not None))
            T.writes(_whole(o))
            sums = T.sblock_alloc_buffer((ROWS * lanes,), "float32")
            begin, end = T.bind(indptr[expert]), T.bind(indptr[expert + 1])
            with T.serial((end - begin + ROWS - 1) // ROWS) as block, T.serial(features) as f:
                feature = part * features + f
                _clear(sums, ROWS, lanes)
                with T.serial(num_inputs // lanes) as i:
                    for row in range(ROWS):
                        own = T.min(begin + block * ROWS + row, end - 1)
                        with T.vectorized(lanes) as c:
                            weight = weights.value(w, scale, expert, feature, i * lanes + c)
                            value = T.cast(x[own, i * lanes + c], "float32")
                            at = row * lanes + c
                            T.buffer_store(sums, sums[at] + weight * value, [at])
                for row in range(ROWS):
                    own = begin + block * ROWS + row
                    with T.If(own < end), T.Then():
                        total = _total(sums, row * lanes, lanes)
                        T.buffer_store(o, T.cast(total, weights.dtype), [own, feature])

    return _kernel(weights, multiply, None, (num_experts + 1,), None, indptr_dtype)


def _kernel(
    weights: Weights,
    multiply: Callable,
    num_rows: int | None,
    index_shape: tuple[int, ...],
    num_results: int | None,
    index_dtype: str = "int32",
) -> tvm.tirx.PrimFunc:
    """Make a kernel of `multiply`, with scales among its arguments or without.

    A call decides numbers of rows that are None.
    """
    num_experts, num_outputs, num_inputs = weights.shape
    words = num_experts, num_outputs, weights.num_words
    groups = num_experts, num_outputs, weights.num_groups
    dtype, stored = weights.dtype, weights.storage_dtype

    if weights.bits is None:

        @T.prim_func(private=True, s_tir=True)
        def products(
            x_handle: T.handle, w_handle: T.handle, index_handle: T.handle, o_handle: T.handle
        ):
            T.func_attr(ATTRIBUTES)
            n = T.int64()
            x = T.match_buffer(x_handle, (_extent(num_rows, n), num_inputs), dtype)
            w = T.match_buffer(w_handle, words, dtype)
            index = T.match_buffer(index_handle, index_shape, index_dtype)
            o = T.match_buffer(o_handle, (_extent(num_results, n), num_outputs), dtype)
            multiply(x, w, None, index, o)

        return products

    @T.prim_func(private=True, s_tir=True)
    def products_of_codes(
        x_handle: T.handle, w_handle: T.handle, scale_handle: T.handle, index_handle: T.handle,
        o_handle: T.handle,
    ):  # fmt: skip
        T.func_attr(ATTRIBUTES)
        n = T.int64()
        x = T.match_buffer(x_handle, (_extent(num_rows, n), num_inputs), dtype)
        w = T.match_buffer(w_handle, words, stored)
        scale = T.match_buffer(scale_handle, groups, dtype)
        index = T.match_buffer(index_handle, index_shape, index_dtype)
        o = T.match_buffer(o_handle, (_extent(num_results, n), num_outputs), dtype)
        multiply(x, w, scale, index, o)

    return products_of_codes


def _extent(known: int | None, size):
    return size if known is None else known


def _whole(buffer):
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def _clear(sums, rows: int, lanes: int) -> None:
    with T.serial(rows * lanes) as i:
        T.buffer_store(sums, T.float32(0), [i])


def _total(sums, first: int, lanes: int):
    total = sums[first]
    for c in range(1, lanes):
        total = total + sums[first + c]
    return total


# --- in place of mlc-llm's functions ------------------------------------------------------------


def gemv(x: Tensor, w: Tensor, indptr: Tensor) -> Tensor:
    """Multiply a token with its experts; see `of_chosen`."""
    weights = Weights.of_numbers(w)
    return _of_chosen(weights, x, [w], indptr)


def dequantize_gemv(
    x: Tensor, w: Tensor, scale: Tensor, indptr: Tensor, quantize_dtype: str, group_size: int
) -> Tensor:
    """Multiply a token with its experts, whose weights are codes; see `of_chosen`."""
    return _of_chosen(Weights.of_codes(x, w, quantize_dtype, group_size), x, [w, scale], indptr)


def group_gemm(x: Tensor, w: Tensor, indptr: Tensor) -> Tensor:
    """Multiply rows with their experts; see `of_groups`."""
    weights = Weights.of_numbers(w)
    return _of_groups(weights, x, [w], indptr)


def dequantize_group_gemm(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    indptr: Tensor,
    quantize_dtype: str,
    indptr_dtype: str,
    group_size: int,
) -> Tensor:
    """Multiply rows with their experts, whose weights are codes; see `of_groups`."""
    if indptr_dtype == "int64":  # which ends each expert, and leaves the first 0 out
        indptr = op.pad(indptr, [1, 0], "constant", 0)
    return _of_groups(Weights.of_codes(x, w, quantize_dtype, group_size), x, [w, scale], indptr)


def _of_chosen(weights: Weights, x: Tensor, tensors: list[Tensor], experts: Tensor) -> Tensor:
    k = int(experts.shape[1])
    out = Tensor.placeholder([k, weights.shape[1]], weights.dtype)
    kernel = of_chosen(weights, k, has_one_row=int(x.shape[0]) == 1)
    return op.tensor_ir_op(kernel, "experts_of_a_token", args=[x, *tensors, experts], out=out)


def _of_groups(weights: Weights, x: Tensor, tensors: list[Tensor], indptr: Tensor) -> Tensor:
    out = Tensor.placeholder([x.shape[0], weights.shape[1]], weights.dtype)
    kernel = of_groups(weights, indptr.dtype)
    return op.tensor_ir_op(kernel, "experts_of_rows", args=[x, *tensors, indptr], out=out)


MATMUL: dict[str, Callable] = {
    "gemv": gemv,
    "group_gemm": group_gemm,
    "dequantize_gemv": dequantize_gemv,
    "dequantize_group_gemm": dequantize_group_gemm,
}
