# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays.

The kernels differ in their arguments and in what a row sees; `query_tiles` has the algorithm, and
`signatures.inputs` the arguments.
"""

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import arrays_of, view_pages
from ...script import prim_func
from ...semantics.visibility import CausalMask, mask_of, sequences_of
from ...signatures.attention import (
    PREFILL,
    PREFILL_RAGGED,
    PREFILL_RAGGED_SLIDING,
    PREFILL_SLIDING,
    PREFILL_SPANS,
    PREFILL_SPANS_SLIDING,
    PREFILL_WINDOWED,
)
from ...signatures.inputs import AttentionInputs, Elements, PagedInputs, RaggedInputs
from ...signatures.signature import Signature
from ...spec import KernelSpec
from ..isa.simd import index_temp, require_half_conversion
from ..rotation import rotation_of
from ..rows.products import single_row_operands
from ..tiles.kv_operands import operands
from ..tiles.tree_mask import TokenTrees
from .query_tiles import attend


def described(
    spec: KernelSpec, a: AttentionInputs, prepare: Callable = lambda a: a
) -> AttentionInputs:
    """The inputs with sequences, rotation, and mask or trees, after what `prepare` emits."""
    if isinstance(a, PagedInputs):
        a = prepare(replace(a, pages=view_pages(a.pages, spec)))
    a = replace(a, sequences=sequences_of(spec, a, index_temp), rope=a.rope or rotation_of(spec, a))
    if a.tree_order is not None:
        trees = TokenTrees(spec, a)
        if isinstance(a, RaggedInputs):
            a = replace(a, first_positions=Elements(trees.first_position))
        return replace(a, tree=trees)
    if a.mask is not None:
        return a
    return replace(a, mask=mask_of(a))


def paged(
    spec: KernelSpec,
    signature: Signature,
    *,
    has_singles: bool = True,
    prepare: Callable[[PagedInputs], PagedInputs] = lambda a: a,
):
    """Build a kernel over pages.

    Parameters
    ----------
    spec : KernelSpec
    signature : Signature
    has_singles : bool
        Whether sequences of one row are attended to as in decode.
    prepare : callable
        Emits what comes before, and returns the inputs as `described` takes them.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    ops = operands(spec, spec.kv_dtype)
    single_ops = single_row_operands(spec, ops) if has_singles else None

    @prim_func(arguments=signature.of(spec))
    def prefill(a: PagedInputs):
        T.func_attr(attributes(spec))
        ready = T.meta_var(described(spec, a, prepare))
        num_positions = T.meta_var(
            T.cast(ready.page_indptr[a.batch_size], "int64") * spec.page_size
        )
        arrays = T.meta_var((ready.q, *arrays_of(ready.pages)))
        ops.begin(arrays)
        if single_ops is not None and single_ops is not ops:
            single_ops.begin(arrays)
        attend(spec, ready, ops, num_positions, single_ops)

    return prefill


def ragged(spec: KernelSpec, signature: Signature):
    """Build a kernel over ragged K and V."""
    require_half_conversion(spec, spec.dtype)
    ops = operands(spec, spec.dtype)

    @prim_func(arguments=signature.of(spec))
    def prefill_ragged(a: RaggedInputs):
        T.func_attr(attributes(spec))
        ready = T.meta_var(described(spec, a))
        num_positions = T.meta_var(T.cast(ready.kv_indptr[ready.batch_size], "int64"))
        ops.begin((ready.q, ready.k, ready.v))
        attend(spec, ready, ops, num_positions)

    return prefill_ragged


def prefill(spec: KernelSpec, signature: Signature = PREFILL, mask: type = CausalMask):
    """Build `prefill`: causal, or not, for sequences that may have dropped positions.

    `mask` is a class of masks, made of the argument `causal`.
    """
    return paged(
        spec,
        signature,
        has_singles=mask.sees is None,
        prepare=lambda a: replace(a, mask=mask(a.causal)),
    )


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``lengths [3, B]``, as the stock cache passes it for windows.

    A sequence holds the slots before the third and from the second number on, as
    `visibility.GappedSequence` describes. All rows of a step see what the first one does.
    """
    return prefill(spec, PREFILL_WINDOWED)


def prefill_sliding(spec: KernelSpec):
    """Build `prefill` of layers with a window: a row sees the last `window` positions.

    Its own position is one of them; with a negative `window` a row sees its chunk of ``-window``
    positions, up to its own. The rows of a sequence are the last
    positions of its pages, or follow them where `causal` is 0. The page table of a sequence may
    begin anywhere in it: columns are counted from the first slot of the table, which is position
    ``first_positions[b]`` of the sequence.
    """
    return paged(spec, PREFILL_SLIDING)


def prefill_spans(spec: KernelSpec):
    """Build `prefill` of steps with spans that are attended to in both directions: `row_reach`."""
    return paged(spec, PREFILL_SPANS)


def prefill_spans_sliding(spec: KernelSpec):
    """Build `prefill_spans` of layers with a window, as in `prefill_sliding`."""
    return paged(spec, PREFILL_SPANS_SLIDING)


def prefill_ragged(spec: KernelSpec):
    """Build `prefill` over ragged K and V."""
    return ragged(spec, PREFILL_RAGGED)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build `prefill_ragged` of layers with a window, as in `prefill_sliding`."""
    return ragged(spec, PREFILL_RAGGED_SLIDING)
