# SPDX-License-Identifier: Apache-2.0
"""The kernels inside apache-tvm, and the positional constructor that both runtimes take."""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import tvm
from tvm.relax.frontend.nn.llm import kv_cache as stock
from tvm.s_tir import dlight
from tvm_ffi import Shape

STOCK_PAGE_SIZE = 16


def stock_kernels(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    *,
    num_layers: int = 1,
    rope_theta: float = 1e4,
    rope_scaling: dict | None = None,
    target: tvm.target.Target | str = "llvm",
    only: Collection[str] | None = None,
) -> dict[str, tvm.ffi.Function]:
    """Build the stock CPU kernels, under the names that `pagedkv.create` uses, or `only` some."""
    scaling = dict(rope_scaling or {})
    heads = (num_kv_heads, num_qo_heads)
    functions = {
        "transpose_append": stock._kv_cache_transpose_append(num_kv_heads, head_dim, dtype),
        "prefill_ragged": stock._attention_prefill_ragged_cpu(
            *heads, head_dim, head_dim, dtype, scaling
        ),
        "prefill": stock._attention_prefill_cpu(*heads, head_dim, dtype, False, scaling),
        "decode": stock._attention_decode_cpu(*heads, head_dim, dtype, False, scaling),
        "prefill_sliding": stock._attention_prefill_cpu(*heads, head_dim, dtype, True, scaling),
        "decode_sliding": stock._attention_decode_cpu(*heads, head_dim, dtype, True, scaling),
        "merge": stock._merge_state_inplace_cpu(dtype),
        "split_rotary": stock.llama_rope_with_position_map(
            rope_theta, 1.0, head_dim, num_qo_heads, num_kv_heads, dtype, scaling, head_dim
        ),
        "copy_single_page": stock._copy_single_page_cpu(
            num_kv_heads, STOCK_PAGE_SIZE, head_dim, dtype
        ),
        "debug_get_kv": stock._kv_cache_debug_get_kv(num_layers, num_kv_heads, head_dim, dtype),
        "compact_copy": stock._compact_kv_copy_cpu(num_kv_heads, head_dim, dtype),
    }
    module = tvm.IRModule(
        {
            name: function.with_attr("global_symbol", f"stock_{name}")
            for name, function in functions.items()
            if only is None or name in only
        }
    )
    built = tvm.tirx.build(module, target=tvm.target.Target(target))
    return {name: built[f"stock_{name}"] for name in only or functions}


def stock_cuda_kernels(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: str, target: tvm.target.Target
) -> dict[str, tvm.ffi.Function]:
    """Build the stock CUDA kernels that plain attention needs, as `stock_kernels` does."""
    module = stock_cuda_module(num_qo_heads, num_kv_heads, head_dim, dtype, target)
    built = tvm.tirx.build(module, target=target)
    symbols = [str(f.attrs["global_symbol"]) for f in module.functions.values()]
    return {symbol.removeprefix("stock_"): built[symbol] for symbol in symbols}


def stock_cuda_module(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: str, target: tvm.target.Target
) -> tvm.IRModule:
    """Return the functions that `stock_cuda_kernels` compiles, under symbols "stock_*"."""
    heads = (num_kv_heads, num_qo_heads)
    functions = {
        "transpose_append": stock._kv_cache_transpose_append(num_kv_heads, head_dim, dtype),
        "prefill_ragged": stock._attention_prefill_ragged(
            *heads, head_dim, head_dim, dtype, {}, target
        ),
        "prefill": stock._attention_prefill(*heads, head_dim, dtype, False, {}, target),
        "decode": stock._attention_decode(*heads, head_dim, dtype, False, {}, target),
        "merge": stock._merge_state_inplace(num_qo_heads, head_dim, dtype, target),
        "split_rotary": stock.llama_rope_with_position_map(
            1e4, 1.0, head_dim, num_qo_heads, num_kv_heads, dtype, {}, head_dim
        ),
        "copy_single_page": stock._copy_single_page(
            num_kv_heads, STOCK_PAGE_SIZE, head_dim, dtype, target
        ),
        "debug_get_kv": stock._kv_cache_debug_get_kv(1, num_kv_heads, head_dim, dtype),
        "compact_copy": stock._compact_kv_copy(num_kv_heads, head_dim, dtype, target),
    }
    module = tvm.IRModule(
        {
            name: function.with_attr("global_symbol", f"stock_{name}")
            for name, function in functions.items()
        }
    )
    with target:  # the unscheduled ones get threads; the others are left as they are
        return dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)


def create_positional(
    config,
    kernels: dict,
    tag: str | None,
    device=None,
    *,
    kinds=None,
    layer_window: int | None = None,
):
    """Create a cache through ``vm.builtin.paged_attention_kv_cache_create``.

    Parameters
    ----------
    config : KVCacheConfig
    kernels : name -> function; of attention also a list of functions
    tag : {"tirx", "flashinfer", None}
        Whose kernels of attention these are; None: those of this package.
    device : optional
        None: the CPU.
    kinds : sequence of int, optional
        Attention kind of each layer; None: 0, plain attention.
    layer_window : int, optional
        The window of layers of kind 3.
    """
    rope = config.rope
    rope_mode = {"none": 0, "normal": 1, "inline": 2}[rope.mode]
    create = tvm.get_global_func("vm.builtin.paged_attention_kv_cache_create")
    numpy_dtype = np.dtype(config.dtype)
    return create(
        Shape(
            [
                config.max_num_sequences,
                config.max_total_tokens,
                config.prefill_chunk_size,
                config.page_size,
                int(config.sliding_window),
                *([] if layer_window is None else [layer_window]),
            ]
        ),
        Shape([0, config.num_layers]),
        config.num_qo_heads,
        config.num_kv_heads,
        config.qk_head_dim,
        config.v_head_dim or config.qk_head_dim,
        Shape(kinds or [0] * config.num_layers),
        config.enable_kv_transfer,
        rope_mode,
        rope.scale,
        rope.theta,
        None,
        tvm.runtime.tensor(np.zeros((), numpy_dtype), device=device or tvm.cpu()),
        kernels["transpose_append"],
        None,
        *(_tagged(tag, kernels[name]) for name in ("prefill_ragged", "prefill", "decode")),
        *(
            _tagged(tag, kernels[name])
            if (config.sliding_window or layer_window) and name in kernels
            else []
            for name in ("prefill_sliding", "decode_sliding")
        ),
        *(
            _tagged(tag, kernels[name]) if name in kernels else []
            for name in ("tree_paged", "tree")
        ),
        [],
        [kernels["merge"]],
        kernels["split_rotary"],
        kernels["copy_single_page"],
        kernels["debug_get_kv"],
        kernels["compact_copy"],
    )


def _tagged(tag: str | None, functions):
    if tag is None:
        return functions
    return [tag, *functions] if isinstance(functions, list) else [tag, functions]
