# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The heads of a group are the rows of a tile: one or few warps for each sequence and KV head. Long
sequences are not cut, so it takes many of them to keep a GPU busy.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..cpu.arguments import with_lengths
from ..cpu.decode import DECODE
from ..masks import CausalMask, WindowMask
from ..spec import KernelSpec
from .prefill import build


def decode(spec: KernelSpec):
    """Build the kernel `decode`; its arguments are those of the CPU's."""
    return _build(spec, DECODE)


def decode_windowed(spec: KernelSpec):
    """Build the kernel `decode_windowed`; its arguments are those of the CPU's."""
    return _build(spec, with_lengths(DECODE, "window_matrix"))


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`; its arguments are those of the CPU's."""
    names = (*with_lengths(DECODE, "length_info"), "window")
    return _build(spec, names, lambda a: WindowMask(T.int32(1), a.window))


def _build(spec: KernelSpec, names, mask_of=lambda a: CausalMask(T.int32(1))):
    return build(spec, names, mask_of, most_rows=spec.group_size)
