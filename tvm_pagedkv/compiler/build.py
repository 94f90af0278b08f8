# SPDX-License-Identifier: Apache-2.0
"""Compilation of the kernels of a configuration for a target, with a disk cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import tvm
from tvm.target import Target

import tir_kernels
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.index_spec import IndexSpec
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import KernelSpec, RopeSpec

from ..config import (
    MHA_KINDS,
    WINDOW_KINDS,
    KVCacheConfig,
    ResolvedConfig,
    ResolvedLayer,
    RopeConfig,
)
from .codec_cost import warn_if_slow
from .cuda.build import build_cuda_set, cuda_spec
from .disk_cache import code_versions, library_file, load_library
from .lowering import KernelObjects, kernel_symbol
from .progress import compiling
from .recurrent_specs import conv_spec, describe, index_spec, recurrent_spec
from .targets import is_cuda, require_runnable, resolve_target, vector_target

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("build.py", "lowering.py"))


@dataclass(frozen=True)
class KernelSets:
    """Compiled kernels of a cache: layers with equal specs share a set.

    Parameters
    ----------
    sets : tuple of mappings
        Kernel name -> function.
    layer_sets, conv_sets : tuple of int
        Index of the set of each layer, and of its short convolution; 0 where it needs no kernels.
    target : tvm.target.Target
    """

    sets: tuple[Mapping[str, tvm.ffi.Function], ...]
    layer_sets: tuple[int, ...]
    conv_sets: tuple[int, ...]
    target: Target

    @property
    def kernels(self) -> Mapping[str, tvm.ffi.Function]:
        """The only set; a ValueError if there are several."""
        if len(self.sets) != 1:
            raise ValueError(f"the layers need {len(self.sets)} kernel sets; use `sets`")
        return self.sets[0]


def kernel_spec(config: ResolvedConfig, layer: ResolvedLayer, target: Target) -> KernelSpec:
    """Return the spec of a layer's kernels. Layers with equal specs share kernels."""
    assert layer.kv_dtype is not None, "kernels are for layers that keep K and V"
    rope = _kernel_rope(config, layer)
    is_mla = layer.kind == "mla"
    rotary_dim = rope.rotary_dim or layer.qk_head_dim
    rope_spec = RopeSpec(rope.theta, rope.scale, rotary_dim, rope.scaling)
    return KernelSpec(
        num_qo_heads=layer.num_qo_heads,
        num_kv_heads=layer.num_kv_heads,
        qk_head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        dtype=config.dtype,
        kv_dtype=layer.kv_dtype,
        page_size=config.page_size,
        rope=RopeSpec(rotary_dim=0) if is_mla else rope_spec,
        target=vector_target(target),
        kind=_kernel_kind(layer),
        logit_softcap=config.logit_softcap,
        alibi_slopes=layer.alibi,
        original_qk_head_dim=layer.mla_original_qk_head_dim or 0,
        original_v_head_dim=layer.mla_original_v_head_dim or 0,
        lists=layer.lists,
        page_bounds=layer.page_bounds,
        sink_logits=layer.sink_logits,
        static_scales=layer.kv_scales is not None,
        spans=config.spans and layer.kind in MHA_KINDS,
    )


def _kernel_kind(layer: ResolvedLayer) -> str:
    """Return the kind of the layer's kernels. All windows share kernels, which take them."""
    if layer.kind in WINDOW_KINDS:
        return "mha_sliding"
    return "mla_sliding" if layer.kind == "mla" and layer.window else layer.kind


def _kernel_rope(config: ResolvedConfig, layer: ResolvedLayer) -> RopeConfig:
    """Return the rotation that the kernels of a layer are compiled with.

    An argument turns it off, so a layer without RoPE shares the kernels of one like it with RoPE.
    """
    if layer.rope.mode != "none":
        return layer.rope
    for other in config.layers:
        depends_on_length = other.rope.scaling_dict.get("rope_type") == "longrope"
        if other.rope.mode == "none" or depends_on_length:
            continue
        if replace(other, rope=layer.rope, window=layer.window, kv_scales=layer.kv_scales) == layer:
            return other.rope
    return layer.rope


def build_kernels(
    config: KVCacheConfig,
    target: Target | str | Mapping | None = None,
    progress: Callable[[str], None] | None = None,
    archs: Sequence[str] | None = None,
) -> KernelSets:
    """Compile the kernels of a configuration, or load them from the disk cache.

    Parameters
    ----------
    config : KVCacheConfig
        Its capacities do not matter: caches of any size share kernels.
    target : str, mapping or tvm.target.Target, optional
        A CPU, as `resolve_target` takes it, or "cuda" or a TVM target of that kind. Kernels for
        GPUs need nvcc, but no GPU.
    progress : callable, optional
        Called with a line of text before and after a compilation, which is logged as well.
    archs : sequence of str, optional
        Compute capabilities of GPUs to compile for, such as ("80", "90"); None: all. PTX for later
        ones is always included.

    Returns
    -------
    KernelSets

    Raises
    ------
    ValueError
        If the target or an architecture has no kernels, or if this CPU cannot run them.
    RuntimeError
        If compiling or linking fails; the message says what is missing.
    """
    if not is_cuda(target):  # before what takes seconds
        require_runnable(resolve_target(target))
    return load_libraries(build_libraries(config, target, progress, archs))


def load_libraries(built: KernelLibraries) -> KernelSets:
    """Load kernels; a ValueError if this CPU cannot run them."""
    return KernelSets(
        sets=tuple(_load(symbols, file, built.target) for symbols, file in built.libraries),
        layer_sets=built.layer_sets,
        conv_sets=built.conv_sets,
        target=built.target,
    )


@dataclass(frozen=True)
class KernelLibraries:
    """`KernelSets` on disk: for each set, the symbols by kernel name, and the library."""

    libraries: tuple[tuple[Mapping[str, str], Path], ...]
    layer_sets: tuple[int, ...]
    conv_sets: tuple[int, ...]
    target: Target


def build_libraries(
    config: KVCacheConfig,
    target: Target | str | Mapping | None = None,
    progress: Callable[[str], None] | None = None,
    archs: Sequence[str] | None = None,
) -> KernelLibraries:
    """Compile kernels as `build_kernels` does, without loading them.

    The target can be another machine than this one. Parameters and errors are those of
    `build_kernels`.
    """
    on_gpu = is_cuda(target)
    if archs is not None and not on_gpu:
        raise ValueError(f'archs are for target "cuda", got target {target!r}')
    cpu = resolve_target(None if on_gpu else target)
    sets = spec_sets(config.resolved(), target)

    def build(
        spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec,
    ) -> tuple[Mapping[str, str], Path]:
        return build_cuda_set(spec, archs, progress) if on_gpu else _build_set(spec, cpu, progress)

    return KernelLibraries(
        libraries=tuple(build(spec) for spec in sets.specs),
        layer_sets=sets.layer_sets,
        conv_sets=sets.conv_sets,
        target=Target({"kind": "cuda", "arch": "sm_80"}) if on_gpu else cpu,
    )


@dataclass(frozen=True)
class SpecSets:
    """The specs of a configuration's kernels, each once, and the index of each layer's spec.

    `layer_sets` and `conv_sets` are those of `KernelSets`.
    """

    specs: tuple[KernelSpec | RecurrentSpec | ConvSpec | IndexSpec, ...]
    layer_sets: tuple[int, ...]
    conv_sets: tuple[int, ...]


def spec_sets(
    config: ResolvedConfig,
    target: Target | str | Mapping | None = None,
    arch: str | None = None,
) -> SpecSets:
    """Return the specs of the kernels of a configuration for a target.

    Parameters
    ----------
    config : ResolvedConfig
    target : str, mapping or tvm.target.Target, optional
        As for `build_kernels`.
    arch : str, optional
        A compute capability, if the kernels are for such GPUs alone.

    Raises
    ------
    ValueError
        If the target has no kernels for a layer.
    """
    on_gpu = is_cuda(target)
    if on_gpu and any(layer.lists or layer.kind == "index" for layer in config.layers):
        raise ValueError("attention to lists has kernels for CPUs only")
    if on_gpu and any(layer.page_bounds for layer in config.layers):
        raise ValueError("bounds of pages have kernels for CPUs only")
    cpu = resolve_target(None if on_gpu else target)
    of_layers, of_convs = (
        [spec and cuda_spec(spec, arch) if on_gpu else spec for spec in each]
        for each in (
            [_layer_spec(config, layer, cpu) for layer in config.layers],
            [conv_spec(config, layer, cpu) for layer in config.layers],
        )
    )
    specs = [spec for spec in dict.fromkeys([*of_layers, *of_convs]) if spec is not None]
    for spec in specs:
        if isinstance(spec, KernelSpec):
            warn_if_slow(spec)
    return SpecSets(
        specs=tuple(specs),
        layer_sets=tuple(specs.index(spec) if spec else 0 for spec in of_layers),
        conv_sets=tuple(specs.index(spec) if spec else 0 for spec in of_convs),
    )


def _layer_spec(
    config: ResolvedConfig, layer: ResolvedLayer, target: Target
) -> KernelSpec | RecurrentSpec | IndexSpec | None:
    """Return the spec of a layer's kernels, those of its short convolution apart."""
    if layer.kind == "index":
        return index_spec(config, layer, target)
    if layer.recurrent is not None:
        return recurrent_spec(config, layer.recurrent, target)
    return kernel_spec(config, layer, target) if layer.keeps_kv else None


def _build_set(
    spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec,
    target: Target,
    progress: Callable[[str], None] | None,
) -> tuple[Mapping[str, str], Path]:
    builders = {
        name: functools.partial(tir_kernels.build_kernel, name, spec)
        for name in tir_kernels.kernel_names(spec)
    }
    what = f"{len(builders)} kernels: {_describe(spec)}"
    return _library_of(builders, (what, repr(spec)), target, progress)


def _describe(spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec) -> str:
    """Return a few words about the kernels, for the log."""
    if not isinstance(spec, KernelSpec):
        return describe(spec)
    return (
        f"{spec.num_qo_heads}/{spec.num_kv_heads} heads of {spec.qk_head_dim}, {spec.dtype}, pages "
        f"of {spec.page_size} {spec.kv_dtype}"
    )


def _load(symbols: Mapping[str, str], file: Path, target: Target) -> Mapping[str, tvm.ffi.Function]:
    module = load_library(file, target)
    return MappingProxyType({name: module[symbol] for name, symbol in symbols.items()})


def load_kernels(
    builders: Mapping[str, Callable],
    key: tuple[str, ...],
    target: Target,
    progress: Callable[[str], None] | None = None,
) -> Mapping[str, tvm.ffi.Function]:
    """Compile kernels into one library, or load it from the disk cache.

    Parameters
    ----------
    builders : mapping
        Name -> callable that returns a PrimFunc.
    key : tuple of str
        A description for the log, then everything that decides the code besides the sources.
    target : tvm.target.Target
    progress : callable, optional
        Called with a line of text before and after a compilation, which is logged as well.

    Returns
    -------
    mapping
        Name -> function.

    Raises
    ------
    ValueError
        If this CPU cannot run code for the target.
    """
    return _load(*_library_of(builders, key, target, progress), target)


def _library_of(
    builders: Mapping[str, Callable],
    key: tuple[str, ...],
    target: Target,
    progress: Callable[[str], None] | None,
) -> tuple[Mapping[str, str], Path]:
    def compile_all() -> KernelObjects:
        with compiling(key[0], progress):
            return KernelObjects({symbols[name]: builders[name] for name in builders}, target)

    symbols = {name: kernel_symbol(name, "\n".join(key[1:]), target) for name in builders}
    versions = code_versions(*_SOURCES, Path(tir_kernels.__file__).parent)
    return symbols, library_file([*key, str(target), *versions], compile_all)
