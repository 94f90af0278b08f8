# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence: over pages and ragged arrays, with trees, and MLA.

The algorithm is that of `query_tiles`, and `signatures.inputs` describes the arguments. Kernels
without some of them are the same source.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...script import prim_func
from ...semantics.rope import require_own_rotation
from ...semantics.visibility import CausalMask, mask_of, sequences_of
from ...signatures.attention import (
    MLA_PREFILL,
    MLA_PREFILL_SLIDING,
    MLA_TREE,
    MLA_TREE_SLIDING,
    PREFILL,
    PREFILL_RAGGED,
    PREFILL_RAGGED_SLIDING,
    PREFILL_SLIDING,
    PREFILL_SPANS,
    PREFILL_SPANS_SLIDING,
    PREFILL_WINDOWED,
    TREE,
    TREE_PAGED,
    TREE_PAGED_SLIDING,
    TREE_SLIDING,
)
from ...signatures.inputs import AttentionInputs, PagedInputs, RaggedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..registers import as_count, index_temp
from ..tiles.kv_rows import RaggedRows, paged_rows, with_page_views
from ..tiles.tiling import MAX_ROWS, MOST_ROWS, Tiling
from ..work.tile_work import BalancedWork, FixedWork
from ..work.work_items import Items
from .query_tiles import Batch, attend_with_one

TREE_ROWS = 64  # of a block: trees have few nodes, and their masks take registers


def visible_columns(a: AttentionInputs) -> CausalMask:
    """Return the mask of rows; among the nodes of trees, the trees know more."""
    if a.mask is not None:
        return a.mask
    if a.tree_order is not None:
        return CausalMask(T.int32(1))
    return mask_of(a)


def batch_of_pages(spec: KernelSpec, a: PagedInputs) -> Batch:
    """Return what the rows of a kernel over pages attend to."""
    if a.rotary_mode is not None:
        require_own_rotation(spec, a)
    sequences = sequences_of(spec, a, index_temp)

    def kv_len_of(sequence):
        num_pages = a.page_indptr[sequence + 1] - a.page_indptr[sequence]
        return sequences.kv_len(sequence, index_temp(num_pages))

    items = Items(
        count=a.batch_size, row_indptr=a.query_indptr, kv_indptr=a.page_indptr, kv_len_of=kv_len_of
    )

    def make_work(tiling: Tiling) -> FixedWork | BalancedWork:
        if spec.is_latent and a.window is None and a.tree_order is None:
            return BalancedWork(spec, tiling, a, items, is_continued=False)
        return FixedWork(spec, tiling, a, items, as_count(a.page_ids.shape[0]) * spec.page_size)

    return Batch(
        items=items,
        num_items=a.batch_size,
        num_rows=a.q.shape[0],
        make_work=make_work,
        make_rows=lambda count: paged_rows(spec, a.pages, a.page_ids, count),
        visible=visible_columns(a),
        sequences=sequences,
    )


def over_pages(
    spec: KernelSpec, signature: Signature, max_rows: int = MAX_ROWS, mask: type | None = None
):
    """Build a kernel whose K and V lie in pages; a `mask` is made of the argument `causal`."""
    tilings = Tiling.choices(spec, spec.kv_dtype, max_rows)

    @prim_func(arguments=signature.of(spec))
    def prefill(matched: PagedInputs):
        T.func_attr(attributes(spec))
        a = T.meta_var(matched if mask is None else replace(matched, mask=mask(matched.causal)))
        views = T.meta_var(with_page_views(spec, a))
        attend_with_one(tilings, spec, views, batch_of_pages(spec, views))

    return prefill


def batch_of_ragged(spec: KernelSpec, a: RaggedInputs) -> Batch:
    """Return what the rows of a kernel over ragged arrays attend to."""
    require_own_rotation(spec, a)

    def kv_len_of(sequence):
        return a.kv_indptr[sequence + 1] - a.kv_indptr[sequence]

    items = Items(
        count=a.batch_size, row_indptr=a.query_indptr, kv_indptr=a.kv_indptr, kv_len_of=kv_len_of
    )
    return Batch(
        items=items,
        num_items=a.batch_size,
        num_rows=a.q.shape[0],
        make_work=lambda tiling: FixedWork(spec, tiling, a, items, a.k.shape[0]),
        make_rows=lambda count: RaggedRows(spec, a.k, a.v),
        visible=visible_columns(a),
    )


def over_ragged(spec: KernelSpec, signature: Signature, max_rows: int = MAX_ROWS):
    """Build a kernel whose K and V are ragged arrays."""
    tilings = Tiling.choices(spec, spec.dtype, max_rows)

    @prim_func(arguments=signature.of(spec))
    def prefill_ragged(a: RaggedInputs):
        T.func_attr(attributes(spec))
        attend_with_one(tilings, spec, a, batch_of_ragged(spec, a))

    return prefill_ragged


def prefill(spec: KernelSpec, signature: Signature = PREFILL, mask: type = CausalMask):
    """Attention of several query rows per sequence over its pages.

    `mask` is a class of masks, made of the argument `causal`.
    """
    return over_pages(spec, signature, MOST_ROWS, mask)


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``lengths [3, B]``, as the stock cache passes it for windows."""
    return prefill(spec, PREFILL_WINDOWED)


def prefill_sliding(spec: KernelSpec):
    """`prefill` of layers with a window: a row sees its position and the `window` - 1 before it.

    With a negative `window` it sees its chunk of ``-window`` positions, up to its own. The rows of
    a sequence are the last positions of its pages, or follow them where `causal` is 0.
    """
    return over_pages(spec, PREFILL_SLIDING)


def prefill_spans(spec: KernelSpec):
    """Build `prefill` of steps with spans that are attended to in both directions: `row_reach`."""
    return over_pages(spec, PREFILL_SPANS, MOST_ROWS)


def prefill_spans_sliding(spec: KernelSpec):
    """Build `prefill_spans` of layers with a window, as in `prefill_sliding`."""
    return over_pages(spec, PREFILL_SPANS_SLIDING)


def prefill_ragged(spec: KernelSpec):
    """Attention of several query rows per sequence over ragged K and V."""
    return over_ragged(spec, PREFILL_RAGGED)


def prefill_ragged_sliding(spec: KernelSpec):
    """`prefill_ragged` of layers with a window, as in `prefill_sliding`."""
    return over_ragged(spec, PREFILL_RAGGED_SLIDING)


def tree_paged(spec: KernelSpec):
    """Attention of new tree nodes over pages that hold this step's K and V already.

    The rows of a sequence are the last nodes of its uncommitted tree, and the tree's n nodes, of
    this and earlier steps, are its last n columns. A row sees all columns before the tree, its
    ancestors and itself. A sequence with n = 0 is plain causal, as is one whose nodes form a chain.
    Nodes follow their parents; trees may have any size. A call in which a sequence has fewer nodes
    than rows, but some, is refused on CPUs; on GPUs its results are meaningless.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; query_positions should say the same of the rows.
    """
    return over_pages(spec, TREE_PAGED, TREE_ROWS)


def tree_paged_sliding(spec: KernelSpec):
    """`tree_paged` of layers with a window.

    A row sees of these columns those whose position is less than `window` before its own, itself
    included, or, with a negative `window`, those of its chunk of ``-window`` positions. Positions
    are those of RoPE, whatever the rotary_mode: query_positions of the rows; first_positions plus
    the column before the tree; and of a node its depth more than there are columns before the tree.
    """
    return over_pages(spec, TREE_PAGED_SLIDING, TREE_ROWS)


def tree(spec: KernelSpec):
    """Attention among tree nodes whose K and V are ragged arrays.

    As `tree_paged`, with all columns of a sequence in k and v; usually these are the step's own
    rows. They may be fewer than the tree has nodes: then they are the last ones, and a row sees its
    ancestors among them. K of a column is rotated by the position that query_positions gives the
    first row, plus the difference of their depths.
    """
    return over_ragged(spec, TREE, TREE_ROWS)


def tree_sliding(spec: KernelSpec):
    """`tree` of layers with a window, as in `tree_paged_sliding`."""
    return over_ragged(spec, TREE_SLIDING, TREE_ROWS)


def mla_prefill(spec: KernelSpec, mask: type = CausalMask):
    """Absorbed attention of any number of rows per sequence over the latent rows in its pages.

    A latent row is K, and its first columns are V, so a tile of it is copied once and multiplied
    twice. All query heads are rows of a tile. `mask` is a class of masks, made of `causal`.
    """
    return over_pages(spec, MLA_PREFILL, mask=mask)


def mla_prefill_sliding(spec: KernelSpec):
    """`mla_prefill` of layers with a window; rows see what they see in `prefill_sliding`."""
    return over_pages(spec, MLA_PREFILL_SLIDING)


def mla_tree(spec: KernelSpec):
    """Absorbed attention of new tree nodes; rows see what they see in `tree_paged`."""
    return over_pages(spec, MLA_TREE, TREE_ROWS)


def mla_tree_sliding(spec: KernelSpec):
    """`mla_tree` of layers with a window; rows see what they see in `tree_paged_sliding`."""
    return over_pages(spec, MLA_TREE_SLIDING, TREE_ROWS)
