# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCache` for models written with ``tvm.relax.frontend.nn``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm.target import Target

from ..compiler import is_cuda, require_cpu
from ..compiler.cuda import arch_of
from ..config import KVCacheConfig, LayerSpec, RopeConfig
from .creation_values import CreationValues
from .frontend_methods import PagedKVCacheObject
from .layer_ropes import common_ropes, own_ropes
from .layer_specs import accepts_sequence_windows, layer_specs
from .model_kernels import link_when_finalized
from .own_creation import own_creation
from .stock_creation import stock_creation

RUNTIMES = ("pagedkv", "stock")


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
        "pagedkv"), "mla", "mla_sliding" (for runtime "pagedkv"), "index" (for runtime "pagedkv",
        with `index_lane`), or "linear", which keeps no K and V. In a model with "mla" layers, the
        heads of other layers are as wide as a latent row.
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
        Whether rows of "mha" and "mla" layers can attend to lists of positions, as for `LayerSpec`.
    page_bounds : bool
        Whether decode steps of "mha" layers can attend within a budget, as for `LayerSpec`; in
        models whose layers are all of this kind, on CPUs.
    index_lane : LayerSpec, optional
        The layers of kind "index", which are all alike: `num_qo_heads`, `qk_head_dim` and
        `kv_dtype`. They are on CPUs only, beside layers of attention.
    sink_logits : bool
        Whether all attention layers have learned sinks, as for `LayerSpec`.
    kv_scales : sequence of pairs, optional
        Static scales of K and of V of each layer, as for `LayerSpec`, for runtime "pagedkv"; None
        for layers without K and V, and for those whose rows have scales of their own.
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
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}; got {runtime!r}")
        if is_cuda(target):
            arch_of(target)
        else:
            require_cpu(target)
        if layer_ropes is None:
            ropes = common_ropes(
                rope_mode, rope_theta, rope_scale, rope_scaling, rotary_dim, num_hidden_layers
            )
        else:
            ropes = own_ropes(layer_ropes, num_hidden_layers)
        layers = layer_specs(
            attn_kind,
            ropes,
            kv_scales,
            index_lane,
            qk_head_dim=qk_head_dim,
            window=layer_sliding_window_size,
            mla_original_qk_head_dim=mla_original_qk_head_dim,
            mla_original_v_head_dim=mla_original_v_head_dim,
            lists=lists,
            page_bounds=page_bounds,
            sink_logits=sink_logits,
        )
        # A symbolic value is known only when the cache is created.
        has_windows = not (isinstance(support_sliding_window, int) and not support_sliding_window)
        config = KVCacheConfig(  # validates; its capacities stay symbolic in the model
            num_layers=num_hidden_layers,
            num_qo_heads=num_attention_heads,
            num_kv_heads=num_key_value_heads,
            qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim,
            dtype=str(dtype),  # mlc-llm gives a DataType, which is a str of another class
            kv_dtype=kv_dtype,
            page_size=page_size if isinstance(page_size, int) else kernel_page_size,
            layers=layers,
            sliding_window=has_windows and accepts_sequence_windows(layers),
            sliding_window_includes_self=sliding_window_includes_self,
            logit_softcap=logit_softcap,
            alibi=alibi,
            spans=spans,
        )
        values = CreationValues(
            max_num_sequences=max_batch_size,
            max_total_tokens=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            sliding_window=support_sliding_window,
            enable_kv_transfer=enable_disaggregation,
            layer_indptr=layer_partition,
            rope_ext_factors=rope_ext_factors,
        )
        if runtime == "stock":
            call, kernels = stock_creation(config, layer_sliding_window_size, values, target)
        else:
            call, kernels = own_creation(config.resolved(), values, target)
        builder = relax.BlockBuilder.current()
        if builder is None:
            raise RuntimeError(
                "a PagedKVCache is made while a Relax function is built: in a method that "
                "export_tvm calls, or in a function of a relax.BlockBuilder"
            )
        self.extern_mods = kernels.compile()
        link_when_finalized(builder, self.extern_mods)
        super().__init__(_expr=call, _name=name)
