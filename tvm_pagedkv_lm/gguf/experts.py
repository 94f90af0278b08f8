# SPDX-License-Identifier: Apache-2.0
"""Names and layout of the tensors of experts in GGUF files, whatever the family.

A tensor has the matrices of all experts of a layer.
"""

from __future__ import annotations

from ..config.expert_config import ExpertNames

NAMES = ExpertNames(is_stacked=True)
# Tensors of a layer -> names of `NAMES`. Those of the experts have no ".weight" there.
TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def tensor_name(layer: str, stem: str, kind: str) -> str:
    """Return the name of a tensor of `TENSORS`, of kind "weight" or "bias"."""
    name = f"model.layers.{layer}.{TENSORS[stem]}"
    if stem.endswith("_exps"):
        return name if kind == "weight" else f"{name}_bias"
    return f"{name}_bias" if stem == "exp_probs_b" else f"{name}.{kind}"
