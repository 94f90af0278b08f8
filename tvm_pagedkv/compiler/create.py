# SPDX-License-Identifier: Apache-2.0
"""Creation of a cache: compile its kernels and pass its configuration to the runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tvm
from tvm.target import Target
from tvm_ffi import Shape

from ..cache import open_prefix_cache
from ..config import (
    ITEMSIZE,
    MHA_KINDS,
    ROPE_MODES,
    KVCacheConfig,
    ResolvedConfig,
    ResolvedLayer,
    RopeConfig,
)
from .build import KernelLibraries, KernelSets, SpecSets, build_libraries, load_libraries
from .cuda.library import require_code_for
from .targets import is_cuda, require_runnable, resolve_target

if TYPE_CHECKING:
    from ..cache import KVCache

_NO_CUDA = (
    "TVM has no CUDA runtime here, which needs the driver (libcuda.so.1) and libcudart.so of the "
    "CUDA that the apache-tvm wheel is built for"
)


def create(
    config: KVCacheConfig,
    target: Target | str | Mapping | None = None,
    device: tvm.runtime.Device | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> KVCache:
    """Make a cache. Its kernels are compiled, or loaded from the disk cache.

    Parameters
    ----------
    config : KVCacheConfig
    target : str, mapping or tvm.target.Target, optional
        "native" (this machine's CPU), a CPU that LLVM knows such as "x86-64-v3", "cuda", or a TVM
        target. None: "cuda" if `device` is a GPU, else "native".
    device : tvm.runtime.Device, optional
        The device of the pages. None: ``tvm.cuda(0)`` if `target` is "cuda", else the CPU.
    progress : callable, optional
        Called with a line of text before and after a compilation, which is logged as well.

    Returns
    -------
    KVCache
        An empty cache.

    Raises
    ------
    ValueError
        If the target does not fit the device.
    RuntimeError
        If the GPU or its driver is missing, if a compiler is missing (a C++ compiler for CPUs, nvcc
        for GPUs), or if the compiled kernels do not support this GPU.
    MemoryError
        If the device has too little memory; nothing stays allocated.
    """
    device, target = _device_and_target(device, target)
    if not is_cuda(target):  # before what takes seconds
        require_runnable(resolve_target(target))
    built = build_libraries(config, target, progress)
    if is_cuda(target):
        for _, path in built.libraries:
            require_code_for(device, path)
    kernels = load_libraries(built)
    described = config_map(config.resolved(), kernels, device)
    make = tvm.get_global_func("pagedkv.create")
    cache = make(described, [dict(s) for s in kernels.sets], device)
    if config.prefix_cache is not None:
        open_prefix_cache(cache, config.prefix_cache)
    return cache


def _device_and_target(
    device: tvm.runtime.Device | None, target: Target | str | Mapping | None
) -> tuple[tvm.runtime.Device, Target | str | Mapping | None]:
    """Complete the pair, and refuse one that does not fit before anything is compiled."""
    if device is None:
        device = tvm.cuda(0) if is_cuda(target) else tvm.cpu()
    on_gpu = device.dlpack_device_type() == tvm.cuda(0).dlpack_device_type()
    if target is None:
        target = "cuda" if on_gpu else None
    if on_gpu != is_cuda(target):
        raise ValueError(f"target {target!r} is not for device {device}")
    if on_gpu and not tvm.cuda(device.index).exist:
        has_runtime = tvm.get_global_func("device_api.cuda", allow_missing=True) is not None
        missing = "the driver does not have it" if has_runtime else _NO_CUDA
        raise RuntimeError(f"there is no device {device}: {missing}")
    return device, target


def config_map(
    config: ResolvedConfig,
    kernels: KernelSets | KernelLibraries | SpecSets,
    device: tvm.runtime.Device,
) -> dict[str, Any]:
    """Return the configuration as ``pagedkv.create`` and ``pagedkv.create_in_model`` take it."""
    described = {
        "max_num_sequences": config.max_num_sequences,
        "max_total_tokens": config.max_total_tokens,
        "prefill_chunk_size": config.prefill_chunk_size,
        "page_size": config.page_size,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "rope_mode": ROPE_MODES.index(config.layers[0].rope.mode),
        "sliding_window": config.sliding_window,
        "sliding_window_includes_self": config.sliding_window_includes_self,
        "aux_manager": "auto",
        "share_prefix": config.share_prefix,
        "enable_kv_transfer": config.enable_kv_transfer,
        "layers": [
            _layer_map(config, layer, kernel_set, conv_set, device)
            for layer, kernel_set, conv_set in zip(
                config.layers, kernels.layer_sets, kernels.conv_sets, strict=True
            )
        ],
        "layer_indptr": Shape(config.layer_indptr),
        "stage": config.stage,
    }
    factors = _extension_factors(config)
    if factors is not None:
        described["rope_ext_factors"] = _tensor(factors, device)
    return described


def _layer_map(
    config: ResolvedConfig,
    layer: ResolvedLayer,
    kernel_set: int,
    conv_set: int,
    device: tvm.runtime.Device,
) -> dict[str, Any]:
    conv = layer.conv and {
        "kind": "conv",
        "channels": layer.conv.channels,
        "width": layer.conv.width,
        "has_bias": layer.conv.has_bias,
        "history_tokens": layer.recurrent and layer.recurrent.history_tokens,
        "kernel_set": conv_set,
    }
    if layer.kind == "conv":
        return cast(dict, conv)
    recurrent = layer.recurrent
    if recurrent is not None:
        return {
            "kind": "recurrent",
            "num_heads": recurrent.num_heads,
            "num_key_heads": recurrent.num_key_heads,
            "key_dim": recurrent.key_dim,
            "value_dim": recurrent.value_dim,
            "decays_by_channel": recurrent.has_channel_decay,
            "has_beta": recurrent.has_beta,
            "row_width": recurrent.row_bytes(config.dtype) // ITEMSIZE[config.dtype],
            "interval": config.interval_of(layer),
            "history_tokens": recurrent.history_tokens,
            "state_dtype": recurrent.state_dtype,
            "kernel_set": kernel_set,
            **({"conv": conv} if conv else {}),
        }
    return {
        "kind": "mla" if layer.kind == "index" else layer.kind,  # rows without K and V apart
        "window": layer.window or 0,
        "num_qo_heads": layer.num_qo_heads,
        "num_kv_heads": layer.num_kv_heads,
        "qk_head_dim": layer.qk_head_dim,
        "v_head_dim": layer.v_head_dim,
        "rope_mode": ROPE_MODES.index(layer.rope.mode),
        "rope_theta": layer.rope.theta,
        "rope_scale": layer.rope.scale,
        "rope_details": rope_details(layer),
        "kernel_set": kernel_set,
        "kv_dtype": layer.kv_dtype,
        **_codec_map(layer, config.page_size),
        **_original_dims(layer),
        **({"sink_logits": True} if layer.sink_logits else {}),
        **({"kv_scales": _tensor(layer.kv_scales, device)} if layer.kv_scales else {}),
    }


def _tensor(values: Any, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.array(values, np.float32), device=device)


def _codec_map(layer: ResolvedLayer, page_size: int) -> dict[str, dict[str, str | int]]:
    """Return what the runtime knows of the codec of a layer; empty without one."""
    codec = layer.codec
    if codec is None:
        return {}
    widths = layer.qk_head_dim, layer.v_head_dim
    sizes: dict[str, str | int] = {
        "name": codec.name,
        "row_bytes": codec.k.row_bytes(widths[0]),
        "scale_bytes": codec.k.scale_bytes(*widths),
        "page_bytes": layer.page_bytes(page_size),
        "revision": codec.revision,
        "v_row_bytes": codec.v.row_bytes(widths[0]),
        "v_scale_bytes": codec.v.scale_bytes(*widths),
    }
    return {"codec": sizes}


def _original_dims(layer: ResolvedLayer) -> dict[str, int]:
    """Return the head dimensions of an MLA layer before absorption, if they are known."""
    names = ("mla_original_qk_head_dim", "mla_original_v_head_dim")
    return {name: getattr(layer, name) for name in names if getattr(layer, name) is not None}


def rope_details(layer: ResolvedLayer) -> str:
    """Return as text what decides the rotation besides theta, scale and extension factors.

    Checkpoints and transfers compare it.
    """
    rope = layer.rope
    details = {k: v for k, v in rope.scaling or () if k not in ("long_factor", "short_factor")}
    if rope.rotary_dim not in (None, layer.qk_head_dim):
        details["rotary_dim"] = rope.rotary_dim
    return json.dumps(details, sort_keys=True) if details else ""


def _extension_factors(config: ResolvedConfig) -> tuple | None:
    """Return the long factors of longrope, then the short ones: the order of the kernels.

    Layers without a rotation need none; all others must have the same.
    """
    ropes = [layer.rope for layer in config.layers if layer.kind in MHA_KINDS]
    values = {_factors_of(rope) for rope in ropes if rope.mode != "none"}
    if len(values) > 1:
        raise ValueError(
            "layers with a rotation must have the same longrope factors, got "
            f"{sorted(map(str, values))}"
        )
    return values.pop() if values else None


def _factors_of(rope: RopeConfig) -> tuple | None:
    scaling = rope.scaling_dict
    if scaling.get("rope_type") != "longrope":
        return None
    return (*scaling["long_factor"], *scaling["short_factor"])
