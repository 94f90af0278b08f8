# SPDX-License-Identifier: Apache-2.0
"""`PagedKVCache` for models written with ``tvm.relax.frontend.nn``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import tvm
from tvm import relax, tirx
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode
from tvm.target import Target

from tir_kernels import build_kernel
from tir_kernels.cpu.attention import stock_sliding
from tir_kernels.spec import KernelSpec

from ..compiler import is_cuda, kernel_spec, require_cpu, resolve_target
from ..compiler.cuda import arch_of, cuda_spec
from ..config import KVCacheConfig, LayerSpec, RopeConfig
from .frontend_methods import PagedKVCacheObject
from .model_kernels import ModelKernels, link_when_finalized

# The Relax VM quotes the name of a function that it does not find: ours tells what to do, where the
# library is not loaded. runtime_ext/ffi/register.cc has it too.
MODEL_CONSTRUCTORS = {
    "pagedkv": "pagedkv.paged_attention_kv_cache_create "
    "(import tvm_pagedkv, or load libtvm_pagedkv.so)",
    "stock": "vm.builtin.paged_attention_kv_cache_create",
}
_MHA_KINDS = {"mha", "mha_sliding"}
_KIND_NUMBERS = {
    "mha": int(AttnKind.MHA),
    "mla": int(AttnKind.MLA),
    "linear": 2,  # TVM's front end has no name for it
    "mha_sliding": int(AttnKind.MHA_SLIDING),
}


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
        One kind for all layers, or one per layer: "mha", "mha_sliding", "mla", or "linear", which
        keeps no K and V. In a model with "mla" layers, the heads of other layers are as wide as a
        latent row.
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
    rope_mode : RopeMode
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
        Type of Q, K, V, O and the pages.
    target : tvm.target.Target
        A CPU, or a GPU with a named architecture.
    name : str
        Name of the Relax variable.
    layer_sliding_window_size : int
        Window of the "mha_sliding" layers: positions that a row sees, its own included.
    kernel_page_size : int
        Page size of the kernels if `page_size` is symbolic.
    logit_softcap : float, optional
        Soft-cap of the attention logits.
    alibi : bool or sequence of float, optional
        ALiBi, as for `KVCacheConfig`.
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
        if runtime not in MODEL_CONSTRUCTORS:
            raise ValueError(
                f"runtime must be one of {', '.join(MODEL_CONSTRUCTORS)}; got {runtime!r}"
            )
        kinds = _layer_kinds(attn_kind, num_hidden_layers)
        if is_cuda(target):
            arch_of(target)
            if runtime == "stock":
                raise ValueError("for GPUs there are kernels for runtime 'pagedkv' only")
        else:
            require_cpu(target)
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
                    v_head_dim=None if kind == "mla" or "mla" not in kinds else qk_head_dim,
                    window=layer_sliding_window_size if kind == "mha_sliding" else None,
                    mla_original_qk_head_dim=mla_original_qk_head_dim if kind == "mla" else None,
                    mla_original_v_head_dim=mla_original_v_head_dim if kind == "mla" else None,
                )
                for kind in kinds
            ],
            logit_softcap=logit_softcap,
            alibi=alibi,
        )
        if runtime == "stock" and "mla" in kinds and not _MHA_KINDS.isdisjoint(kinds):
            raise ValueError(
                "the stock runtime has one copy_single_page for all layers, and the pages of 'mla' "
                "layers have another shape than those of the others"
            )
        kernels = _Kernels(
            {
                kind: _spec(config, config.layers[kinds.index(kind)], target)
                for kind in kinds
                if kind != "linear"
            },
            "tirx" if runtime == "stock" else "pagedkv",
            layer_sliding_window_size,
            target,
        )
        builder = relax.BlockBuilder.current()
        if builder is None:
            raise RuntimeError(
                "a PagedKVCache is made while a Relax function is built: in a method that "
                "export_tvm calls, or in a function of a relax.BlockBuilder"
            )
        # A symbolic value is known only when the cache is created.
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
            relax.ShapeExpr([_KIND_NUMBERS[kind] for kind in kinds]),
            relax.prim_value(enable_disaggregation),
            relax.prim_value(int(rope_mode)),
            relax.prim_value(rope_scale),
            relax.prim_value(rope_theta),
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


def _spec(config: KVCacheConfig, layer: LayerSpec, target: Target) -> KernelSpec:
    if is_cuda(target):
        return cuda_spec(kernel_spec(config, layer, resolve_target()))
    return kernel_spec(config, layer, target)


class _Kernels:
    """Lists the kernels of a cache for the positional constructor, and compiles them.

    Parameters
    ----------
    specs : dict
        Layer kind -> KernelSpec.
    tag : {"pagedkv", "tirx"}
        Tag of the kernels: for this package's runtime, or for TVM's.
    window : int
        Window of the "mha_sliding" layers, a constant of kernels for TVM's runtime.
    target : tvm.target.Target
    """

    def __init__(self, specs: dict[str, KernelSpec], tag: str, window: int, target: Target):
        self.tag, self.window, self.kinds = tag, window, set(specs)
        # None if there are no such layers; callers check.
        self.mla = cast(KernelSpec, specs.get("mla"))
        self.mha = cast(KernelSpec, specs.get("mha", specs.get("mha_sliding")))
        self._listed = ModelKernels(target, repr(specs))

    def compile(self) -> list[tvm.runtime.Module]:
        """Compile the kernels that `positional` has listed; return libraries to link."""
        return self._listed.compile()

    def _function(self, name: str, spec: KernelSpec) -> relax.ExternFunc:
        return self._listed.refer(name, repr(spec), partial(build_kernel, name, spec))

    def _tagged(self, *values: relax.Expr) -> relax.Tuple:
        return relax.Tuple([tvm.ir.StringImm(self.tag), *values])

    def _needed(self, kind: str, name: str) -> relax.Tuple:
        if kind not in self.kinds:
            return relax.Tuple([])
        return self._tagged(self._function(name, self.mla if kind == "mla" else self.mha))

    def _sliding(self, name: str, has_windows: bool) -> relax.Tuple:
        """TVM's runtime uses these kernels for windows of layers and of sequences."""
        if self.tag == "tirx" and has_windows and self.kinds == {"mha"}:
            name = name.replace("sliding", "windowed")
            return self._tagged(self._function(name, self.mha))
        if self.tag == "pagedkv" or "mha_sliding" not in self.kinds:
            return self._needed("mha_sliding", name)
        build = partial(getattr(stock_sliding, name), self.mha, self.window)
        key = f"{self.mha} for a window of {self.window}"
        return self._tagged(self._listed.refer(f"stock_{name}", key, build))

    def _of_both(self, name: str, name_of_mla: str | None = None) -> relax.Expr:
        """Return a kernel that both page shapes need: one function, or one per shape."""
        functions = []
        if self.mha:
            functions.append(self._function(name, self.mha))
        if self.mla:
            functions.append(self._function(name_of_mla or name, self.mla))
        return functions[0] if len(functions) == 1 else self._tagged(*functions)

    def positional(self, has_windows: bool) -> list[relax.Expr]:
        """Return arguments 13 to 27 of the positional constructor."""
        null = relax.op.null_value
        return [
            self._function("transpose_append", self.mha) if self.mha else null(),
            self._function("transpose_append_mla", self.mla) if self.mla else null(),
            self._ragged(),
            self._needed("mha", "prefill"),
            self._needed("mha", "decode"),
            self._sliding("prefill_sliding", has_windows),
            self._sliding("decode_sliding", has_windows),
            self._needed("mha", "tree_paged"),
            self._tree(),
            self._needed("mla", "mla_prefill"),
            self._merge(),
            self._rotary(),
            self._of_both("copy_single_page"),
            self._of_both("debug_get_kv", "debug_get_kv_mla"),
            self._of_both("compact_copy"),
        ]

    def _ragged(self) -> relax.Tuple:
        functions = [self._function("prefill_ragged", s) for s in (self.mha, self.mla) if s]
        if self.mla and self.tag == "pagedkv":
            dims = (self.mla.original_qk_head_dim, self.mla.original_v_head_dim)
            functions += [relax.prim_value(dim) for dim in dims]
        return self._tagged(*functions)

    def _tree(self) -> relax.Tuple:
        """Return the tree kernels; TVM's runtime has no trees for MLA layers."""
        specs = [self.mha, self.mla if self.tag == "pagedkv" else None]
        functions = [self._function("tree", spec) for spec in specs if spec]
        return self._tagged(*functions) if functions else relax.Tuple([])

    def _merge(self) -> relax.Tuple:
        """Return the merges of partial states and of `merge_attention`, whose MLA o is wider."""
        of_parts = self.mha or replace(self.mla, original_qk_head_dim=0, original_v_head_dim=0)
        specs = (of_parts, self.mla or self.mha)
        return relax.Tuple([self._function("merge", spec) for spec in specs])

    def _rotary(self) -> relax.Expr:
        split_rotary = rope_append = relax.op.null_value()
        if self.mha:
            split_rotary = self._function("split_rotary", self.mha)
        if self.tag == "tirx":
            return split_rotary
        if self.mha:
            rope_append = self._function("rope_append", self.mha)
        page_size = (self.mha or self.mla).page_size
        fixed = split_rotary, rope_append, relax.prim_value(page_size)
        return self._tagged(*fixed, *self._named())

    def _named(self) -> list[relax.Expr]:
        """Return kernels that have no position in the constructor, as names and functions."""
        specs = {}
        if self.mha:
            specs["apply_sinks"] = self.mha
        if "mha" in self.kinds:
            specs["prefill_shared"] = self.mha
        if "mha_sliding" in self.kinds:
            for name in ("prefill_ragged_sliding", "tree_paged_sliding", "tree_sliding"):
                specs[name] = self.mha
        if self.mla:
            specs |= {"mla_prefill_shared": self.mla, "mla_tree": self.mla}
        if not (self.mha and self.mla):  # whose pages differ
            specs["copy_pages"] = self.mha or self.mla
        return [
            each
            for name, spec in specs.items()
            for each in (tvm.ir.StringImm(name), self._function(name, spec))
        ]


def _layer_kinds(attn_kind: str | list[str], num_layers: int) -> list[str]:
    kinds = [attn_kind] * num_layers if isinstance(attn_kind, str) else list(attn_kind)
    if len(kinds) != num_layers:
        raise ValueError(f"attn_kind has {len(kinds)} entries for {num_layers} layers")
    for kind in kinds:
        if kind not in _KIND_NUMBERS:
            raise ValueError(f"attn_kind must be of {', '.join(_KIND_NUMBERS)}; got {kind!r}")
    return kinds


def _with_placeholder_factors(
    rope_scaling: dict[str, Any] | None, rotary_dim: int
) -> dict[str, Any] | None:
    """Add placeholders for longrope factors, which arrive when the cache is created."""
    if not rope_scaling or rope_scaling.get("rope_type", "default") == "default":
        return None
    scaling = dict(rope_scaling)
    if scaling.get("rope_type") == "longrope":
        for key in ("short_factor", "long_factor"):
            scaling.setdefault(key, (1.0,) * (rotary_dim // 2))
    return scaling
