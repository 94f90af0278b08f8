# SPDX-License-Identifier: Apache-2.0
"""Products with the matrices of experts."""


def gemv(x, w, indptr):
    return "for GPUs"


def group_gemm(x, w, indptr):
    return "for GPUs"


def dequantize_gemv(x, w, scale, indptr, quantize_dtype, group_size):
    return "for GPUs"


def dequantize_group_gemm(x, w, scale, indptr, quantize_dtype, indptr_dtype, group_size):
    return "for GPUs"
