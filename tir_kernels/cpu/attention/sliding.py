# SPDX-License-Identifier: Apache-2.0
"""Attention of layers with a window: decode and prefill with one more argument and another mask.

The page table of a sequence may begin anywhere in it: the runtime keeps only what the window
needs: columns are counted from the first slot of the table, which is position
``k_rope_pos_offset[b]`` of the sequence. One kernel serves all windows.
"""

from __future__ import annotations

from dataclasses import replace

from ...semantics.visibility import WindowMask
from ...signatures import decode, prefill
from ...signatures.inputs import PagedInputs, RaggedInputs
from ...spec import KernelSpec
from .decode.kernel import emit_decode
from .define import build
from .prefill.kernel import emit_paged, emit_ragged


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`; see `signatures.decode.decode_sliding`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=WindowMask(1, a.window)))

    return build(spec, decode.decode_sliding, attend)


def prefill_sliding(spec: KernelSpec):
    """Build the kernel `prefill_sliding`; see `signatures.prefill.prefill_sliding`."""

    def attend(a: PagedInputs) -> None:
        emit_paged(spec, replace(a, mask=WindowMask(a.causal, a.window)))

    return build(spec, prefill.prefill_sliding, attend)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build the kernel `prefill_ragged_sliding`; see `signatures.prefill`."""

    def attend(a: RaggedInputs) -> None:
        emit_ragged(spec, replace(a, mask=WindowMask(a.causal, a.window)))

    return build(spec, prefill.prefill_ragged_sliding, attend, has_pages=False)
