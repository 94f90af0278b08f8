# SPDX-License-Identifier: Apache-2.0
"""Keys of GGUF files that change nothing, whatever they say or at the values that they have.

Converters write keys that an architecture does not use: zero shared experts, a linear factor of 1,
the size of the vocabulary. A key that no architecture reads must be neutral here to be ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Keys = Mapping[str, Any]  # those below the architecture, without its name
Neutral = Callable[[Any, Keys], bool]


def _always(value: Any, keys: Keys) -> bool:
    """It describes the file, or what this model does not have."""
    return True


def _is(*neutral: Any) -> Neutral:
    """It is one of these values, once or for each layer."""
    return lambda value, keys: all(
        each in neutral for each in (value if isinstance(value, list) else [value])
    )


def _same_as(other: str) -> Neutral:
    """It says what another key says as well."""
    return lambda value, keys: other in keys and value == keys[other]


def _without(other: str) -> Neutral:
    """It is about something that the model does not have, as another key is absent or 0."""
    return lambda value, keys: not keys.get(other)


def _without_yarn(value: Any, keys: Keys) -> bool:
    return keys.get("rope.scaling.type") != "yarn"


def _beyond_context(value: Any, keys: Keys) -> bool:
    """It is a window that no text of the model is longer than."""
    length = keys.get("context_length")
    return isinstance(value, int) and isinstance(length, int) and value >= length


def _default_scale(value: Any, keys: Keys) -> bool:
    """It is the softmax scale that follows from the width of a head."""
    heads, width = keys.get("attention.head_count"), keys.get("embedding_length")
    if not (isinstance(heads, int) and isinstance(width, int) and isinstance(value, float)):
        return False
    head_dim = keys.get("attention.key_length", width // max(heads, 1))
    return math.isclose(value, head_dim**-0.5, rel_tol=1e-6)


def _all_shared(value: Any, keys: Keys) -> bool:
    """It is the width of all shared experts, which that of one gives as well."""
    count, width = keys.get("expert_shared_count"), keys.get("expert_feed_forward_length")
    return isinstance(count, int) and isinstance(width, int) and value == count * width


_OFF, _OFF_OR_ONE = _is(0), _is(0, 1)
_NO_EXPERTS = _without("expert_count")

NEUTRAL: dict[str, tuple[Neutral, ...]] = {
    "vocab_size": (_always,),
    "tensor_data_layout": (_always,),
    "pooling_type": (_always,),
    # Of the norm that the architecture does not have; it reads that of its own.
    "attention.layer_norm_epsilon": (_always,),
    "attention.layer_norm_rms_epsilon": (_always,),
    "embedding_length_out": (_same_as("embedding_length"),),
    "embedding_length_per_layer_input": (_OFF,),
    "use_parallel_residual": (_OFF,),
    "swin_norm": (_OFF,),
    "n_deepstack_layers": (_OFF,),
    # Scales and caps, which 0 turns off.
    "logit_scale": (_OFF_OR_ONE,),
    "residual_scale": (_OFF_OR_ONE,),
    "embedding_scale": (_OFF_OR_ONE,),
    "attn_logit_softcapping": (_OFF,),
    "router_logit_softcapping": (_OFF,),
    "final_logit_softcapping": (_OFF,),
    "swiglu_clamp_exp": (_OFF,),
    "swiglu_clamp_shexp": (_OFF,),
    # Attention.
    "attention.scale": (_OFF, _default_scale),
    "attention.output_scale": (_OFF_OR_ONE,),
    "attention.temperature_length": (_OFF,),
    "attention.temperature_scale": (_OFF,),
    "attention.max_alibi_bias": (_OFF,),
    "attention.clamp_kqv": (_OFF,),
    "attention.q_lora_rank": (_OFF,),
    "attention.kv_lora_rank": (_OFF,),
    "attention.key_length_mla": (_OFF,),
    "attention.value_length_mla": (_OFF,),
    "attention.shared_kv_layers": (_OFF,),
    "attention.sliding_window": (_OFF, _beyond_context),
    "attention.sliding_window_pattern": (_OFF, _without("attention.sliding_window")),
    "attention.key_length_swa": (_same_as("attention.key_length"),),
    "attention.value_length_swa": (_same_as("attention.value_length"),),
    # Rotation.
    "rope.freq_base_swa": (_same_as("rope.freq_base"),),
    "rope.dimension_count_swa": (_same_as("rope.dimension_count"),),
    "rope.dimension_sections": (_OFF,),
    "rope.scaling.finetuned": (_always,),
    "rope.scaling.alpha": (_OFF_OR_ONE,),
    "rope.scaling.attn_factor": (_OFF_OR_ONE,),
    "rope.scaling.yarn_attn_factor": (_is(1), _without_yarn),
    "rope.scaling.yarn_ext_factor": (_is(1, -1), _without_yarn),
    "rope.scaling.yarn_log_multiplier": (_OFF, _without_yarn),
    "rope.scaling.yarn_beta_fast": (_without_yarn,),
    "rope.scaling.yarn_beta_slow": (_without_yarn,),
    # Experts.
    "leading_dense_block_count": (_OFF, _NO_EXPERTS),
    "moe_every_n_layers": (_OFF_OR_ONE, _NO_EXPERTS),
    "interleave_moe_layer_step": (_OFF_OR_ONE, _NO_EXPERTS),
    "moe_latent_size": (_OFF, _NO_EXPERTS),
    "expert_used_count": (_OFF, _NO_EXPERTS),
    "expert_shared_count": (_OFF, _NO_EXPERTS),
    "expert_feed_forward_length": (_OFF, _NO_EXPERTS),
    "expert_shared_feed_forward_length": (_OFF, _NO_EXPERTS, _all_shared),
    "expert_chunk_feed_forward_length": (_OFF, _NO_EXPERTS),
    "expert_group_count": (_OFF_OR_ONE, _NO_EXPERTS),
    "expert_group_used_count": (_OFF_OR_ONE, _NO_EXPERTS),
    "expert_group_scale": (_OFF_OR_ONE, _NO_EXPERTS),
    "expert_weights_scale": (_OFF_OR_ONE, _NO_EXPERTS),
    "expert_weights_norm": (_is(True), _NO_EXPERTS),  # architectures that do not read it divide
    "expert_gating_func": (_OFF, _NO_EXPERTS),
}


def is_neutral(name: str, value: Any, keys: Keys) -> bool:
    """Return whether a key that the architecture does not read changes nothing.

    Parameters
    ----------
    name : str
        Such as "rope.freq_base".
    value : bool, int, float, str or list
    keys : mapping
        All keys of the architecture by such names.
    """
    return any(holds(value, keys) for holds in NEUTRAL.get(name, ()))
