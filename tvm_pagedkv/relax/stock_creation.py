# SPDX-License-Identifier: Apache-2.0
"""The call with which a model creates a cache that the runtime inside apache-tvm can be as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode
from tvm.target import Target

from tir_kernels import build_kernel
from tir_kernels.cpu.attention import stock_sliding
from tir_kernels.spec import KernelSpec

from ..compiler import is_cuda, spec_sets
from ..config import MHA_KINDS, KVCacheConfig, ResolvedConfig
from .creation_values import CreationValues
from .model_kernels import ModelKernels
from .releases import StringImm

CREATE_POSITIONALLY = "vm.builtin.paged_attention_kv_cache_create"
_KIND_NUMBERS = {
    "mha": int(AttnKind.MHA),
    "mla": int(AttnKind.MLA),
    "linear": 2,  # TVM's front end has no name for it
    "mha_sliding": int(AttnKind.MHA_SLIDING),
}


def stock_creation(
    config: KVCacheConfig, window: int, values: CreationValues, target: Target
) -> tuple[relax.Expr, ModelKernels]:
    """Return the call that creates the cache, and the kernels that it refers to.

    Parameters
    ----------
    config : KVCacheConfig
        Its capacities are ignored.
    window : int
        The window of all "mha_sliding" layers.
    values : CreationValues
        What the model gives in place of the capacities.
    target : tvm.target.Target

    Raises
    ------
    ValueError
        If the stock runtime has no such cache.
    """
    resolved = config.resolved()
    reason = next(_refusals(config, resolved, target), None)
    if reason is not None:
        raise ValueError(reason)
    kernels = _StockKernels(resolved, window, target)
    rope = resolved.layers[0].rope
    has_windows = not (isinstance(values.sliding_window, int) and not values.sliding_window)
    sizes = [
        values.max_num_sequences,
        values.max_total_tokens,
        values.prefill_chunk_size,
        values.page_size,
        values.sliding_window,
        window,
    ]
    numbers = config.num_qo_heads, config.num_kv_heads, config.qk_head_dim, config.v_head_dim
    call = relax.call_pure_packed(
        CREATE_POSITIONALLY,
        relax.ShapeExpr(sizes),
        values.layer_indptr,
        *(relax.prim_value(number) for number in numbers),
        relax.ShapeExpr([_KIND_NUMBERS[layer.kind] for layer in resolved.layers]),
        relax.prim_value(values.enable_kv_transfer),
        relax.prim_value(int(RopeMode[rope.mode.upper()])),
        relax.prim_value(rope.scale),
        relax.prim_value(rope.theta),
        values.rope_ext_factors,
        relax.op.zeros((), config.dtype),
        *kernels.arguments(has_windows),
        ty_args=relax.AnyType(),
    )
    return call, kernels.referred


def _refusals(config: KVCacheConfig, resolved: ResolvedConfig, target: Target) -> Iterator[str]:
    """Yield what the stock runtime lacks for a configuration."""
    layers = resolved.layers
    kinds = {layer.kind for layer in layers}
    if is_cuda(target):
        yield "for GPUs there are kernels for runtime 'pagedkv' only"
    if len({layer.rope for layer in layers}) > 1:
        yield (
            "the stock runtime has one rotation for all layers; choose runtime 'pagedkv', or "
            "RopeMode.NONE and rotate in the model"
        )
    if "mha_chunked" in kinds:
        yield (
            "the stock runtime has no layers that attend within chunks; choose runtime 'pagedkv'"
        )
    if any(layer.kind == "mla" and layer.window for layer in layers):
        yield "'mla_sliding' layers need runtime 'pagedkv'"
    if "index" in kinds:
        yield "layers of kind 'index' need runtime 'pagedkv' and a CPU"
    for option in ("lists", "page_bounds", "sink_logits", "kv_scales"):
        if any(getattr(layer, option) for layer in layers):
            yield f"{option} need runtime 'pagedkv': the stock runtime has none"
    if resolved.spans:
        yield "spans need runtime 'pagedkv'"
    if config.sliding_window_includes_self:
        yield (
            "the windows of the stock runtime never include the row itself: leave "
            "sliding_window_includes_self None, or choose runtime 'pagedkv'"
        )
    if resolved.kv_dtype != resolved.dtype:
        yield (
            f"the stock runtime keeps K and V in the dtype of a step, {resolved.dtype}, not as "
            f"{resolved.kv_dtype}: leave kv_dtype None, or choose runtime 'pagedkv'"
        )
    if "mla" in kinds and not kinds.isdisjoint(MHA_KINDS):
        yield (
            "the stock runtime has one copy_single_page for all layers, and the pages of 'mla' "
            "layers have another shape than those of the others"
        )


class _StockKernels:
    """The kernels as the stock constructor takes them: by position, most of them tagged "tirx"."""

    def __init__(self, config: ResolvedConfig, window: int, target: Target):
        specs = {s.kind: s for s in spec_sets(config, target).specs if isinstance(s, KernelSpec)}
        self.kinds, self.window = set(specs), window
        self.mla, self.mha = specs.get("mla"), specs.get("mha", specs.get("mha_sliding"))
        self.referred = ModelKernels(target, repr(specs))

    def arguments(self, has_windows: bool) -> list[relax.Expr]:
        """Return arguments 13 to 27 of the constructor."""
        null = relax.op.null_value
        spec = self.mha or self.mla
        assert spec is not None
        absorbed = replace(spec, original_qk_head_dim=0, original_v_head_dim=0)
        name_of_reads = "debug_get_kv" if self.mha else "debug_get_kv_mla"
        return [
            self._function("transpose_append", self.mha) if self.mha else null(),
            self._function("transpose_append_mla", self.mla) if self.mla else null(),
            self._tagged("prefill_ragged", spec),
            self._needed("mha", "prefill"),
            self._needed("mha", "decode"),
            self._sliding("prefill_sliding", has_windows),
            self._sliding("decode_sliding", has_windows),
            self._needed("mha", "tree_paged"),
            self._tagged("tree", self.mha) if self.mha else relax.Tuple([]),
            self._needed("mla", "mla_prefill"),
            # Of partial states, and of `merge_attention`, whose o of MLA layers is wider.
            relax.Tuple([self._function("merge", s) for s in (absorbed, spec)]),
            self._function("split_rotary", self.mha) if self.mha else null(),
            self._function("copy_single_page", spec),
            self._function(name_of_reads, spec),
            self._function("compact_copy", spec),
        ]

    def _function(self, name: str, spec: KernelSpec) -> relax.ExternFunc:
        return self.referred.refer(name, repr(spec), partial(build_kernel, name, spec))

    def _tagged(self, name: str, spec: KernelSpec) -> relax.Tuple:
        return relax.Tuple([StringImm("tirx"), self._function(name, spec)])

    def _needed(self, kind: str, name: str) -> relax.Tuple:
        spec = self.mla if kind == "mla" else self.mha
        if kind not in self.kinds or spec is None:
            return relax.Tuple([])
        return self._tagged(name, spec)

    def _sliding(self, name: str, has_windows: bool) -> relax.Tuple:
        """TVM's runtime uses these kernels for windows of layers and of sequences."""
        if has_windows and self.kinds == {"mha"}:
            return self._needed("mha", name.replace("sliding", "windowed"))
        if "mha_sliding" not in self.kinds:
            return relax.Tuple([])
        build = partial(getattr(stock_sliding, name), self.mha, self.window)
        key = f"{self.mha} for a window of {self.window}"
        return relax.Tuple([StringImm("tirx"), self.referred.refer(f"stock_{name}", key, build)])
