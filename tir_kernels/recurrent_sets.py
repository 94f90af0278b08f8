# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrent layers, causal convolutions and index lanes, by name."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from .conv_spec import ConvSpec
from .cpu.recurrent.conv import causal_conv
from .cpu.recurrent.scan import recurrent_scan
from .cpu.sparse.index import index_top_k
from .cpu.sparse.index_blocks import index_top_blocks
from .cuda.recurrent.conv import causal_conv as cuda_causal_conv
from .cuda.recurrent.scan import recurrent_scan as cuda_recurrent_scan
from .index_spec import IndexSpec
from .moves.append import transpose_append_mla
from .moves.copy import compact_copy, copy_pages, copy_single_page, debug_get_kv_mla
from .moves.recurrent import recurrent_append
from .recurrent_spec import RecurrentSpec
from .spec import CudaTarget, KernelSpec

_COPIES = {
    "copy_pages": copy_pages,
    "copy_single_page": copy_single_page,
    "compact_copy": compact_copy,
    "debug_get_kv_mla": debug_get_kv_mla,
}
_INDEX = {"index_top_k": index_top_k, "index_top_blocks": index_top_blocks}
_RECURRENT = {
    "recurrent_append": recurrent_append,
    "recurrent_scan": recurrent_scan,
}
_CONV = {"causal_conv": causal_conv}
_CUDA = {"recurrent_scan": cuda_recurrent_scan, "causal_conv": cuda_causal_conv}


def builders_of(
    spec: RecurrentSpec | ConvSpec | IndexSpec,
) -> dict[str, Callable[[], tirx.PrimFunc]]:
    """Return the functions that build the kernels of a spec, by the kernels' names."""
    copies = _bound(_COPIES, spec.rows)
    if isinstance(spec, IndexSpec):
        if isinstance(spec.target, CudaTarget):
            raise ValueError("index lanes have kernels for CPUs only")
        append = _bound({"transpose_append_mla": transpose_append_mla}, spec.rows)
        return append | _bound(_INDEX, spec) | copies
    if isinstance(spec, ConvSpec):
        append = _bound({"row_append": transpose_append_mla}, spec.rows)
        return append | _bound(_for_target(_CONV, spec), spec) | copies
    return _bound(_for_target(_RECURRENT, spec), spec) | copies


def recurrent_kernels(spec: RecurrentSpec) -> dict[str, tirx.PrimFunc]:
    """Build the kernels of recurrent layers.

    Returns
    -------
    dict
        ``recurrent_append`` and ``recurrent_scan``; and
        ``copy_pages``, ``copy_single_page``, ``compact_copy`` and ``debug_get_kv_mla`` for pages of
        ingredients, whose rows are those of `RecurrentSpec.rows`.
    """
    return {name: build() for name, build in builders_of(spec).items()}


def conv_kernels(spec: ConvSpec) -> dict[str, tirx.PrimFunc]:
    """Build the kernels of causal convolutions.

    Returns
    -------
    dict
        ``row_append``, which is `transpose_append_mla` for pages, rows and slots; ``causal_conv``;
        and the copies of `recurrent_kernels` for pages of rows.
    """
    return {name: build() for name, build in builders_of(spec).items()}


def _for_target(builders: dict[str, Callable], spec: RecurrentSpec | ConvSpec) -> dict:
    on_gpu = isinstance(spec.target, CudaTarget)
    return {name: _CUDA.get(name, build) if on_gpu else build for name, build in builders.items()}


def _bound(
    builders: dict[str, Callable], spec: RecurrentSpec | ConvSpec | IndexSpec | KernelSpec
) -> dict:
    return {name: lambda build=build: build(spec) for name, build in builders.items()}
