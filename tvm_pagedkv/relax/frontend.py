# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCache` for models written with ``tvm.relax.frontend.nn``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import relax, tirx
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode
from tvm.target import Target

from tir_kernels.spec import KernelSpec

from ..compiler import is_cuda, kernel_spec, require_cpu, resolve_target, warn_if_slow
from ..compiler.cuda import arch_of, cuda_spec
from ..config import (
    MHA_KINDS,
    WINDOW_KINDS,
    KVCacheConfig,
    LayerSpec,
    ResolvedConfig,
    ResolvedLayer,
    RopeConfig,
)
from .constructor_kernels import ConstructorKernels, IndexLanes, page_types
from .frontend_methods import PagedKVCacheObject
from .layer_ropes import base_rope, common_ropes, layer_ropes_of, mode_number, own_ropes
from .layer_scales import scales_of_layers, static_scales
from .model_kernels import link_when_finalized

# The Relax VM quotes the name of a function that it does not find: ours tells what to do, where the
# library is not loaded. runtime_ext/ffi/register.cc has it too.
MODEL_CONSTRUCTORS = {
    "pagedkv": "pagedkv.paged_attention_kv_cache_create "
    "(import tvm_pagedkv, or load libtvm_pagedkv.so)",
    "stock": "vm.builtin.paged_attention_kv_cache_create",
}
_KIND_NUMBERS = {
    "mha": int(AttnKind.MHA),
    "mla": int(AttnKind.MLA),
    "linear": 2,  # TVM's front end has no name for it
    "mha_sliding": int(AttnKind.MHA_SLIDING),
    "mha_chunked": 4,  # this and the next are known to runtime "pagedkv" only
    "index": 5,
    "mla_sliding": 6,
}
_LATENT = {"mla", "mla_sliding"}
_WITH_WINDOW = {*WINDOW_KINDS, "mla_sliding"}


class PagedKVCache(PagedKVCacheObject):
    """A paged KV cache in a Relax model: a drop-in replacement of TVM's ``TIRPagedKVCache``.

    A model switches with one import line. The constructor takes the same arguments, and all methods
    of the base class work (`attention_with_fused_qkv`, `self_attention`, `cross_attention`,
    `merge_attn_output_inplace`, `get_query_positions`, ...).

    The constructor compiles the kernels, or finds them in the disk cache; the model refers to them
    as external functions. Modules that `export_tvm` or `BlockBuilder.finalize` make have them
    attached. For any other module, add `extern_mods` to its attribute "external_mods".

    Parameters
    ----------
    attn_kind : str or list of str
        One kind for all layers, or one per layer: "mha", "mha_sliding", "mha_chunked" (for runtime
        "pagedkv"), "mla", "mla_sliding" (for runtime "pagedkv"; not beside "mha" and its kind),
        "index" (for runtime "pagedkv", with `index_lane`), or "linear", which keeps no K and V. In
        a model with "mla" layers, the heads of other layers are as wide as a latent row.
    max_batch_size, max_total_seq_len, prefill_chunk_size : tirx.Var or int
        Capacities. Symbolic ones are given when the cache is created.
    page_size : tirx.Var or int
        Slots per page. A symbolic one is given when the cache is created, and must then equal
        `kernel_page_size`.
    support_sliding_window : tirx.Var or int
        1 if sequences may get a sliding window, else 0.
    layer_partition : relax.ShapeExpr
        The first layer of each pipeline stage, then the number of layers. A Disco worker keeps only
        the layers of its stage; layer ids are those of the whole model.
    num_hidden_layers, num_attention_heads, num_key_value_heads, qk_head_dim, v_head_dim : int
        "mla" layers ignore `num_key_value_heads`. If there are any, `v_head_dim` is theirs.
    mla_original_qk_head_dim, mla_original_v_head_dim : int
        Head dimensions before absorption; used by "mla" only.
    rope_mode : RopeMode or sequence of RopeMode
        One mode for all layers, or one per layer, for models without RoPE in some layers.
    rope_scale, rope_theta : float
    rope_scaling : dict
        Hugging Face RoPE scaling; may be empty.
    rope_ext_factors : relax.Expr
        For longrope, float32 ``[rotary_dim]``: long factors, then short ones. Otherwise ignored.
    rotary_dim : int
        Number of leading dimensions of a head that are rotated.
    enable_disaggregation : bool or tirx.Var
        TVM's name of `KVCacheConfig.enable_kv_transfer`.
    dtype : str
        Type of Q, K, V and O.
    target : tvm.target.Target
        A CPU, or a GPU with a named architecture.
    name : str
        Name of the Relax variable.
    layer_sliding_window_size : int
        Window of the "mha_sliding" and "mla_sliding" layers: positions that a row sees, its own
        included. In "mha_chunked" layers, positions of a chunk.
    sliding_window_includes_self : bool, optional
        Whether windows of sequences count the query row itself, as for `KVCacheConfig`.
    kernel_page_size : int
        Page size of the kernels if `page_size` is symbolic.
    logit_softcap : float, optional
        Soft-cap of the attention logits.
    alibi : bool or sequence of float, optional
        ALiBi, as for `KVCacheConfig`.
    layer_ropes : sequence of RopeConfig, optional
        RoPE of each layer: its mode, base, scale, scaling and rotated dimensions. Then the other
        arguments for RoPE have no effect. For runtime "pagedkv", without longrope.
    kv_dtype : str, optional
        Type of the pages, or the codec that quantizes them, as for `KVCacheConfig`; None: `dtype`.
    lists : bool
        Whether rows of "mha" and "mla" layers can attend to lists of positions, as for `LayerSpec`;
        in models whose layers have pages of one shape.
    page_bounds : bool
        Whether decode steps of "mha" layers can attend within a budget, as for `LayerSpec`; in
        models whose layers are all of this kind, on CPUs.
    index_lane : LayerSpec, optional
        The layers of kind "index", which are all alike: `num_qo_heads`, `qk_head_dim` and
        `kv_dtype`. They are on CPUs only, beside layers of attention.
    sink_logits : bool
        Whether all attention layers have learned sinks, as for `LayerSpec`.
    kv_scales : sequence of pairs, optional
        Static scales of K and of V of each layer, as for `LayerSpec`: for runtime "pagedkv", and
        models whose layers have K and V; entries of "linear" layers are None.
    spans : bool
        Whether steps can have spans whose rows see to the span's end, as for `KVCacheConfig`.
    runtime : {"pagedkv", "stock"}
        "stock" emits a cache that TVM's own runtime object can run as well.

    Raises
    ------
    ValueError, TypeError
        If dimensions have no kernel, as for `KVCacheConfig`, or if the target has none: a GPU needs
        a named architecture and runtime "pagedkv".
    RuntimeError
        If no Relax function is being built, or nvcc is missing for a GPU.

    Attributes
    ----------
    extern_mods : list of tvm.runtime.Module
        The compiled kernels as static libraries. Caches that share kernels have the same objects.
    """

    def __init__(
        self,
        attn_kind: str | list[str],
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
        layer_partition: relax.ShapeExpr,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        qk_head_dim: int,
        v_head_dim: int,
        mla_original_qk_head_dim: int,
        mla_original_v_head_dim: int,
        rope_mode: RopeMode | Sequence[RopeMode],
        rope_scale: float,
        rope_theta: float,
        rope_scaling: dict[str, Any],
        rope_ext_factors: relax.Expr,
        rotary_dim: int,
        enable_disaggregation: bool | tirx.Var,
        dtype: str,
        target: Target,
        name: str = "paged_kv_cache",
        *,
        layer_sliding_window_size: int = 1024,
        sliding_window_includes_self: bool | None = None,
        kernel_page_size: int = 16,
        logit_softcap: float | None = None,
        alibi: bool | Sequence[float] | None = None,
        layer_ropes: Sequence[RopeConfig] | None = None,
        kv_dtype: str | None = None,
        lists: bool = False,
        page_bounds: bool = False,
        index_lane: LayerSpec | None = None,
        sink_logits: bool = False,
        kv_scales: Sequence[Any] | None = None,
        spans: bool = False,
        runtime: str = "pagedkv",
    ) -> None:
        if runtime not in MODEL_CONSTRUCTORS:
            raise ValueError(
                f"runtime must be one of {', '.join(MODEL_CONSTRUCTORS)}; got {runtime!r}"
            )
        kinds = _layer_kinds(attn_kind, num_hidden_layers)
        ropes = (
            common_ropes(
                rope_mode, rope_theta, rope_scale, rope_scaling, rotary_dim, num_hidden_layers
            )
            if layer_ropes is None
            else own_ropes(layer_ropes, num_hidden_layers)
        )
        if runtime == "stock" and len(set(ropes)) > 1:
            raise ValueError(
                "the stock runtime has one rotation for all layers; choose runtime 'pagedkv', or "
                "RopeMode.NONE and rotate in the model"
            )
        if runtime == "stock" and spans:
            raise ValueError("spans need runtime 'pagedkv'")
        if runtime == "stock" and "mha_chunked" in kinds:
            raise ValueError(
                "the stock runtime has no layers that attend within chunks; choose runtime "
                "'pagedkv'"
            )
        if "mla_sliding" in kinds and (runtime == "stock" or {*MHA_KINDS} & {*kinds}):
            raise ValueError(
                "'mla_sliding' layers need runtime 'pagedkv', and no layers of kind 'mha' beside "
                f"them; got runtime {runtime!r} and kinds {sorted(set(kinds))}"
            )
        _check_index_lane(kinds, index_lane, runtime, target)
        rope = base_rope(ropes, kinds)
        is_mixed = "mla" in kinds and not set(MHA_KINDS).isdisjoint(kinds)
        if lists and (runtime == "stock" or is_mixed):
            raise ValueError(
                "lists need runtime 'pagedkv', and layers whose pages have one shape: not 'mla' "
                f"layers beside others; got runtime {runtime!r} and kinds {sorted(set(kinds))}"
            )
        if page_bounds and (runtime == "stock" or is_cuda(target) or set(kinds) != {"mha"}):
            raise ValueError(
                "page_bounds need runtime 'pagedkv', a CPU, and layers of kind 'mha'; got runtime "
                f"{runtime!r}, target {target.kind.name} and kinds {sorted(set(kinds))}"
            )
        scales = scales_of_layers(kinds, kv_scales, runtime)
        if sink_logits and runtime == "stock":
            raise ValueError("sink_logits need runtime 'pagedkv': the stock runtime has none")
        if is_cuda(target):
            arch_of(target)
            if runtime == "stock":
                raise ValueError("for GPUs there are kernels for runtime 'pagedkv' only")
        else:
            require_cpu(target)
        # A symbolic value is known only when the cache is created.
        has_windows = not (isinstance(support_sliding_window, int) and not support_sliding_window)
        if runtime == "stock" and sliding_window_includes_self:
            raise ValueError(
                "the windows of the stock runtime never include the row itself: leave "
                "sliding_window_includes_self None, or choose runtime 'pagedkv'"
            )
        config = KVCacheConfig(  # validates; its capacities stay symbolic in the model
            num_layers=num_hidden_layers,
            num_qo_heads=num_attention_heads,
            num_kv_heads=num_key_value_heads,
            qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size if isinstance(page_size, int) else kernel_page_size,
            rope=rope,
            layers=[
                index_lane
                if kind == "index" and index_lane is not None
                else LayerSpec(
                    kind="mla" if kind in _LATENT else kind,
                    v_head_dim=qk_head_dim if "mla" in kinds and kind not in _LATENT else None,
                    window=layer_sliding_window_size if kind in _WITH_WINDOW else None,
                    mla_original_qk_head_dim=mla_original_qk_head_dim if kind in _LATENT else None,
                    mla_original_v_head_dim=mla_original_v_head_dim if kind in _LATENT else None,
                    rope=own,
                    lists=lists and kind in ("mha", "mla"),
                    page_bounds=page_bounds,
                    sink_logits=sink_logits and kind != "linear",
                    kv_scales=own_scales,
                )
                for kind, own, own_scales in zip(kinds, ropes, scales, strict=True)
            ],
            # Layers with a window of their own ignore those of sequences.
            sliding_window=has_windows and not {*_LATENT, "mha_chunked", "index"} & set(kinds),
            sliding_window_includes_self=sliding_window_includes_self,
            logit_softcap=logit_softcap,
            alibi=alibi,
            spans=spans,
        ).resolved()
        if runtime == "stock" and config.kv_dtype != dtype:
            raise ValueError(
                f"the stock runtime keeps K and V in the dtype of a step, {dtype}, not as "
                f"{config.kv_dtype}: leave kv_dtype None, or choose runtime 'pagedkv'"
            )
        if runtime == "stock" and "mla" in kinds and not set(MHA_KINDS).isdisjoint(kinds):
            raise ValueError(
                "the stock runtime has one copy_single_page for all layers, and the pages of 'mla' "
                "layers have another shape than those of the others"
            )
        specs = [
            _spec(config, replace(layer, rope=rope.resolved()), target)
            for layer in config.layers
            if layer.kind not in ("linear", "index")
        ]
        kernels = ConstructorKernels(
            {spec.kind: spec for spec in specs},
            "tirx" if runtime == "stock" else "pagedkv",
            layer_sliding_window_size,
            target,
            page_types(config),
            layer_ropes_of(config, lambda layer: _spec(config, layer, target))
            if layer_ropes is not None
            else (),
            IndexLanes.of(config, target),
            static_scales(config),
        )
        builder = relax.BlockBuilder.current()
        if builder is None:
            raise RuntimeError(
                "a PagedKVCache is made while a Relax function is built: in a method that "
                "export_tvm calls, or in a function of a relax.BlockBuilder"
            )
        capacities = [
            max_batch_size,
            max_total_seq_len,
            prefill_chunk_size,
            page_size,
            support_sliding_window,
            layer_sliding_window_size,
        ]
        if runtime == "pagedkv" and sliding_window_includes_self is not None:
            capacities.append(int(sliding_window_includes_self))
        modes = [mode_number(each) for each in ropes]
        arguments = [
            relax.ShapeExpr(capacities),
            layer_partition,
            relax.prim_value(num_attention_heads),
            relax.prim_value(num_key_value_heads),
            relax.prim_value(qk_head_dim),
            relax.prim_value(v_head_dim),
            relax.ShapeExpr([_KIND_NUMBERS[kind] for kind in kinds]),
            relax.prim_value(enable_disaggregation),
            relax.prim_value(modes[0]) if len(set(modes)) == 1 else relax.ShapeExpr(modes),
            relax.prim_value(rope.scale),
            relax.prim_value(rope.theta),
            rope_ext_factors,
            relax.op.zeros((), dtype),
            *kernels.positional(has_windows),
        ]
        self.extern_mods = kernels.compile()
        link_when_finalized(builder, self.extern_mods)
        super().__init__(
            _expr=relax.call_pure_packed(
                MODEL_CONSTRUCTORS[runtime], *arguments, ty_args=relax.AnyType()
            ),
            _name=name,
        )


def _spec(config: ResolvedConfig, layer: ResolvedLayer, target: Target) -> KernelSpec:
    if is_cuda(target):
        return cuda_spec(kernel_spec(config, layer, resolve_target()), arch_of(target))
    spec = kernel_spec(config, layer, target)
    warn_if_slow(spec)
    return spec


def _layer_kinds(attn_kind: str | list[str], num_layers: int) -> list[str]:
    kinds = [attn_kind] * num_layers if isinstance(attn_kind, str) else list(attn_kind)
    if len(kinds) != num_layers:
        raise ValueError(f"attn_kind has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in _KIND_NUMBERS:
            raise ValueError(f"attn_kind must be of {', '.join(_KIND_NUMBERS)}; got {kind!r}")
    return kinds


def _check_index_lane(
    kinds: list[str], index_lane: LayerSpec | None, runtime: str, target: Target
) -> None:
    if not isinstance(index_lane, (LayerSpec, type(None))):
        raise TypeError(f"index_lane must be a LayerSpec, got {index_lane!r}")
    kind = None if index_lane is None else index_lane.kind
    if ("index" in kinds) != (kind == "index") or kind not in (None, "index"):
        raise ValueError(
            "layers of kind 'index' and index_lane, a LayerSpec of this kind, need each other; got "
            f"kinds {sorted(set(kinds))} and index_lane={index_lane!r}"
        )
    if kind is not None and {*kinds} <= {"index", "linear"}:
        raise ValueError(
            "layers of kind 'index' need a layer of attention beside them, whose positions they "
            f"choose; got kinds {sorted(set(kinds))}"
        )
    if kind is not None and (runtime == "stock" or is_cuda(target)):
        raise ValueError("layers of kind 'index' need runtime 'pagedkv' and a CPU")
