# SPDX-License-Identifier: Apache-2.0
"""Attention of layers with a window: decode and prefill with one more argument and another mask.

The page table of a sequence may begin anywhere in it: the runtime keeps only what the window
needs: columns are counted from the first slot of the table, which is position
``k_rope_pos_offset[b]`` of the sequence. One kernel serves all windows.
"""

from __future__ import annotations

from dataclasses import replace

from ...semantics.visibility import WindowMask
from ...signatures import decode
from ...signatures.inputs import PagedInputs
from ...spec import KernelSpec
from .decode.kernel import emit_decode
from .define import build


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`; see `signatures.decode.decode_sliding`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=WindowMask(1, a.window)))

    return build(spec, decode.decode_sliding, attend)
