# SPDX-License-Identifier: Apache-2.0
"""`Experts`: the shape of a mixture of experts, and how it chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import fields as read


@dataclass(frozen=True)
class ExpertNames:
    """Names and layout of the tensors of a mixture of experts in checkpoints.

    Parameters
    ----------
    block : str
        The part of a layer that has the others.
    router, correction, expert_scale : str
        The router, the tensor that is added to its scores, and the one that multiplies them.
    experts, gate, up, down : str
        The experts, and their projections.
    shared, shared_gate : str
        The shared expert, whose projections are those of a dense MLP, and its gate.
    fused_gate_up : str, optional
        One tensor for gate and up. None: they have tensors of their own.
    alternates : bool
        Whether its rows are of gate and up by turns; otherwise gate precedes up.
    is_stacked : bool
        Whether a tensor has the matrices of all experts, without ``.weight`` in its name.
    is_transposed : bool
        Whether these matrices have a row for each input feature.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    expert_scale: str = "router.per_expert_scale"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    fused_gate_up: str | None = None
    alternates: bool = False
    is_stacked: bool = False
    is_transposed: bool = False

    def tensor(self, expert: int, name: str, kind: str = "weight") -> str:
        """Return the name of the tensor, below `block`, with a projection of an expert."""
        if not self.is_stacked:
            return f"{self.experts}.{expert}.{name}.{kind}"
        return f"{self.experts}.{name}" + ("" if kind == "weight" else f"_{kind}")


@dataclass(frozen=True)
class Experts:
    """The shape of a mixture of experts.

    Parameters
    ----------
    num_experts, num_chosen : int
        Experts of a layer, and how many of them a token takes.
    width : int
        Width of an expert.
    scores : {"softmax", "sigmoid"}
        How the router's logits become scores.
    normalizes : bool
        Whether the scores of the chosen experts are divided by their sum.
    scale : float
        Factor on these scores.
    has_correction : bool
        Whether a bias is added to the scores to choose experts, but not to weight them.
    has_expert_scale : bool
        Whether the factor of each expert is multiplied by a number of the checkpoint.
    num_groups, num_chosen_groups : int
        Groups of consecutive experts. Experts are chosen from the groups whose best ones have the
        largest sums.
    ranked_by : int
        Number of these best ones: 1 or 2.
    shared_width : int
        Width of an expert that every token takes; 0: there is none.
    shared_gate : bool
        Whether the shared expert is multiplied by the sigmoid of a gate.
    scales_inputs : bool
        Whether scores multiply what the chosen experts take, not what they give.
    router_bias, bias : bool
        Whether the router, and the projections of the experts, have biases.
    names : ExpertNames
    """

    num_experts: int
    num_chosen: int
    width: int
    scores: str = "softmax"
    normalizes: bool = True
    scale: float = 1.0
    has_correction: bool = False
    has_expert_scale: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    ranked_by: int = 2
    shared_width: int = 0
    shared_gate: bool = False
    scales_inputs: bool = False
    router_bias: bool = False
    bias: bool = False
    names: ExpertNames = ExpertNames()

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ValueError(
                f"a token takes {self.num_chosen} experts (num_experts_per_tok), and a layer has "
                f"only {self.num_experts}"
            )
        if self.num_experts % self.num_groups or self.num_chosen_groups > self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be chosen from {self.num_chosen_groups} of "
                f"{self.num_groups} groups"
            )
        if self.num_groups > 1:
            size = self.num_experts // self.num_groups
            if size < 2 or self.num_chosen > size * self.num_chosen_groups:
                raise ValueError(
                    f"{self.num_chosen} experts cannot be chosen from {self.num_chosen_groups} "
                    f"groups of {size}"
                )


def num_experts(fields: Mapping[str, Any], default: int) -> int:
    """Return the number of experts of a layer, which has several names."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    given = [name for name in names if fields.get(name) is not None]
    return read.positive(fields, given[0] if given else names[0], default)


def dense_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts: ``mlp_only_layers``, and by ``decoder_sparse_step``."""
    listed, step = fields.get("mlp_only_layers") or [], fields.get("decoder_sparse_step") or 1
    if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {listed!r}")
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"decoder_sparse_step must be a positive integer, got {step!r}")
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def first_dense_layers(fields: Mapping[str, Any], default: int) -> tuple[int, ...]:
    """Return the layers without experts that ``first_k_dense_replace`` counts."""
    count = read.not_negative(fields, "first_k_dense_replace", default)
    return tuple(range(min(count, read.positive(fields, "num_hidden_layers"))))
