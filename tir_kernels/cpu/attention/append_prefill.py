# SPDX-License-Identifier: Apache-2.0
"""`rope_append` and `prefill` in one kernel, for a step of long prompts.

In two kernels, rotated rows of Q are written to memory and read again, which is most of what an
append moves. Here the append writes K and V only, and keeps the cosines and sines of each row in a
table. Attention reads Q from the fused rows and rotates it as it packs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE, slot_offset, slot_page
from ...script import inline
from ...semantics.rope import has_rope
from ...semantics.visibility import CausalMask
from ...signatures.attention import APPEND_PREFILL
from ...signatures.inputs import FusedInputs
from ...spec import KernelSpec
from ..isa import simd
from ..isa.cos_sin import turn
from ..isa.simd import F32, load, rounded, store, temp
from ..rotation import NoRotation
from ..worker import CosSin, RowCopy, RowRotation, Worker
from .prefill import paged


class RotationTable(NoRotation):
    """The cosines and sines of the rows of a step, and the rotation of Q by them.

    K in the pages is rotated already.

    Parameters
    ----------
    spec : KernelSpec
    a : FusedInputs
    """

    def __init__(self, spec: KernelSpec, a: FusedInputs):
        self.spec, self.is_rotated = spec, a.apply_rope > 0
        self.width, self.lanes = spec.qk_head_dim, spec.target.lanes
        self.fits = has_rope(spec)
        self.rotates_q = self.is_rotated if self.fits else False
        self.half = spec.rope.rotary_dim // 2
        if self.fits:
            num_rows = T.cast(a.q.shape[0], "int64")
            self.values = T.alloc_buffer((num_rows, 2, self.half), F32)

    def keep(self, row, cos_sin: CosSin) -> None:
        """Copy the cosines and sines of a row."""
        for i, buffer in enumerate((cos_sin.cos, cos_sin.sin)):
            for start, lanes in cos_sin.chunks:
                store(self.values, (row, i, start), lanes, load(buffer, (0, start), lanes))

    def begin_task(self) -> None:
        """Make the row of a task that `rotate` fills."""
        if self.fits:
            self.row = T.alloc_buffer((-(-self.width // 32) * 32,), F32)

    def begin_row(self, token, position) -> None:
        """Take the angles of a row of Q: those of a token of the step."""
        self.token = token

    def rotate(self, source: Callable) -> None:
        """Rotate a row of Q, ``source(column, lanes) -> vector``, into `row`."""
        for start, lanes in simd.chunks(self.half, self.lanes):
            x, y = (temp(source(at, lanes), lanes) for at in (start, start + self.half))
            cos, sin = (
                temp(load(self.values, (self.token, i, start), lanes), lanes) for i in (0, 1)
            )
            for at, value in zip(
                (start, start + self.half), turn(x, y, cos, sin, lanes), strict=True
            ):
                store(self.row, (at,), lanes, self._rounded(value, lanes))
        rotated = 2 * self.half
        for start, lanes in simd.chunks(self.width - rotated, self.lanes):
            store(self.row, (rotated + start,), lanes, source(rotated + start, lanes))

    def _rounded(self, value, lanes: int):
        """Return numbers as the workspace of rotated rows keeps them.

        Which kernels a step runs depends on all its sequences, and their results must not differ.
        """
        return rounded(temp(value, lanes), lanes, self.spec.dtype)


@inline
def _append(spec, a, table):
    """Write K and V of the rows that have a slot, and the angles of all rows to the table."""
    num_heads, first_k = T.meta_var((spec.num_kv_heads, spec.num_qo_heads))
    worker = Worker(spec, (a.q, a.pages))
    k_rows, v_rows = RowRotation(worker, a.q, a.pages), RowCopy(worker, a.q, a.pages)
    for row in worker.items(a.q.shape[0], 2 * num_heads * spec.qk_head_dim * 8):
        cos_sin = CosSin(worker)
        if table.fits:
            if table.is_rotated:
                cos_sin.angles.fill(a.rope_positions[row])
                table.keep(row, cos_sin.angles)
                cos_sin.angles.reorder(worker.numbers)
        slot = a.slots[row]
        if slot >= 0:
            page, offset = slot_page(slot, spec.page_size), slot_offset(slot, spec.page_size)
            for h in k_rows.rows(num_heads):
                is_rotated = T.meta_var(table.fits and table.is_rotated)
                k_rows.write(cos_sin, is_rotated, (row, first_k + h), (page, K_PLANE, h, offset))
            for h in v_rows.rows(num_heads):
                v_rows.copy((row, first_k + num_heads + h), (page, V_PLANE, h, offset))


def is_possible(spec: KernelSpec) -> bool:
    """Whether layers of a spec can use the kernel.

    With longrope a sequence's length decides the angles of its rows.
    """
    has_rows = not spec.codec and not spec.has_two_widths
    return spec.kind == "mha" and has_rows and spec.rope.kind != "longrope"


def append_prefill(spec: KernelSpec):
    """Build the kernel: `rope_append` of fused rows, then `prefill` of their Q, which is causal."""
    if not is_possible(spec):
        raise ValueError(
            "append_prefill needs layers without a window, pages that are not quantized, K and V "
            f"of one width, and a rotation other than longrope, got {spec}; use rope_append and "
            "prefill"
        )

    def append(a: FusedInputs) -> FusedInputs:
        a = replace(a, q=a.qkv)  # whose first heads are those of Q
        table = RotationTable(spec, a)
        _append(spec, a, table)
        return replace(a, mask=CausalMask(1), rope=table)

    return paged(spec, APPEND_PREFILL, has_singles=False, prepare=append)
