# SPDX-License-Identifier: Apache-2.0
"""`KVCacheConfig`: everything that decides the memory and the kernels of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._checks import check_choice, check_int, check_positive
from .alibi import freeze_slopes
from .dtypes import DTYPES, check_kv_dtype
from .layer_spec import LATENT_KINDS, MHA_KINDS, LayerSpec
from .memory import memory_bytes
from .prefix_cache_config import PrefixCacheConfig
from .resolved_config import ResolvedConfig
from .resolved_layer import ResolvedLayer, resolve_layer
from .rope_config import RopeConfig

MAX_PAGE_SIZE = 256


@dataclass(frozen=True)
class KVCacheConfig:
    """Everything that decides the memory and the kernels of a cache.

    The fields keep what was given, None included, so `dataclasses.replace` changes one of them and
    all that follows from it. `resolved` returns what follows: the values of each layer, say. Two
    configurations that mean the same in different words are unequal; what they resolve to is equal.

    Parameters
    ----------
    num_layers : int
        Number of layers.
    num_qo_heads, num_kv_heads : int
        Number of query heads and of KV heads; the first is a multiple of the second.
    qk_head_dim : int
        Width of a row of Q and K: a multiple of 8 up to 576.
    v_head_dim : int, optional
        Width of a row of V; None: `qk_head_dim`.
    dtype : {"float32", "float16", "bfloat16"}
        Type of Q, K, V and O in a step.
    kv_dtype : str or (str, str), optional
        Type of the pages: "float32", "float16" or "bfloat16", or a codec that quantizes rows as
        they are appended, "int8", "float8_e4m3fn", "int5" or "int4". A pair of codecs is for K and
        for V: ("int5", "int4"), or in one string "int5,int4". Layers may have one of their own.
        None: `dtype`.
    page_size : int
        Slots per page: a power of two from 1 to 256.
    max_num_sequences : int
        Maximum number of sequences in a step. More may exist while there are pages. The pools of
        layers with a window are sized for this many sequences; if more than that are longer than
        the window, fewer pages may be available.
    max_total_tokens : int
        Number of tokens that the pages hold, rounded up to whole pages.
    prefill_chunk_size : int
        Maximum number of rows in a step.
    rope : RopeConfig
        Rotary embedding of layers that have none of their own.
    layers : sequence of LayerSpec, optional
        One per layer; None: `num_layers` default layers.
    sliding_window : bool
        Whether `KVCache.enable_sliding_window` can give sequences a sliding window with attention
        sinks. Not possible with MLA layers and index lanes. Recurrent layers and convolutions
        beside them go on from all tokens of the text.
    sliding_window_includes_self : bool, optional
        Whether such a window counts the query row itself. True: a row sees `window` positions, its
        own included, as masks in transformers do. False: a row sees `window` positions and itself,
        as in TVM's own cache. None: True if a layer has RoPE mode "normal".
    logit_softcap : float, optional
        Soft-cap of the attention logits: ``cap * tanh(logit / cap)``.
    spans : bool
        Whether steps can have spans whose rows see to the span's end: `KVCache.begin_forward` with
        `spans`. Not possible with MLA layers and lists.
    share_prefix : bool
        Whether attention reads pages that several sequences of a step share only once, where that
        is faster; see `KVCache.fork_sequence`. Its results then depend on which sequences share
        pages in a step, in the last bits.
    alibi : bool or sequence of float, optional
        ALiBi: attention adds ``slope * (position of K - position of Q)`` to the scaled and capped
        logits. True: the standard slopes; otherwise one slope per query head.
    enable_kv_transfer : bool
        On a CPU, allocate the pages in memory that other processes of the host can map, so that a
        `transfer.SharedMemoryChannel` can send from the cache. Other channels, and receivers, do
        not need it.
    layer_indptr : sequence of int, optional
        Pipeline stages: the first layer of each, then `num_layers`. A cache keeps only the layers
        of its stage; layer ids are those of the whole model.
    stage : int, optional
        The stage of the cache. None, with several stages: that of the worker in a Disco session.
    prefix_cache : PrefixCacheConfig, optional
        Tiers below the pages: host memory and stores that keep the pages of texts which the pool
        has no room for. None: what the pool reclaims is gone.

    Raises
    ------
    ValueError, TypeError
        If no cache can have a value; the message names the field.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int | None = None
    dtype: str = "float16"
    kv_dtype: str | Sequence[str] | None = None
    page_size: int = 16
    max_num_sequences: int = 32
    max_total_tokens: int = 65536
    prefill_chunk_size: int = 2048
    rope: RopeConfig = field(default_factory=RopeConfig)
    layers: Sequence[LayerSpec] | None = None
    sliding_window: bool = False
    sliding_window_includes_self: bool | None = None
    logit_softcap: float | None = None
    spans: bool = False
    share_prefix: bool = True
    alibi: bool | Sequence[float] | None = None
    enable_kv_transfer: bool = False
    layer_indptr: Sequence[int] | None = None
    stage: int | None = None
    prefix_cache: PrefixCacheConfig | None = None

    def __post_init__(self) -> None:
        # Fields keep what the user said, in a form that can be hashed: `replace` reads them.
        object.__setattr__(self, "alibi", freeze_slopes("alibi", self.alibi))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        if self.layer_indptr is not None:
            indptr = tuple(check_int("layer_indptr's numbers", i, 0) for i in self.layer_indptr)
            object.__setattr__(self, "layer_indptr", indptr)
        if not isinstance(self.enable_kv_transfer, bool):
            raise TypeError(f"enable_kv_transfer must be a bool, got {self.enable_kv_transfer!r}")
        if not isinstance(self.prefix_cache, (PrefixCacheConfig, type(None))):
            raise TypeError(f"prefix_cache must be a PrefixCacheConfig, got {self.prefix_cache!r}")
        for name in ("num_layers", "max_num_sequences", "max_total_tokens", "prefill_chunk_size"):
            check_int(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPES)
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", check_kv_dtype("kv_dtype", self.kv_dtype))
        check_int("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        for name in ("share_prefix", "spans"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.rope, RopeConfig):
            raise TypeError(f"rope must be a RopeConfig, got {self.rope!r}")
        if self.logit_softcap is not None:
            cap = check_positive("logit_softcap", self.logit_softcap)
            object.__setattr__(self, "logit_softcap", cap)
        self._check_window_convention()
        self.resolved()  # validates the layers and the stages

    def resolved(self) -> ResolvedConfig:
        """Return the values that the kernels and the memory of the cache are made from."""
        layers = self._resolved_layers()
        if self.sliding_window and any(layer.kind in LATENT_KINDS for layer in layers):
            index = next(i for i, layer in enumerate(layers) if layer.kind in LATENT_KINDS)
            raise ValueError(
                f"layer {index}: sliding_window is not possible with MLA layers and index lanes, "
                "whose kernels do not support it"
            )
        if self.sliding_window and any(layer.kind == "mha_chunked" for layer in layers):
            index = next(i for i, layer in enumerate(layers) if layer.kind == "mha_chunked")
            raise ValueError(
                f"layer {index}: sliding_window is not possible with layers that attend within "
                "chunks"
            )
        if self.spans:
            _check_spans(layers)
        for layer in layers:
            if layer.recurrent is not None:
                layer.recurrent.interval(self.dtype, self.page_size)
        modes = {layer.rope.mode for layer in layers if layer.kind in MHA_KINDS}
        if self.sliding_window and {"normal", "inline"} <= modes:
            raise ValueError(
                'sliding_window needs one way to count positions: RoPE mode "normal" counts those '
                'of the text, mode "inline" those within the window, and the layers have both'
            )
        return ResolvedConfig(
            layers=layers,
            dtype=self.dtype,
            kv_dtype=self._resolved_kv_dtype(layers),
            page_size=self.page_size,
            max_num_sequences=self.max_num_sequences,
            max_total_tokens=self.max_total_tokens,
            prefill_chunk_size=self.prefill_chunk_size,
            sliding_window=self.sliding_window,
            sliding_window_includes_self=self._resolved_window_convention(layers),
            logit_softcap=self.logit_softcap,
            spans=self.spans,
            share_prefix=self.share_prefix,
            enable_kv_transfer=self.enable_kv_transfer,
            layer_indptr=self._resolved_stages(),
            stage=self.stage,
        )

    def _check_window_convention(self) -> None:
        includes_self = self.sliding_window_includes_self
        if includes_self is None:
            return
        if not isinstance(includes_self, bool):
            raise TypeError(
                f"sliding_window_includes_self must be a bool or None, got {includes_self!r}"
            )
        if not self.sliding_window:
            raise ValueError("sliding_window_includes_self requires sliding_window=True")

    def _resolved_window_convention(self, layers: tuple[ResolvedLayer, ...]) -> bool:
        if self.sliding_window_includes_self is not None:
            return self.sliding_window_includes_self
        return any(layer.rope.mode == "normal" for layer in layers if layer.kind in MHA_KINDS)

    def _resolved_layers(self) -> tuple[ResolvedLayer, ...]:
        layers = (LayerSpec(),) * self.num_layers if self.layers is None else self.layers
        if len(layers) != self.num_layers:
            raise ValueError(f"layers has {len(layers)} entries for {self.num_layers} layers")
        for i, layer in enumerate(layers):
            if not isinstance(layer, LayerSpec):
                raise TypeError(f"layers[{i}] must be a LayerSpec, got {layer!r}")
        if all(layer.kind == "linear" for layer in layers):
            raise ValueError("a cache needs a layer that keeps something; all are of kind 'linear'")
        defaults = LayerSpec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
            rope=self.rope,
            alibi=self.alibi,
            kv_dtype=self._kv_dtype,
        )
        return tuple(resolve_layer(i, layer, defaults) for i, layer in enumerate(layers))

    @property
    def _kv_dtype(self) -> str:
        """The type of layers that have none of their own."""
        return self.dtype if self.kv_dtype is None else check_kv_dtype("kv_dtype", self.kv_dtype)

    def _resolved_kv_dtype(self, layers: Sequence[ResolvedLayer]) -> str:
        """Return the type of the cache, which at least one layer has."""
        types = [layer.kv_dtype for layer in layers if layer.kv_dtype is not None]
        if self._kv_dtype in types:
            return self._kv_dtype
        if self.kv_dtype is None:
            return types[0] if types else self.dtype
        raise ValueError(f"kv_dtype {self.kv_dtype!r} has no effect: every layer sets its own")

    def _resolved_stages(self) -> tuple[int, ...]:
        indptr = (0, self.num_layers) if self.layer_indptr is None else tuple(self.layer_indptr)
        if indptr[:1] + indptr[-1:] != (0, self.num_layers) or list(indptr) != sorted(indptr):
            raise ValueError(
                f"layer_indptr must begin with 0, ascend, and end with the number of layers, "
                f"{self.num_layers}; got {list(indptr)}"
            )
        if self.stage is not None:
            check_int("stage", self.stage, 0, len(indptr) - 2)
        return indptr

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool of layers without a window."""
        return self.resolved().num_pages

    def memory_bytes(self) -> int:
        """Return the bytes that a new cache allocates on its device, without making one.

        With several pipeline stages and no `stage`, this is the largest stage. It equals the
        ``allocated_bytes`` of `KVCache.stats` on a CPU; on a GPU those count the auxiliary arrays
        four times, one copy per step in flight. The first steps add the memory that kernels borrow:
        on a CPU at most `tvm_pagedkv.scratch_bytes`; on a GPU its size depends on the GPU.

        Only the auxiliary arrays can grow later: if sequences share pages, the page table of a step
        can have more entries than the pool has pages, and token trees can grow over several steps
        before a commit.
        """
        return memory_bytes(self.resolved())


def _check_spans(layers: Sequence[ResolvedLayer]) -> None:
    for index, layer in enumerate(layers):
        if layer.kind in LATENT_KINDS or layer.lists:
            what = "lists" if layer.lists else f"kind {layer.kind!r}"
            raise ValueError(f"layer {index}: spans are not possible with layers of {what}")
