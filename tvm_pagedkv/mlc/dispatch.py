# SPDX-License-Identifier: Apache-2.0
"""Replacement of the cache that mlc-llm's pass `DispatchKVCacheCreation` makes."""

from __future__ import annotations

import warnings
from typing import Any

from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache

from ..config import ROPE_TYPES
from ..relax import PagedKVCache
from .model_config import attention_of_compiled, warn_if_unknown
from .modules import TRIED_WITH, find
from .patches import Overlay, Patches

# The pass passes these by keyword, with `target`.
_ARGUMENTS = frozenset(
    "attn_kind max_batch_size max_total_seq_len prefill_chunk_size page_size "
    "support_sliding_window layer_partition num_hidden_layers num_attention_heads "
    "num_key_value_heads qk_head_dim v_head_dim mla_original_qk_head_dim mla_original_v_head_dim "
    "rope_mode rope_scale rope_theta rope_scaling rope_ext_factors rotary_dim "
    "enable_disaggregation dtype target".split()
)
# Keys of mlc-llm's dictionaries that `RopeConfig` does not take.
_ROPE_KEYS_OF_MLC = ("inv_theta_log_scale", "rope_theta")


def dispatch_to_our_cache(patches: Patches, flashinfer: bool) -> None:
    """Make mlc-llm's pass create this package's cache.

    Parameters
    ----------
    patches : Patches
    flashinfer : bool
        Whether the pass may also add a creation function for FlashInfer's kernels, which mlc-llm's
        engine prefers.
    """
    name = "DispatchKVCacheCreation"
    dispatch = find("mlc_llm.compiler_pass.dispatch_kv_cache_creation", name, "kv_cache")
    for wanted in ("TIRPagedKVCache", "FlashInferPagedKVCache"):
        if not hasattr(dispatch.kv_cache, wanted):
            raise ImportError(
                f"{dispatch.__name__} makes no kv_cache.{wanted}; tvm_pagedkv.mlc was written for "
                f"{TRIED_WITH}"
            )
    patches.set(dispatch, "kv_cache", Overlay(dispatch.kv_cache, TIRPagedKVCache=create_cache))

    pipeline = find("mlc_llm.compiler_pass.pipeline", name)
    original = pipeline.DispatchKVCacheCreation

    def create_pass(target: Any, allow_flashinfer: bool, metadata: dict[str, Any]) -> Any:
        warn_if_unknown(metadata.get("model_type", ""))
        return original(target, allow_flashinfer and flashinfer, metadata)

    patches.set(pipeline, name, create_pass)


def create_cache(**arguments: Any) -> tvm_kv_cache.PagedKVCache:
    """Make the cache of a model from the arguments of ``TIRPagedKVCache``.

    Returns
    -------
    PagedKVCache
        It has `extern_mods`, its compiled kernels. If RoPE is of a type without kernels here, this
        is TVM's own cache with TVM's kernels, run by this package's runtime object; a warning says
        so.

    Raises
    ------
    TypeError
        If mlc-llm passes other arguments than expected.
    ValueError
        If dimensions or the target have no kernels.
    """
    differing = _ARGUMENTS.symmetric_difference(arguments)
    if differing:
        raise TypeError(
            "mlc-llm makes its cache with other arguments than expected; unknown or missing: "
            f"{', '.join(sorted(differing))}. tvm_pagedkv.mlc was written for {TRIED_WITH}"
        )
    has_rope = arguments["rope_mode"] != tvm_kv_cache.RopeMode.NONE  # or the model rotates
    scaling = has_rope and arguments["rope_scaling"] or {}
    rope_type = scaling.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        warnings.warn(
            f"there are no kernels for RoPE of type {rope_type!r}; this model keeps TVM's kernels",
            RuntimeWarning,
            stacklevel=2,
        )
        return tvm_kv_cache.TIRPagedKVCache(**arguments)
    arguments["rope_scaling"] = {
        key: value for key, value in scaling.items() if key not in _ROPE_KEYS_OF_MLC
    }
    attention = attention_of_compiled(arguments["num_hidden_layers"])
    if attention.kinds is not None:
        arguments["attn_kind"] = list(attention.kinds)
    if attention.window is not None:
        arguments["layer_sliding_window_size"] = attention.window
    return PagedKVCache(**arguments, logit_softcap=attention.logit_softcap)
