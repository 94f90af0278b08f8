# SPDX-License-Identifier: Apache-2.0
"""`DecoderConfig`: the shape of a decoder of any family."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm_pagedkv.config import MHA_KINDS, LayerSpec, RopeConfig

from .altup_config import AltUp, PerLayerInputs
from .expert_config import Experts
from .index_config import IndexConfig
from .latent_config import Latent


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms in checkpoints; None if the family does not have one.

    A norm after attention or the MLP applies before the residual is added.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's tensors in checkpoints.

    Parameters
    ----------
    model : str
        What the names of the embedding, of the layers and of the final norm begin with.
    embedding, final_norm, lm_head : str
    attention, mixer, mlp : str
        Parts of a layer; the mixer is a recurrence or a convolution.
    q_norm, k_norm, sinks, attention_output, gate, up, down : str
        Tensors of these parts.
    index : str
        What the names of tensors of an indexer of blocks begin with, within attention.
    fused_qkv, fused_gate_up : str, optional
        One tensor for Q, K and V, and one for gate and up. None: they have tensors of their own.
    fused_delta_net : (str, str), optional
        Of gated delta nets, one tensor for Q, K, V and the gate, and one for rates and decays, both
        with the rows of one head of K after another. None: they have four tensors.
    """

    model: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    lm_head: str = "lm_head"
    attention: str = "self_attn"
    mixer: str = "mixer"
    mlp: str = "mlp"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    attention_output: str = "o_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    index: str = "indexer."
    fused_qkv: str | None = None
    fused_gate_up: str | None = None
    fused_delta_net: tuple[str, str] | None = None


@dataclass(frozen=True)
class Scales:
    """Factors on the outputs of projections, by which their weights are multiplied on loading.

    Parameters
    ----------
    qkv : (float, float, float)
    attention, mixer, mlp : float
        Factors on what these add to the residual.
    gate : float
        Factor on the gate of the MLP, before its activation.
    logits : float
        Factor on the output logits, which multiplies the weights of the final norm.
    """

    qkv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention: float = 1.0
    mixer: float = 1.0
    gate: float = 1.0
    mlp: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class QueryScale:
    """A factor on Q by the position: ``1 + factor * log(1 + (position + offset) // floor)``.

    Parameters
    ----------
    floor : int
    factor : float
    layers : tuple of int
        The layers that have it.
    offset : int
        What the first position counts as.
    """

    floor: int
    factor: float
    layers: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Mamba2Options:
    """What the Mamba2 mixers of families differ in besides the shape of their state.

    Parameters
    ----------
    norm : {"gate_first", "gate_last"}, optional
        The RMS norm of the output, which applies after or before the gate; None: the gate alone.
    time_step_limit : (float, float)
        Bounds of the time step.
    in_bias, out_bias : bool
        Whether the projections have biases.
    in_scales : tuple of 5 floats
        Factors on the gate, x, B, C and the time step, before the convolution.
    """

    norm: str | None = "gate_first"
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    in_bias: bool = False
    out_bias: bool = False
    in_scales: tuple[float, ...] = (1.0,) * 5


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, and the options of its blocks.

    Parameters
    ----------
    vocab_size, hidden_size : int
    intermediate_size : int
        Width of the MLP; 0: the layers have none.
    num_heads, num_kv_heads, head_dim : int
        Number of query heads and of KV heads, and the width of a head.
    layers : tuple of LayerSpec
        Kind, window, rotary embedding and state of each layer of the cache, and its KV heads and
        their width where these are others.
    layers_per_block : int
        Number of consecutive ones that belong to one layer of the model: 2 where attention and a
        recurrence run side by side, in this order, or where index keys are kept beside attention.
    context_length : int
        Maximum number of positions that the model was trained for.
    norm_eps : float
    norms : Norms
    norm_offset : float
        Constant that is added to the weights of all norms.
    norm_subtracts_mean : bool
        Whether the norms of layers are layer norms without a bias, not RMS norms.
    parallel_mlp : bool
        Whether the MLP sees the rows that attention sees, and both outputs are added.
    qk_norm : {"head", "projection", "unit"}, optional
        RMS norm of Q and K before the rotation: per head with shared weights, over all heads, or
        per head without weights.
    qk_norm_layers : tuple of int, optional
        The layers that have it; None: all.
    v_norm : bool
        Whether V of each head has an RMS norm without weights.
    v_of_k : tuple of int
        The layers whose V is the projection of K, before norms and the rotation.
    shared_kv : tuple of (int, int)
        Layers that attend to the K and V of an earlier layer, and this layer. They are of kind
        "linear" in `layers`, for the cache keeps nothing for them.
    wide_layers : tuple of (int, int)
        Layers whose MLP has another width than `intermediate_size`, and this width.
    sparse_layers : tuple of (int, float)
        Layers whose MLP keeps what exceeds the mean of the gate by so many standard deviations.
    query_scale : QueryScale, optional
    latent : Latent, optional
        The widths of multi-head latent attention (MLA), in layers of kind "mla".
    indexer : IndexConfig, optional
        What chooses the positions, or their blocks, that rows attend to; None: they attend to all.
    attention_gate : bool
        Whether the output of attention is multiplied by the sigmoid of a gate, whose rows follow
        those of each head in the projection of Q.
    sink_logits : bool
        Whether each query head has a learned sink.
    interleaved_rope : bool
        Whether the checkpoint's rotation pairs adjacent features of Q and K. Loading permutes them.
    qkv_bias, o_bias, mlp_bias : bool
    activation : {"silu", "gelu_tanh"}
        Activation of the MLP's gate.
    clamped_gate : (float, float), optional
        Factor and limit of the gate of GPT-OSS, in place of ``activation(gate) * up``; see
        `kernels.clamped_gated`.
    attention_scale : float, optional
        Factor on the attention logits; None: ``head_dim ** -0.5``.
    attention_softcap, logit_softcap : float, optional
        Soft-cap of the attention logits, and of the output logits.
    embedding_scale : float
        Factor on the embeddings.
    tied_embeddings : bool
    names : TensorNames
    scales : Scales
    mamba2 : Mamba2Options
        For layers with the rule "mamba2".
    experts : Experts, optional
        What layers have in place of one MLP; None: all layers are dense.
    per_layer_inputs : PerLayerInputs, optional
        Per-layer embeddings.
    altup : AltUp, optional
        Residual streams, of which each layer computes one.
    layer_scale : bool
        Whether the output of each layer is multiplied by a number of the checkpoint.
    has_draft_layers : bool
        Whether checkpoints may have further layers that predict several tokens, which are not read.
    longest_text : int, optional
        Maximum length of a text, for models whose RoPE would need K to be rotated again beyond it.
    eos_token_ids : tuple of int
        Tokens that end a text.
    dtype : {"float32", "float16", "bfloat16"}
        Type of the checkpoint. `default_dtype` decides in which type the model runs.
    overflows_float16 : bool
        Whether activations of the family are known to exceed the range of float16.
    calibrated_for : str, optional
        The ``kv_dtype`` that the static scales of K and V in the checkpoint are for, if it says so.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    layers_per_block: int = 1
    context_length: int = 2048
    norm_eps: float = 1e-6
    norms: Norms = Norms()
    norm_offset: float = 0.0
    norm_subtracts_mean: bool = False
    parallel_mlp: bool = False
    qk_norm: str | None = None
    qk_norm_layers: tuple[int, ...] | None = None
    v_norm: bool = False
    v_of_k: tuple[int, ...] = ()
    shared_kv: tuple[tuple[int, int], ...] = ()
    wide_layers: tuple[tuple[int, int], ...] = ()
    sparse_layers: tuple[tuple[int, float], ...] = ()
    query_scale: QueryScale | None = None
    latent: Latent | None = None
    indexer: IndexConfig | None = None
    attention_gate: bool = False
    sink_logits: bool = False
    interleaved_rope: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    clamped_gate: tuple[float, float] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    names: TensorNames = TensorNames()
    scales: Scales = Scales()
    mamba2: Mamba2Options = Mamba2Options()
    experts: Experts | None = None
    per_layer_inputs: PerLayerInputs | None = None
    altup: AltUp | None = None
    layer_scale: bool = False
    has_draft_layers: bool = False
    longest_text: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    overflows_float16: bool = False
    calibrated_for: str | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.layers) // self.layers_per_block

    def layers_of(self, index: int) -> tuple[LayerSpec, ...]:
        """Return the layers of the cache that a layer of the model has."""
        begin = index * self.layers_per_block
        return self.layers[begin : begin + self.layers_per_block]

    def has_experts(self, index: int) -> bool:
        """Whether a layer of the model has experts in place of one MLP."""
        experts = self.experts
        return experts is not None and not experts.beside_mlp and index not in experts.dense_layers

    @property
    def has_experts_beside_mlp(self) -> bool:
        """Whether layers have experts and an MLP."""
        return self.experts is not None and self.experts.beside_mlp

    @property
    def has_mixers(self) -> bool:
        """Whether layers keep a state in place of K and V, or beside them."""
        return any(layer.recurrent or layer.conv for layer in self.layers)

    @property
    def is_connected(self) -> bool:
        """Whether layers need more of a step than the rows of the layer before them."""
        has_more = self.per_layer_inputs is not None or self.altup is not None
        return has_more or bool(self.shared_kv)

    @property
    def is_whole(self) -> bool:
        """Whether workers cannot share the heads of all layers alike."""
        own_heads = any(layer.num_kv_heads or layer.qk_head_dim for layer in self.layers)
        return own_heads or self.is_connected

    def source_of(self, layer: int) -> int | None:
        """Return the layer to whose K and V a layer of the cache attends, if it has none itself."""
        return dict(self.shared_kv).get(layer)

    def kv_heads_of(self, index: int) -> int:
        """Return the number of KV heads of a layer of the model."""
        return self.layers_of(index)[0].num_kv_heads or self.num_kv_heads

    def head_dim_of(self, index: int) -> int:
        """Return the width of a head of a layer of the model."""
        return self.layers_of(index)[0].qk_head_dim or self.head_dim

    def width_of(self, index: int) -> int:
        """Return the width of the MLP of a layer of the model."""
        return dict(self.wide_layers).get(index, self.intermediate_size)

    @property
    def row_width(self) -> int:
        """Width of the rows that layers take: the hidden size, and the inputs of each layer."""
        inputs = self.per_layer_inputs
        return self.hidden_size + (self.num_layers * inputs.width if inputs is not None else 0)

    @property
    def stream_width(self) -> int:
        """Width of the rows between layers, which have all streams."""
        return self.hidden_size * (1 if self.altup is None else self.altup.num_streams)

    @property
    def sm_scale(self) -> float:
        """Factor on the attention logits."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def short_text(self) -> int | None:
        """For longrope, the maximum length of a text that uses the short factors; else None."""
        scaling = (self.layers[0].rope or RopeConfig()).scaling_dict
        is_longrope = scaling.get("rope_type") == "longrope"
        return scaling["original_max_position_embeddings"] if is_longrope else None

    def without_cache(self) -> DecoderConfig:
        """The configuration with defaults for all that the code of the model does not depend on.

        That is what the cache does with K and V, and what the host decides about texts.
        """
        sources = {source for _, source in self.shared_kv}  # which the model rotates
        layers = tuple(
            LayerSpec(
                num_kv_heads=layer.num_kv_heads,
                qk_head_dim=layer.qk_head_dim,
                rope=layer.rope if index in sources else None,
            )
            if layer.kind in MHA_KINDS
            else layer
            for index, layer in enumerate(self.layers)
        )
        plain = DecoderConfig(self.vocab_size, 1, 1, 1, 1, 1, layers)
        names = (
            "context_length", "attention_softcap", "longest_text", "eos_token_ids", "dtype",
            "overflows_float16",
        )  # fmt: skip
        return replace(self, layers=layers, **{name: getattr(plain, name) for name in names})
