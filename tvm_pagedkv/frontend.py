# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCache` for models written with ``tvm.relax.frontend.nn``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode
from tvm.target import Target

from tir_kernels import build_kernel
from tir_kernels.spec import KernelSpec

from .build import kernel_spec
from .config import KVCacheConfig, LayerSpec, RopeConfig
from .frontend_methods import PagedKVCacheObject

_RUNTIMES = ("pagedkv", "stock")


class PagedKVCache(PagedKVCacheObject):
    """A paged KV cache inside a Relax model; takes the place of ``TIRPagedKVCache``.

    A model switches with one import line: the constructor takes the same arguments, and all methods
    of the base class work (`attention_with_fused_qkv`, `self_attention`, `cross_attention`,
    `merge_attn_output_inplace`, `get_query_positions`, ...).

    Parameters
    ----------
    attn_kind : str or list of str
        "mha" or "mla" for all layers, or one kind per layer (the same one: the dims are of one).
    max_batch_size, max_total_seq_len, prefill_chunk_size : tirx.Var or int
        Capacities, given when the cache is created.
    support_sliding_window : tirx.Var or int
        1 where sequences may be given a sliding window, else 0; given when the cache is created.
    page_size : tirx.Var or int
        Slots of a page, given when the cache is created; must be the one that the kernels were
        built for.
    layer_partition : relax.ShapeExpr
        First layer of each pipeline stage.
    num_hidden_layers, num_attention_heads, num_key_value_heads, qk_head_dim, v_head_dim : int
    mla_original_qk_head_dim, mla_original_v_head_dim : int
        Head dims before absorption; used by "mla" only.
    rope_mode : RopeMode
    rope_scale, rope_theta : float
    rope_scaling : dict
        Hugging Face rope scaling, may be empty.
    rope_ext_factors : relax.Expr
        longrope: float32 ``[rotary_dim]``, long factors, then short ones. Otherwise ignored.
    rotary_dim : int
    enable_disaggregation : bool or tirx.Var
        Keep the pages in memory that other processes of the host can map, as
        `KVCacheConfig.enable_kv_transfer` does.
    dtype : str
    target : tvm.target.Target
    name : str
    layer_sliding_window_size : int
        Window of the "mha_sliding" layers: positions that a row sees, its own included.
    kernel_page_size : int
        The page size that kernels are built for when `page_size` is symbolic.
    logit_softcap : float, optional
        Soft-cap of the attention logits.
    alibi : bool or sequence of float, optional
        ALiBi, as `KVCacheConfig` takes it.
    runtime : {"pagedkv", "stock"}
        "stock": emit a cache that also the runtime object inside apache-tvm can drive.

    Raises
    ------
    ValueError, TypeError
        On dimensions that no kernel serves, as `KVCacheConfig` does.
    NotImplementedError
        On attention kinds and targets that have no kernels yet.
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
        rope_mode: RopeMode,
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
        kernel_page_size: int = 16,
        logit_softcap: float | None = None,
        alibi: bool | Sequence[float] | None = None,
        runtime: str = "pagedkv",
    ) -> None:
        if runtime not in _RUNTIMES:
            raise ValueError(f"runtime must be one of {', '.join(_RUNTIMES)}; got {runtime!r}")
        kinds = _layer_kinds(attn_kind, num_hidden_layers)
        if target.kind.name != "llvm":
            raise NotImplementedError(f"kernels for target kind {target.kind.name!r}")
        config = KVCacheConfig(  # validates; its capacities stay symbolic in the model
            num_layers=num_hidden_layers,
            num_qo_heads=num_attention_heads,
            num_kv_heads=num_key_value_heads,
            qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            page_size=page_size if isinstance(page_size, int) else kernel_page_size,
            rope=RopeConfig(
                mode=RopeMode(rope_mode).name.lower(),
                theta=rope_theta,
                scale=rope_scale,
                rotary_dim=rotary_dim,
                scaling=_with_placeholder_factors(rope_scaling, rotary_dim),
            ),
            layers=[
                LayerSpec(
                    kind=kind,
                    window=layer_sliding_window_size if kind == "mha_sliding" else None,
                    mla_original_qk_head_dim=mla_original_qk_head_dim if kind == "mla" else None,
                    mla_original_v_head_dim=mla_original_v_head_dim if kind == "mla" else None,
                )
                for kind in kinds
            ],
            logit_softcap=logit_softcap,
            alibi=alibi,
        )
        if runtime == "stock" and "mha_sliding" in kinds:
            raise NotImplementedError("kernels of 'mha_sliding' layers for the stock runtime")
        kernels = _Kernels(
            kernel_spec(config, config.layers[0], target),
            "tirx" if runtime == "stock" else "pagedkv",
        )
        # A symbolic one is decided when the cache is created.
        has_windows = not (isinstance(support_sliding_window, int) and not support_sliding_window)
        capacities = [
            max_batch_size,
            max_total_seq_len,
            prefill_chunk_size,
            page_size,
            support_sliding_window,
            layer_sliding_window_size,
        ]
        arguments = [
            relax.ShapeExpr(capacities),
            layer_partition,
            relax.prim_value(num_attention_heads),
            relax.prim_value(num_key_value_heads),
            relax.prim_value(qk_head_dim),
            relax.prim_value(v_head_dim),
            relax.ShapeExpr([int(AttnKind[kind.upper()]) for kind in kinds]),
            relax.prim_value(enable_disaggregation),
            relax.prim_value(int(rope_mode)),
            relax.prim_value(rope_scale),
            relax.prim_value(rope_theta),
            rope_ext_factors,
            relax.op.zeros((), dtype),
            *(
                kernels.positional_mla()
                if kinds[0] == "mla"
                else kernels.positional(set(kinds), has_windows)
            ),
        ]
        super().__init__(
            _expr=relax.call_pure_packed(
                "vm.builtin.paged_attention_kv_cache_create", *arguments, ty_args=relax.AnyType()
            ),
            _name=name,
        )


class _Kernels:
    """Adds kernels to the module under construction and lists them for the constructor."""

    def __init__(self, spec: KernelSpec, tag: str):
        self.spec, self.tag = spec, tag

    def _function(self, name: str, spec: KernelSpec | None = None) -> relax.GlobalVar:
        return relax.BlockBuilder.current().add_func(
            build_kernel(name, spec or self.spec), f"pagedkv_{name}"
        )

    def _tagged(self, name: str) -> relax.Tuple:
        return relax.Tuple([tvm.ir.StringImm(self.tag), self._function(name)])

    def positional(self, kinds: set[str], has_windows: bool) -> list[relax.Expr]:
        """Arguments 13 to 27 of the positional constructor, for layers of these kinds.

        With windows of sequences the stock runtime takes kernels of their own for these; ours has
        the plain ones do both.
        """
        merge = self._function("merge")
        windowed = self.tag == "tirx" and has_windows and kinds == {"mha"}

        def needed(kind: str, name: str) -> relax.Tuple:
            if kind == "mha_sliding" and windowed:
                return self._tagged(name.replace("sliding", "windowed"))
            return self._tagged(name) if kind in kinds else relax.Tuple([])

        return [
            self._function("transpose_append"),
            relax.op.null_value(),  # transpose_append_mla
            self._tagged("prefill_ragged"),
            needed("mha", "prefill"),
            needed("mha", "decode"),
            needed("mha_sliding", "prefill_sliding"),
            needed("mha_sliding", "decode_sliding"),
            *(relax.Tuple([]) for _ in range(3)),  # tree and MLA kernels
            relax.Tuple([merge, merge]),  # of a step's parts, and of the fine-grained API
            self._rotary(["apply_sinks", *(["prefill_shared"] if "mha" in kinds else [])]),
            self._function("copy_single_page"),
            self._function("debug_get_kv"),
            self._function("compact_copy"),
        ]

    def positional_mla(self) -> list[relax.Expr]:
        """The same of MLA layers, which have no rotation and no multi-head pages."""
        absorbed = replace(self.spec, original_qk_head_dim=0, original_v_head_dim=0)
        ragged = list(self._tagged("prefill_ragged").fields)
        rotary = relax.op.null_value()
        if self.tag == "pagedkv":
            dims = (self.spec.original_qk_head_dim, self.spec.original_v_head_dim)
            ragged += [relax.prim_value(dim) for dim in dims]
            none, page_size = relax.op.null_value(), relax.prim_value(self.spec.page_size)
            named = self._named(["mla_prefill_shared"])
            rotary = relax.Tuple([tvm.ir.StringImm(self.tag), none, none, page_size, *named])
        return [
            relax.op.null_value(),  # transpose_append
            self._function("transpose_append_mla"),
            relax.Tuple(ragged),
            *(relax.Tuple([]) for _ in range(6)),  # attention of MHA layers
            self._tagged("mla_prefill"),
            # Of absorbed outputs; and of the fine-grained API, whose outputs are not absorbed.
            relax.Tuple([self._function("merge", absorbed), self._function("merge")]),
            rotary,
            self._function("copy_single_page"),
            self._function("debug_get_kv_mla"),
            self._function("compact_copy"),
        ]

    def _rotary(self, names: list[str]) -> relax.Expr:
        split_rotary = self._function("split_rotary")
        if self.tag == "tirx":
            return split_rotary
        return relax.Tuple(
            [
                tvm.ir.StringImm(self.tag),
                split_rotary,
                self._function("rope_append"),
                relax.prim_value(self.spec.page_size),
                *self._named(names),
            ]
        )

    def _named(self, names: list[str]) -> list[relax.Expr]:
        """Kernels that the positional constructor has no index for: names and functions in turn."""
        return [each for name in names for each in (tvm.ir.StringImm(name), self._function(name))]


def _layer_kinds(attn_kind: str | list[str], num_layers: int) -> list[str]:
    kinds = [attn_kind] * num_layers if isinstance(attn_kind, str) else list(attn_kind)
    if len(kinds) != num_layers:
        raise ValueError(f"attn_kind has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in ("mha", "mha_sliding", "mla"):
            raise ValueError(f"attn_kind must be 'mha', 'mha_sliding' or 'mla'; got {kind!r}")
    if "mla" in kinds and len(set(kinds)) > 1:
        raise NotImplementedError(
            "'mla' and other layers in one model: the arguments have the dims of one kind"
        )
    return kinds


def _with_placeholder_factors(rope_scaling: dict[str, Any] | None, rotary_dim: int):
    """longrope factors come as a tensor when the cache is created; the kernels do not bake them."""
    if not rope_scaling or rope_scaling.get("rope_type", "default") == "default":
        return None
    scaling = dict(rope_scaling)
    if scaling.get("rope_type") == "longrope":
        for key in ("short_factor", "long_factor"):
            scaling.setdefault(key, (1.0,) * (rotary_dim // 2))
    return scaling
