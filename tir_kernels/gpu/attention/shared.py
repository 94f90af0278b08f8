# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

It is the algorithm of `query_tiles` with the rows of a tile taken from a list, and work that is
split evenly: a tile that falls into one split is merged into O there; one that is cut leaves
partial states, which a second kernel merges.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...script import inline, prim_func
from ...semantics.rope import refuse_longrope, require_own_rotation
from ...semantics.visibility import CausalMask
from ...signatures.attention import MLA_PREFILL_SHARED, PREFILL_SHARED
from ...signatures.inputs import SharedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..isa import isa_of
from ..tiles.kv_rows import paged_rows, with_page_views
from ..tiles.tiling import MAX_ROWS, Tiling
from ..work.tile_work import BalancedWork
from ..work.work_items import Items
from .query_tiles import Batch, attend_with_one

_COPY_THREADS = 128
_PACKED_ROWS = 64  # of a tile with codes of 4 bits: 128 would spill 32 bytes


@inline
def copy_lse(isa, lse, copy):
    """Copy the logs of all rows: where several blocks sum columns of a row, one writes its log."""
    num_heads = T.meta_var(int(lse.shape[1]))
    with isa.launch([lse.shape[0]], _COPY_THREADS) as (blocks, thread):
        for turn in T.serial(-(-num_heads // _COPY_THREADS)):
            head = turn * _COPY_THREADS + thread
            if T.And(blocks[0] < lse.shape[0], head < num_heads):
                copy[blocks[0], head] = lse[blocks[0], head]


def batch_of_segments(spec: KernelSpec, a: SharedInputs) -> Batch:
    """Return what the rows of segments attend to; all rows of a segment see all of its pages."""
    if a.rotary_mode is not None:
        require_own_rotation(spec, a)
        refuse_longrope(spec, a)
    indptr = a.page_indptr
    items = Items(
        count=a.last_segment - a.first_segment,
        row_indptr=a.row_indptr,
        kv_indptr=indptr,
        kv_len_of=lambda segment: (indptr[segment + 1] - indptr[segment]) * spec.page_size,
        offset=a.first_segment,
        row_ids=a.row_ids,
        are_all_visited=False,
    )
    return Batch(
        items=items,
        # Of all segments of the step, with which those of the call stand for the host.
        num_items=a.row_indptr.shape[0] - 1,
        num_rows=a.row_ids.shape[0],
        make_work=lambda tiling: BalancedWork(spec, tiling, a, items, is_continued=True),
        make_rows=lambda count: paged_rows(spec, a.pages, a.page_ids, count),
        visible=CausalMask(T.int32(0)),
        lse_before=a.lse,
    )


def over_shared_pages(spec: KernelSpec, signature: Signature):
    """Build a kernel for rows that share pages."""
    isa = isa_of(spec.target)
    is_packed = spec.codec is not None and spec.codec.bits == 4
    max_rows = _PACKED_ROWS if is_packed else MAX_ROWS
    tilings = Tiling.choices(spec, spec.kv_dtype, max_rows)

    @prim_func(arguments=signature.of(spec))
    def prefill_shared(matched: SharedInputs):
        T.func_attr(attributes(spec))
        a = T.meta_var(with_page_views(spec, matched))
        batch = T.meta_var(batch_of_segments(spec, a))
        if tilings[0].slices == 1:
            attend_with_one(tilings, spec, a, batch)
        else:
            with isa.workspace(a.lse.shape, "lse_before") as before:
                copy_lse(isa, a.lse, before)
                attend_with_one(tilings, spec, a, replace(batch, lse_before=before))

    return prefill_shared


def prefill_shared(spec: KernelSpec):
    """Rows of several sequences attend to pages that they share, merged into their o and lse.

    A segment is a range of whole pages with the rows that see all of them; `batch_size` counts
    segments. In one call a row may belong to one segment at most. With longrope, whose frequencies
    are those of a sequence, rotary_mode 1 is refused.
    """
    return over_shared_pages(spec, PREFILL_SHARED)


def mla_prefill_shared(spec: KernelSpec):
    """`prefill_shared` over the latent rows of MLA, which models rotate themselves."""
    return over_shared_pages(spec, MLA_PREFILL_SHARED)
