# SPDX-License-Identifier: Apache-2.0
"""`MixtureOfExperts`: what layers with experts have in place of one MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.expert_config import Experts
from ..config.options import BuildOptions
from ..config.part import LayerPart
from ..kernels.linear.expert_linear import expert_linear, stacked_shape
from ..kernels.linear.packed import encoded_rows, packed_matrix
from ..kernels.rows.routing_kernels import combine, group_pairs, route, scale_pairs
from ..weights.weight_parts import Output, Part, Weight, Weights, rows, slices, vector
from .mlp import Mlp, MlpBlock
from .projections import Linear


class ExpertLinear(nn.Module):
    """The same projection of all experts, over the pairs of token rows and chosen experts."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        experts: Experts,
        options: BuildOptions,
        out_dtype: str,
        *,
        gathers: bool,
        name: str,
    ):
        self.experts, self.gathers, self.out_dtype = experts, gathers, out_dtype
        self.matrix = packed_matrix(f"{name}.weight", out_features, in_features, options)
        shape = stacked_shape(self.matrix, experts.num_experts)
        self.weight = nn.Parameter(shape, self.matrix.dtype)
        self.bias = None
        if experts.bias:
            self.bias = nn.Parameter((experts.num_experts, out_features), options.dtype)

    def forward(self, x: nn.Tensor, order: list[nn.Tensor]) -> nn.Tensor:
        experts, matrix = self.experts, self.matrix
        kernel = expert_linear(
            matrix,
            experts.num_experts,
            experts.num_chosen,
            x.dtype,
            self.out_dtype,
            gathers=self.gathers,
            bias=self.bias is not None,
        )
        out = nn.Tensor.placeholder((order[0].shape[0], matrix.out_features), self.out_dtype)
        biases = [] if self.bias is None else [self.bias]
        inputs = [*encoded_rows(matrix, x), self.weight, *biases, *order]
        return op.tensor_ir_op(kernel, "expert_linear", inputs, out)


@dataclass(frozen=True)
class MixtureOfExperts(LayerPart):
    """Experts, of which each row takes some, and an expert that all rows share.

    Parameters
    ----------
    experts : Experts
    mlp : Mlp
        The activation of all experts; of the shared one also biases, factors and names.
    """

    experts: Experts
    mlp: Mlp

    @property
    def shared(self) -> Mlp:
        """The shared expert."""
        return replace(self.mlp, width=self.experts.shared_width)

    @property
    def routed(self) -> Experts:
        return self.experts

    @property
    def shared_counts(self) -> dict[str, int]:
        return {"intermediate_size": self.mlp.width}

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> MixtureOfExpertsBlock:
        return MixtureOfExpertsBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        block = self.experts.names.block
        theirs = f"{theirs}.{block}" if block else theirs
        experts, names, hidden = self.experts, self.experts.names, config.hidden_size
        router = [Output(names.router, experts.num_experts)]
        yield from rows(
            f"{ours}.router", theirs, router, hidden, bias=experts.router_bias, is_split=False
        )
        if experts.has_correction:
            yield vector(f"{ours}.correction", f"{theirs}.{names.correction}", experts.num_experts)
        if experts.has_expert_scale:
            yield vector(
                f"{ours}.expert_scale", f"{theirs}.{names.expert_scale}", experts.num_experts
            )
        yield from _of_experts(
            f"{ours}.gate_up", theirs, _gate_up(experts), experts, hidden, "rows"
        )
        down = [Output(names.down, hidden)]
        yield from _of_experts(f"{ours}.down", theirs, down, experts, experts.width, "columns")
        if experts.shared_width:
            both = f"{ours}.shared", f"{theirs}.{names.shared}"
            yield from self.shared.weights_in(config, *both)
        if experts.shared_gate:
            gate = [Output(names.shared_gate, 1)]
            yield from rows(f"{ours}.shared_gate", theirs, gate, hidden, is_split=False)


class MixtureOfExpertsBlock(nn.Module):
    """Routes each row to some experts, and adds their outputs and that of a shared expert."""

    def __init__(
        self, part: MixtureOfExperts, config: DecoderConfig, options: BuildOptions, name: str
    ):
        experts, hidden = part.experts, config.hidden_size
        self.experts, self.options, self.hidden = experts, options, hidden
        self.width = experts.width // options.num_shards
        self._gated = part.mlp.gated
        self.router = Linear(
            hidden, experts.num_experts, options, experts.router_bias, "float32",
            name=f"{name}.router",
        )  # fmt: skip
        self.correction = None
        if experts.has_correction:
            self.correction = nn.Parameter((experts.num_experts,), "float32")
        self.expert_scale = None
        if experts.has_expert_scale:
            self.expert_scale = nn.Parameter((experts.num_experts,), "float32")
        self.gate_up = ExpertLinear(
            hidden, 2 * self.width, experts, options, options.dtype, gathers=True,
            name=f"{name}.gate_up",
        )  # fmt: skip
        self.down = ExpertLinear(
            self.width, hidden, experts, options, "float32", gathers=False, name=f"{name}.down"
        )
        self.shared = self.shared_gate = None
        if experts.shared_width:
            self.shared = MlpBlock(part.shared, config, options, f"{name}.shared")
        if experts.shared_gate:
            self.shared_gate = Linear(
                hidden, 1, options, out_dtype="float32", name=f"{name}.shared_gate"
            )

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, routed_by: nn.Tensor | None = None
    ) -> nn.Tensor:
        """Return the sum; rows are routed by themselves unless `routed_by` has others for them."""
        options, pairs = self.options, x.shape[0] * self.experts.num_chosen
        ids, factors = self._route(x if routed_by is None else routed_by)
        order = self._group(ids)
        kernel = self._gated(self.width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((pairs, self.width), options.dtype)
        gate_up = self.gate_up(x, order)
        if self.experts.scales_inputs:  # their projections are linear
            gate_up, factors = self._scale(gate_up, factors, order[0]), None
        gated = op.tensor_ir_op(kernel, "gated", [gate_up], out)
        total, num_chosen = self.down(gated, order), self.experts.num_chosen
        if options.num_shards > 1:  # each worker has a part of every expert
            total = self._combine(x.shape[0], total, num_chosen, factors)
            total = op.ccl_allreduce(total, "sum")
            factors, num_chosen = None, 1
        shared = None if self.shared is None else self.shared(x, None)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        added = shared, gate, residual
        return self._combine(x.shape[0], total, num_chosen, factors, options.dtype, added)

    def _scale(self, x: nn.Tensor, factors: nn.Tensor, pairs: nn.Tensor) -> nn.Tensor:
        kernel = scale_pairs(2 * self.width, self.experts.num_chosen, x.dtype, self.options.vector)
        out = nn.Tensor.placeholder(x.shape, x.dtype)
        return op.tensor_ir_op(kernel, "scale_pairs", [x, factors, pairs], out)

    def _route(self, x: nn.Tensor) -> list[nn.Tensor]:
        """Return the chosen experts of each row, and their factors."""
        shape = (x.shape[0], self.experts.num_chosen)
        outs = [nn.Tensor.placeholder(shape, dtype) for dtype in ("int32", "float32")]
        chosen = (each for each in (self.correction, self.expert_scale) if each is not None)
        inputs = [self.router(x), *chosen]
        kernel = route(self.experts, self.options.vector)
        return list(op.tensor_ir_op(kernel, "route", inputs, outs))

    def _group(self, ids: nn.Tensor) -> list[nn.Tensor]:
        """Return pairs, tasks and the number of tasks."""
        pairs = ids.shape[0] * self.experts.num_chosen
        outs = [nn.Tensor.placeholder(shape, "int32") for shape in ((pairs,), (pairs, 3), (1,))]
        kernel = group_pairs(self.experts, self.options.vector)
        return list(op.tensor_ir_op(kernel, "group_pairs", [ids], outs))

    def _combine(
        self,
        num_rows: tirx.Expr | int,
        x: nn.Tensor,
        num_chosen: int,
        factors: nn.Tensor | None,
        out_dtype: str = "float32",
        added: tuple[nn.Tensor | None, ...] = (None, None, None),
    ) -> nn.Tensor:
        shared, gate, residual = added
        kernel = combine(
            self.hidden,
            num_chosen,
            out_dtype,
            self.options.vector,
            weighted=factors is not None,
            shared=None if shared is None else shared.dtype,
            shared_gate=gate is not None,
            residual=None if residual is None else residual.dtype,
        )
        inputs = [x, *(each for each in (factors, *added) if each is not None)]
        out = nn.Tensor.placeholder((num_rows, self.hidden), out_dtype)
        return op.tensor_ir_op(kernel, "combine", inputs, out)


def _gate_up(experts: Experts) -> list[Output]:
    """Return the output features of gate and up of an expert."""
    names, width = experts.names, experts.width
    if names.fused_gate_up is None:
        return [Output(name, width) for name in (names.gate, names.up)]
    if names.alternates:
        return [Output(names.fused_gate_up, width, begin, 2, width) for begin in range(2)]
    return slices(names.fused_gate_up, width, width)


def _of_experts(
    ours: str, theirs: str, outputs: list[Output], experts: Experts, in_features: int, split: str
) -> Weights:
    """Yield a projection of all experts, and its biases."""
    names, count = experts.names, experts.num_experts

    def part(output: Output, expert: int, kind: str) -> Part:
        is_transposed = names.is_transposed and kind == "weight"
        found = output.part(theirs, kind, (in_features,) if kind == "weight" else ())
        return found._replace(
            name=f"{theirs}.{names.tensor(expert, output.name, kind)}",
            shape=found.shape[::-1] if is_transposed else found.shape,
            expert=(expert, count) if names.is_stacked else None,
            transposed=is_transposed,
        )

    for kind in ("weight", "bias") if experts.bias else ("weight",):
        parts = tuple(part(each, expert, kind) for expert in range(count) for each in outputs)
        is_sum = kind == "bias" and split == "columns"  # to which one worker adds the bias
        yield (
            f"{ours}.{kind}",
            Weight(parts, kind == "weight", "first" if is_sum else split, experts=count),
        )
