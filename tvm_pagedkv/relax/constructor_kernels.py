# SPDX-License-Identifier: Apache-2.0
"""Arguments of the positional constructor that describe kernels and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from tir_kernels import build_kernel, kernel_names
from tir_kernels.cpu.attention import stock_sliding
from tir_kernels.index_spec import IndexSpec
from tir_kernels.spec import KernelSpec

from ..compiler import architecture, codec_map, index_spec, is_cuda, required_features
from ..config import ResolvedConfig, ResolvedLayer
from .layer_ropes import LayerRope
from .model_kernels import ModelKernels
from .releases import StringImm


def page_types(config: ResolvedConfig) -> dict[str, relax.Expr]:
    """Return the type of pages of "mha" and of "mla" layers, where it is not the dtype."""
    types: dict[str, relax.Expr] = {}
    for layer in config.layers:
        name = "mla_kv_dtype" if layer.kind == "mla" else "kv_dtype"
        if layer.kind not in ("linear", "index") and layer.kv_dtype != config.dtype:
            types[name] = _page_type(config, layer)
    return types


def _page_type(config: ResolvedConfig, layer: ResolvedLayer) -> relax.Expr:
    """Return the type of a layer's pages as the constructor takes it."""
    if layer.codec is None:
        return StringImm(layer.kv_dtype)
    codec, *numbers = codec_map(layer, config.page_size)["codec"].values()
    return relax.Tuple([StringImm(codec), *map(relax.prim_value, numbers)])


@dataclass(frozen=True)
class IndexLanes:
    """What the constructor is told of the index lanes of a model, which are all alike.

    Parameters
    ----------
    spec : IndexSpec
        Of their kernels.
    page_type : relax.Expr
        The type of their pages.
    """

    spec: IndexSpec
    page_type: relax.Expr

    @staticmethod
    def of(config: ResolvedConfig, target: Target) -> IndexLanes | None:
        """Return those of a configuration, if it has any."""
        lanes = [layer for layer in config.layers if layer.kind == "index"]
        if not lanes:
            return None
        return IndexLanes(index_spec(config, lanes[0], target), _page_type(config, lanes[0]))

    def expression(self, function: Callable[[str, Any], relax.ExternFunc]) -> relax.Tuple:
        """Return the argument of the constructor; `function` makes references to kernels."""
        kernels = [
            each
            for name in kernel_names(self.spec)
            for each in (StringImm(name), function(name, self.spec))
        ]
        shape = relax.prim_value(self.spec.num_heads), relax.prim_value(self.spec.dim)
        return relax.Tuple([*shape, self.page_type, *kernels])


class ConstructorKernels:
    """Lists the kernels of a cache for the positional constructor, and compiles them.

    Parameters
    ----------
    specs : dict
        Kind of kernels -> KernelSpec.
    tag : {"pagedkv", "tirx"}
        Tag of the kernels: for this package's runtime, or for TVM's.
    window : int
        Window of the "mha_sliding" layers, a constant of kernels for TVM's runtime.
    target : tvm.target.Target
    page_types : dict
        What the constructor is told of the pages of layers, by its names.
    layer_ropes : sequence of LayerRope
        Where layers differ in more than the mode of their rotations.
    index_lanes : IndexLanes, optional
    kv_scales : float32 array ``[layers, 2, KV heads]``, optional
        Static scales.
    """

    def __init__(
        self,
        specs: dict[str, KernelSpec],
        tag: str,
        window: int,
        target: Target,
        page_types: dict[str, relax.Expr],
        layer_ropes: Sequence[LayerRope] = (),
        index_lanes: IndexLanes | None = None,
        kv_scales: np.ndarray | None = None,
    ):
        self.tag, self.window, self.kinds = tag, window, set(specs)
        self.page_types, self.layer_ropes = page_types, layer_ropes
        self.index_lanes, self.kv_scales = index_lanes, kv_scales
        # None if there are no such layers; callers check.
        self.mla = cast(KernelSpec, specs.get("mla", specs.get("mla_sliding")))
        self.mha = cast(KernelSpec, specs.get("mha", specs.get("mha_sliding")))
        self._target = target
        self._listed = ModelKernels(
            target, repr([specs, *layer_ropes, index_lanes and index_lanes.spec])
        )

    def compile(self) -> list[tvm.runtime.Module]:
        """Compile the kernels that `positional` has listed; return libraries to link."""
        return self._listed.compile()

    def _function(self, name: str, spec: KernelSpec | IndexSpec) -> relax.ExternFunc:
        return self._listed.refer(name, repr(spec), partial(build_kernel, name, spec))

    def _tagged(self, *values: relax.Expr) -> relax.Tuple:
        return relax.Tuple([StringImm(self.tag), *values])

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
        """Return what has no position in the constructor: names with kernels, page types, CPU."""
        specs = {}
        if self.mha and not self.mha.sink_logits:
            specs["apply_sinks"] = self.mha
        if "mha" in self.kinds:
            specs["prefill_shared"] = self.mha
            if "append_prefill" in kernel_names(self.mha):
                specs["append_prefill"] = self.mha
            if self.mha.spans:
                specs["prefill_spans"] = self.mha
        if "mha_sliding" in self.kinds:
            for name in ("prefill_ragged_sliding", "tree_paged_sliding", "tree_sliding"):
                specs[name] = self.mha
            if self.mha.spans:
                specs["prefill_spans_sliding"] = self.mha
        if self.mla and self.kinds & {"mla"}:
            specs |= {"mla_prefill_shared": self.mla, "mla_tree": self.mla}
        if "mla_sliding" in self.kinds:
            of_rows = "prefill_ragged_sliding", "tree_sliding"
            specs |= dict.fromkeys(("mla_prefill_sliding", "mla_tree_sliding", *of_rows), self.mla)
        if not (self.mha and self.mla):  # whose pages differ
            specs["copy_pages"] = self.mha or self.mla
        if (self.mha or self.mla).lists:  # whose pages are alike
            specs |= dict.fromkeys(("attend_listed", "attend_blocks"), self.mha or self.mla)
        if self.mha and self.mha.page_bounds:
            names = "page_bounds", "choose_pages", "attend_blocks"
            specs |= dict.fromkeys(names, self.mha)
        values = {name: self._function(name, spec) for name, spec in specs.items()}
        if (self.mha or self.mla).sink_logits:  # whose kernels take them
            values["sink_logits"] = relax.prim_value(1)
        others: list[tuple[str, relax.Expr]] = [
            ("rope", rope.expression(self._function)) for rope in self.layer_ropes
        ]
        if self.index_lanes is not None:
            others.append(("index", self.index_lanes.expression(self._function)))
        if self.kv_scales is not None:
            others.append(("kv_scales", relax.const(self.kv_scales)))
        return [
            each
            for name, value in [*(self.page_types | values | self._cpu()).items(), *others]
            for each in (StringImm(name), value)
        ]

    def _cpu(self) -> dict[str, relax.Expr]:
        """Return the CPU that the kernels need, so that the runtime refuses them on others."""
        if is_cuda(self._target):
            return {}
        needed = architecture(self._target), " ".join(required_features(self._target))
        return {"cpu": relax.Tuple([StringImm(text) for text in needed])}
