# SPDX-License-Identifier: Apache-2.0
"""`DecoderLayer`: the parts of a layer, and the norms around them, for all families."""

from __future__ import annotations

from tvm.relax.frontend import nn

from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.layer import Layer
from ..config.options import BuildOptions
from ..weights.weight_parts import Weights, vector
from .altup import AltUp
from .norm import Norm, norm_weight
from .step_rows import StepRows

# Fields of `Layer` -> our names of their modules, by which weights are found.
_MODULES = {
    "attention": ".self_attn",
    "mixer": ".mixer",
    "mlp": ".mlp",
    "beside_mlp": ".beside_mlp",
    "streams": "",  # which has two modules
    "inputs": ".inputs",
}


class DecoderLayer(nn.Module):
    """One layer: attention or a mixer, then the MLP or experts, with norms before or after them.

    Where a layer has attention and a mixer, both see the same rows, and their outputs are added.
    The MLP is beside them as well where it is parallel.
    """

    def __init__(self, config: DecoderConfig, options: BuildOptions, name: str, layer: int):
        shape = config.layers[layer]

        def norm(name: str | None) -> Norm | None:
            return Norm(config, options) if name else None

        modules = {
            field: part.build(config, options, name + _MODULES[field], layer)
            for field, part in shape.parts.items()
        }
        self.self_attn, self.mixer = modules.get("attention"), modules.get("mixer")
        self.mlp, self.beside_mlp = modules.get("mlp"), modules.get("beside_mlp")
        self.altup, self.laurel = modules.get("streams"), None
        if isinstance(shape.streams, AltUp):
            self.laurel = shape.streams.build_laurel(config, options, name)
        self.inputs = modules.get("inputs")
        self.scale = nn.Parameter((1,), "float32") if shape.has_scale else None
        self.is_parallel = shape.parallel_mlp
        self.before_attention = norm(shape.norms.before_attention)
        self.after_attention = norm(shape.norms.after_attention)
        self.before_mlp = norm(shape.norms.before_mlp)
        self.after_mlp = norm(shape.norms.after_mlp)

    def forward(
        self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int, step: StepRows
    ) -> nn.Tensor:
        """Run the layer, whose first layer of the cache is `layer`."""
        if self.altup is None:
            x = self._run(x, cache, layer, step)
            if self.inputs is not None:
                assert step.inputs is not None
                x = self.inputs(x, step.inputs, x, self.scale)
            return x
        predicted = self.altup.predict(x)
        computed = self._run(self.altup.active(predicted), cache, layer, step)
        x = self.altup.correct(predicted, computed)
        if self.inputs is None:
            return x
        assert step.inputs is not None
        active = self.altup.active(x, self.altup.scale)
        return self.altup.add(x, self.inputs(active, step.inputs, None, None))

    def _run(
        self, x: nn.Tensor, cache: PagedKVCacheObject, layer: int, step: StepRows
    ) -> nn.Tensor:
        """Return the rows behind attention and the MLP."""
        beside, behind = (self.mlp, None) if self.is_parallel else (None, self.mlp)

        def attend(inner: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
            total, mixer_layer = residual, layer
            if self.self_attn is not None:
                total = self.self_attn(inner, total, cache, layer, step)
                mixer_layer = layer + 1
            if self.mixer is not None:
                total = self.mixer(inner, total, cache, mixer_layer)
            return total if beside is None else beside(inner, total)

        inner = x if self.before_attention is None else self.before_attention(x)
        x = _add(x, inner, attend, self.after_attention)
        if self.laurel is not None:
            x = self.laurel(x, inner)
        if behind is None:
            return x
        inner, rows = x if self.before_mlp is None else self.before_mlp(x), x

        def compute(inner: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
            if self.beside_mlp is None:
                return behind(inner, residual)
            return self.beside_mlp(rows, behind(inner, residual))

        scale = None if self.inputs is not None else self.scale
        return _add(x, inner, compute, self.after_mlp, scale)


def _add(
    x: nn.Tensor,
    inner: nn.Tensor,
    compute,
    after: Norm | None,
    scale: nn.Tensor | None = None,
) -> nn.Tensor:
    """Return ``(x + after(compute(inner))) * scale``; the last kernel of the chain adds x."""
    if after is None:
        assert scale is None
        return compute(inner, x)
    return after(compute(inner, None), x, scale)


def layer_weights(config: DecoderConfig, shape: Layer, ours: str, theirs: str) -> Weights:
    """Yield the name and the source of every weight of a `DecoderLayer`."""
    for field, part in shape.parts.items():
        yield from part.weights(config, ours + _MODULES[field], theirs)
    if shape.has_scale:
        yield vector(f"{ours}.scale", f"{theirs}.layer_scalar", 1)
    for place, name in vars(shape.norms).items():
        if name:
            yield norm_weight(config, f"{ours}.{place}.weight", f"{theirs}.{name}")
