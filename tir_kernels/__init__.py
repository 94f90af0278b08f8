# SPDX-License-Identifier: Apache-2.0
"""TVMScript kernels of a paged KV cache: a spec in, a PrimFunc out.

The same spec gives the same kernel. The reader, `script`, keeps rewritten sources and what the
current thread is reading.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.error import DiagnosticError

from .conv_spec import ConvSpec
from .cpu.attention import append_prefill, decode, mla, prefill, shared, tree
from .cpu.sparse import listed
from .cpu.sparse import page_bounds as bounds
from .cuda.builders import BUILDERS as CUDA_BUILDERS
from .index_spec import IndexSpec
from .moves import append, copy, merge
from .recurrent_sets import builders_of as recurrent_builders
from .recurrent_sets import conv_kernels as conv_kernels
from .recurrent_sets import recurrent_kernels as recurrent_kernels
from .recurrent_spec import RecurrentSpec
from .releases import require_cuda
from .spec import CudaTarget, KernelSpec, VectorTarget

BUILDERS: dict[str, Callable] = {
    "transpose_append": append.transpose_append,
    "split_rotary": append.split_rotary,
    "rope_append": append.rope_append,
    "prefill_ragged": prefill.prefill_ragged,
    "prefill": prefill.prefill,
    "decode": decode.decode,
    "append_prefill": append_prefill.append_prefill,
    "prefill_windowed": prefill.prefill_windowed,
    "decode_windowed": decode.decode_windowed,
    "prefill_sliding": prefill.prefill_sliding,
    "decode_sliding": decode.decode_sliding,
    "prefill_ragged_sliding": prefill.prefill_ragged_sliding,
    "prefill_spans": prefill.prefill_spans,
    "prefill_spans_sliding": prefill.prefill_spans_sliding,
    "prefill_shared": shared.prefill_shared,
    "tree_paged": tree.tree_paged,
    "tree_paged_sliding": tree.tree_paged_sliding,
    "tree": tree.tree,
    "tree_sliding": tree.tree_sliding,
    "attend_listed": listed.attend_listed,
    "attend_blocks": listed.attend_blocks,
    "page_bounds": bounds.page_bounds,
    "choose_pages": bounds.choose_pages,
    "merge": merge.merge,
    "apply_sinks": merge.apply_sinks,
    "copy_single_page": copy.copy_single_page,
    "copy_pages": copy.copy_pages,
    "debug_get_kv": copy.debug_get_kv,
    "compact_copy": copy.compact_copy,
    "transpose_append_mla": append.transpose_append_mla,
    "mla_prefill": mla.mla_prefill,
    "mla_prefill_sliding": mla.mla_prefill_sliding,
    "mla_prefill_shared": shared.mla_prefill_shared,
    "mla_tree": mla.mla_tree,
    "mla_tree_sliding": mla.mla_tree_sliding,
    "debug_get_kv_mla": copy.debug_get_kv_mla,
}
_WITHOUT_WINDOW = {
    *("prefill", "decode", "prefill_ragged", "prefill_shared", "tree_paged", "tree"),
    *("prefill_spans", "mla_prefill", "mla_prefill_shared", "mla_tree"),
}
_WITH_WINDOW = {
    "prefill_spans_sliding",
    *("prefill_sliding", "decode_sliding", "prefill_ragged_sliding"),
    *("tree_paged_sliding", "tree_sliding", "mla_prefill_sliding", "mla_tree_sliding"),
}
_STOCK_ONLY = {"prefill_windowed", "decode_windowed"}  # for the stock cache's calling convention
_MLA_ONLY = {
    "transpose_append_mla",
    "mla_prefill",
    "mla_prefill_sliding",
    "mla_prefill_shared",
    "mla_tree",
    "mla_tree_sliding",
    "debug_get_kv_mla",
}
_LISTED = {"attend_listed", "attend_blocks"}
_BOUNDS = {"page_bounds", "choose_pages"}
_SPANS = {"prefill_spans", "prefill_spans_sliding"}
_ROWS = {"prefill_ragged", "prefill_ragged_sliding", "tree", "tree_sliding"}  # of a step alone
_BOTH = _ROWS | {"merge", "copy_single_page", "copy_pages", "compact_copy"}
_ANY_TARGET = (  # written once, in `moves`
    *("transpose_append", "split_rotary", "rope_append", "merge", "apply_sinks"),
    *("copy_single_page", "copy_pages", "debug_get_kv", "compact_copy"),
    *("transpose_append_mla", "debug_get_kv_mla"),
)
_NON_ABSORBED = _ROWS | {"merge"}  # where an MLA layer is a multi-head attention


def kernel_names(
    spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec, for_stock: bool = False
) -> list[str]:
    """Names of the kernels that layers of `spec` need.

    Parameters
    ----------
    spec : KernelSpec, RecurrentSpec, ConvSpec or IndexSpec
    for_stock : bool
        Those that only the stock cache calls are among them.
    """
    if not isinstance(spec, KernelSpec):
        return list(recurrent_builders(spec))
    builders = _builders(spec.target)
    if not append_prefill.is_possible(spec):
        builders = {name: build for name, build in builders.items() if name != "append_prefill"}
    if spec.sink_logits:  # attention lets them in
        builders = {name: build for name, build in builders.items() if name != "apply_sinks"}
    unneeded = set() if spec.lists else _LISTED
    if spec.page_bounds:  # rows attend to the pages that they choose
        unneeded = unneeded - {"attend_blocks"}
    else:
        unneeded = unneeded | _BOUNDS
    builders = {name: build for name, build in builders.items() if name not in unneeded}
    if not spec.spans:
        builders = {name: build for name, build in builders.items() if name not in _SPANS}
    others = _WITHOUT_WINDOW if spec.kind.endswith("_sliding") else _WITH_WINDOW
    if not spec.is_latent:
        others = others | _MLA_ONLY
        others |= set() if for_stock and spec.kind == "mha" else _STOCK_ONLY
        return [name for name in builders if name not in others]
    names = (_MLA_ONLY | _BOTH | _LISTED) - others
    if not spec.original_qk_head_dim:
        names = names - _ROWS
    return [name for name in builders if name in names]


def names_for(target: VectorTarget | CudaTarget) -> list[str]:
    """Names of all kernels that there are for a target."""
    return list(_builders(target))


def _builders(target: VectorTarget | CudaTarget) -> dict[str, Callable]:
    if isinstance(target, CudaTarget):
        moves = {name: BUILDERS[name] for name in _ANY_TARGET}
        return moves | CUDA_BUILDERS
    return BUILDERS


def build_kernel(name: str, spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec):
    """Build the kernel `name` for `spec`.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.

    Raises
    ------
    ValueError
        For an unknown name, and for a spec that the kernel does not support.
    RuntimeError
        For a GPU, if the installed apache-tvm cannot generate code of such kernels.
    """
    if isinstance(spec, KernelSpec) and isinstance(spec.target, CudaTarget):
        require_cuda()
    known = _builders(spec.target) if isinstance(spec, KernelSpec) else recurrent_builders(spec)
    if name not in known:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(known)}")
    try:
        if not isinstance(spec, KernelSpec):
            return known[name]()
        return known[name](spec.non_absorbed if name in _NON_ABSORBED else spec)
    except DiagnosticError as error:  # the parser's, around what a fragment raised
        raise _root(error) from None


def _root(error: BaseException) -> BaseException:
    while isinstance(error, DiagnosticError) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    return error
