# SPDX-License-Identifier: Apache-2.0
"""`Mixer`: the parts of layers that keep a state in place of K and V."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_pagedkv.config import LayerSpec

from ..config.part import LayerPart


@dataclass(frozen=True)
class Mixer(LayerPart):
    """A recurrence or a convolution.

    Parameters
    ----------
    spec : LayerSpec
        The state and the convolution.
    block : str
        The part of a layer that has its tensors in checkpoints.
    output_scale : float
        Factor on the output, by which the weights of the last projection are multiplied on loading.
    """

    spec: LayerSpec
    block: str = "mixer"
    output_scale: float = 1.0

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        return (self.spec,)

    @property
    def shared_counts(self) -> dict[str, int]:
        state = self.spec.recurrent
        if state is not None:
            counts = {"the heads of a recurrent layer": state.num_heads}
            if state.num_key_heads > 1:
                counts["the key heads of a recurrent layer"] = state.num_key_heads
            return counts
        assert self.spec.conv is not None
        return {"the channels of a convolution": self.spec.conv.channels}


def share_of(layer: LayerSpec, num_shards: int) -> LayerSpec:
    """Return what each of `num_shards` workers keeps of a layer's states and convolution.

    They divide the heads, and heads of keys if there are several: a single one is with every
    worker, who convolves it too.
    """
    state, conv = layer.recurrent, layer.conv
    if num_shards == 1 or conv is None:
        return layer
    if state is None:
        return replace(layer, conv=replace(conv, channels=conv.channels // num_shards))
    heads, key_heads = state.num_heads // num_shards, max(state.num_key_heads // num_shards, 1)
    gone = (state.num_heads - heads) * state.value_dim
    gone += 2 * (state.num_key_heads - key_heads) * state.key_dim
    return replace(
        layer,
        recurrent=replace(state, num_heads=heads, num_key_heads=key_heads),
        conv=replace(conv, channels=conv.channels - gone),
    )
