# SPDX-License-Identifier: Apache-2.0
"""The kernels that there are: a row each.

Whatever asks which kernels there are, who needs one or what it is called with asks this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tvm import tirx
from tvm.error import DiagnosticError

from .conv_spec import ConvSpec
from .cpu.attention import append_prefill, decode, mla, prefill, shared, tree
from .cpu.recurrent import conv, scan
from .cpu.sparse import index, index_blocks, listed, page_bounds
from .gpu.attention import decode as gpu_decode
from .gpu.attention import prefill as gpu_prefill
from .gpu.attention import shared as gpu_shared
from .gpu.recurrent import conv as gpu_conv
from .gpu.recurrent import scan as gpu_scan
from .index_spec import IndexSpec
from .moves import append, copy, merge, recurrent
from .recurrent_spec import RecurrentSpec
from .releases import require_cuda
from .signatures import attention as calls
from .signatures import moves as move_calls
from .signatures import sparse as sparse_calls
from .signatures import states as state_calls
from .signatures.signature import Signature
from .spec import CudaTarget, GpuTarget, KernelSpec, VectorTarget

Spec = KernelSpec | RecurrentSpec | ConvSpec | IndexSpec
ALL = (KernelSpec, RecurrentSpec, ConvSpec, IndexSpec)


def rows_of(spec: Spec) -> KernelSpec:
    """Return the spec by which rows are appended to pages and copied."""
    return spec if isinstance(spec, KernelSpec) else spec.rows


def non_absorbed(spec: KernelSpec) -> KernelSpec:
    """Return the spec of attention to the rows of a step, where MLA has K and V of each head."""
    return spec.non_absorbed


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    Parameters
    ----------
    name : str
    signature : Signature
        What it is called with.
    is_needed : callable
        ``spec -> bool``: whether layers of a spec need it.
    cpu, gpu : module, optional
        The module whose function of the kernel's name builds it, ``spec -> PrimFunc``, for each
        family of targets; None: it has no such kernel.
    specs : tuple of type
        The types of specs that `is_needed` may be asked about.
    takes : callable, optional
        From the spec of layers to the one that the kernel is built from, if that is another one.
    is_for_stock : bool
        Whether only the stock cache calls it.
    """

    name: str
    signature: Signature
    is_needed: Callable[[Spec], bool]
    cpu: ModuleType | None
    gpu: ModuleType | None
    specs: tuple[type, ...] = (KernelSpec,)
    takes: Callable[[Spec], Spec] | None = None
    is_for_stock: bool = False

    def module(self, target: VectorTarget | GpuTarget) -> ModuleType | None:
        """Return the module that builds the kernel for a target."""
        return self.gpu if isinstance(target, GpuTarget) else self.cpu

    def can_be_built(self, spec: Spec) -> bool:
        """Whether there is such a kernel for the type of a spec and for its target."""
        return isinstance(spec, self.specs) and self.module(spec.target) is not None

    def build(self, spec: Spec) -> tirx.PrimFunc:
        """Build the kernel for layers of a spec."""
        builder = getattr(self.module(spec.target), self.name)
        return builder(self.takes(spec) if self.takes else spec)

    @property
    def attends(self) -> bool:
        """Whether it is attention."""
        return {"o", "sm_scale"} <= {*self.signature.names}

    @property
    def has_window(self) -> bool:
        """Whether it takes a window."""
        return "window" in self.signature.names

    @property
    def rotates_new_rows(self) -> bool:
        """Whether it rotates Q and K of a step before K is written."""
        return "apply_rope" in self.signature.names

    @property
    def can_rotate_inside(self) -> bool:
        """Whether it can rotate Q and K while it attends."""
        return "rotary_mode" in self.signature.names


# Which layers need a kernel.


def _always(spec: Spec) -> bool:
    return True


def _has_heads(spec: KernelSpec) -> bool:
    return not spec.is_latent


def _has_heads_without_sinks(spec: KernelSpec) -> bool:
    return not spec.is_latent and not spec.sink_logits  # attention lets sinks in


def _has_latent_rows(spec: Spec) -> bool:
    """Whether a slot holds one row, as in all pages but those of attention with K and V."""
    return not isinstance(spec, KernelSpec) or spec.is_latent


def _mha(spec: KernelSpec) -> bool:
    return spec.kind == "mha"


def _mha_sliding(spec: KernelSpec) -> bool:
    return spec.kind == "mha_sliding"


def _mla(spec: KernelSpec) -> bool:
    return spec.kind == "mla"


def _mla_sliding(spec: KernelSpec) -> bool:
    return spec.kind == "mla_sliding"


def _step(spec: KernelSpec) -> bool:
    """Whether layers attend to the rows of a step alone."""
    return _mha(spec) or (_mla(spec) and spec.original_qk_head_dim > 0)


def _step_sliding(spec: KernelSpec) -> bool:
    return _mha_sliding(spec) or (_mla_sliding(spec) and spec.original_qk_head_dim > 0)


def _and_spans(is_needed: Callable[[KernelSpec], bool]) -> Callable[[KernelSpec], bool]:
    return lambda spec: spec.spans and is_needed(spec)


def _has_lists(spec: KernelSpec) -> bool:
    return spec.lists


def _has_lists_of_blocks(spec: KernelSpec) -> bool:
    return spec.lists or spec.page_bounds


def _chooses_pages(spec: KernelSpec) -> bool:
    return spec.page_bounds and not spec.is_latent


# Name, signature, which layers need it, and what builds it for CPUs and for GPUs.
# fmt: off
_ROWS = (
    # Appends: the rows of a step go to their slots.
    Kernel("transpose_append", move_calls.TRANSPOSE_APPEND, _has_heads, append, append),
    Kernel("split_rotary", move_calls.SPLIT_ROTARY, _has_heads, append, append),
    Kernel("rope_append", move_calls.ROPE_APPEND, _has_heads, append, append),
    Kernel("append_prefill", calls.APPEND_PREFILL, append_prefill.is_possible, append_prefill,
           None),
    Kernel("transpose_append_mla", move_calls.TRANSPOSE_APPEND_MLA, _has_latent_rows, append,
           append, specs=(KernelSpec, IndexSpec), takes=rows_of),
    Kernel("row_append", move_calls.TRANSPOSE_APPEND_MLA, _always, append, append,
           specs=(ConvSpec,), takes=rows_of),
    Kernel("recurrent_append", state_calls.RECURRENT_APPEND, _always, recurrent, recurrent,
           specs=(RecurrentSpec,)),
    # Attention over pages.
    Kernel("decode", calls.DECODE, _mha, decode, gpu_decode),
    Kernel("decode_sliding", calls.DECODE_SLIDING, _mha_sliding, decode, gpu_decode),
    Kernel("decode_windowed", calls.DECODE_WINDOWED, _mha, decode, gpu_decode, is_for_stock=True),
    Kernel("prefill", calls.PREFILL, _mha, prefill, gpu_prefill),
    Kernel("prefill_sliding", calls.PREFILL_SLIDING, _mha_sliding, prefill, gpu_prefill),
    Kernel("prefill_windowed", calls.PREFILL_WINDOWED, _mha, prefill, gpu_prefill,
           is_for_stock=True),
    Kernel("prefill_spans", calls.PREFILL_SPANS, _and_spans(_mha), prefill, gpu_prefill),
    Kernel("prefill_spans_sliding", calls.PREFILL_SPANS_SLIDING, _and_spans(_mha_sliding), prefill,
           gpu_prefill),
    Kernel("tree_paged", calls.TREE_PAGED, _mha, tree, gpu_prefill),
    Kernel("tree_paged_sliding", calls.TREE_PAGED_SLIDING, _mha_sliding, tree, gpu_prefill),
    Kernel("mla_prefill", calls.MLA_PREFILL, _mla, mla, gpu_prefill),
    Kernel("mla_prefill_sliding", calls.MLA_PREFILL_SLIDING, _mla_sliding, mla, gpu_prefill),
    Kernel("mla_tree", calls.MLA_TREE, _mla, mla, gpu_prefill),
    Kernel("mla_tree_sliding", calls.MLA_TREE_SLIDING, _mla_sliding, mla, gpu_prefill),
    # Attention over pages that several sequences share.
    Kernel("prefill_shared", calls.PREFILL_SHARED, _mha, shared, gpu_shared),
    Kernel("mla_prefill_shared", calls.MLA_PREFILL_SHARED, _mla, shared, gpu_shared),
    # Attention to the rows of a step alone.
    Kernel("prefill_ragged", calls.PREFILL_RAGGED, _step, prefill, gpu_prefill, takes=non_absorbed),
    Kernel("prefill_ragged_sliding", calls.PREFILL_RAGGED_SLIDING, _step_sliding, prefill,
           gpu_prefill, takes=non_absorbed),
    Kernel("tree", calls.TREE, _step, tree, gpu_prefill, takes=non_absorbed),
    Kernel("tree_sliding", calls.TREE_SLIDING, _step_sliding, tree, gpu_prefill,
           takes=non_absorbed),
    # Attention to lists of positions, and what chooses these.
    Kernel("attend_listed", sparse_calls.ATTEND_LISTED, _has_lists, listed, None),
    Kernel("attend_blocks", sparse_calls.ATTEND_BLOCKS, _has_lists_of_blocks, listed, None),
    Kernel("page_bounds", sparse_calls.PAGE_BOUNDS, _chooses_pages, page_bounds, None),
    Kernel("choose_pages", sparse_calls.CHOOSE_PAGES, _chooses_pages, page_bounds, None),
    Kernel("index_top_k", sparse_calls.INDEX_TOP_K, _always, index, None, specs=(IndexSpec,)),
    Kernel("index_top_blocks", sparse_calls.INDEX_TOP_BLOCKS, _always, index_blocks, None,
           specs=(IndexSpec,)),
    # Partial states.
    Kernel("merge", move_calls.MERGE, _always, merge, merge, takes=non_absorbed),
    Kernel("apply_sinks", move_calls.APPLY_SINKS, _has_heads_without_sinks, merge, merge),
    # States of recurrent layers and convolutions.
    Kernel("recurrent_scan", state_calls.RECURRENT_SCAN, _always, scan, gpu_scan,
           specs=(RecurrentSpec,)),
    Kernel("causal_conv", state_calls.CAUSAL_CONV, _always, conv, gpu_conv, specs=(ConvSpec,)),
    # Copies.
    Kernel("copy_single_page", move_calls.COPY_SINGLE_PAGE, _always, copy, copy, specs=ALL,
           takes=rows_of),
    Kernel("copy_pages", move_calls.COPY_PAGES, _always, copy, copy, specs=ALL, takes=rows_of),
    Kernel("compact_copy", move_calls.COMPACT_COPY, _always, copy, copy, specs=ALL, takes=rows_of),
    Kernel("debug_get_kv", move_calls.DEBUG_GET_KV, _has_heads, copy, copy),
    Kernel("debug_get_kv_mla", move_calls.DEBUG_GET_KV_MLA, _has_latent_rows, copy, copy, specs=ALL,
           takes=rows_of),
)
# fmt: on
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ROWS}


def kernels_of(spec: Spec) -> list[Kernel]:
    """Return the kernels that can be built from a spec, whether its layers need them or not.

    Raises
    ------
    ValueError
        For index lanes on GPUs.
    """
    if isinstance(spec, IndexSpec) and isinstance(spec.target, GpuTarget):
        raise ValueError("index lanes have kernels for CPUs only")
    return [kernel for kernel in KERNELS.values() if kernel.can_be_built(spec)]


def kernel_names(spec: Spec, for_stock: bool = False) -> list[str]:
    """Return the names of the kernels that layers of a spec need.

    Parameters
    ----------
    spec : KernelSpec, RecurrentSpec, ConvSpec or IndexSpec
    for_stock : bool
        Those that only the stock cache calls are among them.
    """
    return [
        kernel.name
        for kernel in kernels_of(spec)
        if kernel.is_needed(spec) and (for_stock or not kernel.is_for_stock)
    ]


def build_kernel(name: str, spec: Spec) -> tirx.PrimFunc:
    """Build the kernel `name` for layers of `spec`.

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
    known = {kernel.name: kernel for kernel in kernels_of(spec)}
    if name not in known:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(known)}")
    try:
        return known[name].build(spec)
    except DiagnosticError as error:  # the parser's, around what a fragment raised
        raise _root(error) from None


def _root(error: BaseException) -> BaseException:
    while isinstance(error, DiagnosticError) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    return error
