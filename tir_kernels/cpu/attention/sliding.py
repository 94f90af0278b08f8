# SPDX-License-Identifier: Apache-2.0
"""Attention of layers with a window: decode and prefill with one more argument and another mask.

The page table of a sequence may begin anywhere in it, for the runtime keeps only what the window
needs: columns are counted from the first slot of the table, which is position
``k_rope_pos_offset[b]`` of the sequence. One kernel serves all windows.
"""

from __future__ import annotations

from ...semantics.visibility import WindowMask
from ...signatures import DECODE, PREFILL, PREFILL_RAGGED, with_lengths
from ...spec import KernelSpec
from .decode.kernel import emit_decode
from .define import attention_kernel
from .prefill.kernel import emit_paged, emit_ragged


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`: a row sees the last `window` positions of its pages.

    Its arguments are those of `decode`, then window: int32, at least 0. What it costs follows the
    window, but an even share for every thread needs a page table with little before the window.
    """

    def emit(a):
        a.mask = WindowMask(1, a.window)
        emit_decode(spec, a)

    return attention_kernel(spec, (*with_lengths(DECODE, "length_info"), "window"), emit)


def prefill_sliding(spec: KernelSpec):
    """Build the kernel `prefill_sliding`: a row sees its position and the `window` - 1 before it.

    Its arguments are those of `prefill`, then window: int32, at least 1. The rows of a sequence are
    the last positions of its pages, or follow them where causal is 0.
    """

    def emit(a):
        a.mask = WindowMask(a.causal, a.window)
        emit_paged(spec, a)

    return attention_kernel(spec, (*with_lengths(PREFILL, "length_info"), "window"), emit)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build the kernel `prefill_ragged_sliding`: `prefill_sliding` over ragged K and V.

    Its arguments are those of `prefill_ragged`, then window: int32, at least 1.
    """

    def emit(a):
        a.mask = WindowMask(a.causal, a.window)
        emit_ragged(spec, a)

    return attention_kernel(spec, (*PREFILL_RAGGED, "window"), emit)
