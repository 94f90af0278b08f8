# SPDX-License-Identifier: Apache-2.0
"""`KVCacheConfig`: everything that decides the memory and the kernels of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .._checks import check_choice, check_head_dim, check_int, check_positive, freeze
from .alibi import resolve_slopes
from .dtypes import DTYPES, KV_DTYPES
from .layer_spec import MHA_KINDS, LayerSpec
from .memory import memory_bytes, num_pages_of
from .prefix_cache_config import PrefixCacheConfig
from .rope_config import RopeConfig

MAX_PAGE_SIZE = 256


@dataclass(frozen=True)
class KVCacheConfig:
    """Everything that decides the memory and the kernels of a cache.

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
    kv_dtype : str, optional
        Type of the pages: "float32", "float16" or "bfloat16", or a codec that quantizes rows as
        they are appended, "int8", "float8_e4m3fn" or "int4". Layers may have one of their own.
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
        sinks. Not possible with MLA layers.
    logit_softcap : float, optional
        Soft-cap of the attention logits: ``cap * tanh(logit / cap)``.
    share_prefix : bool
        Whether attention reads pages that several sequences of a step share only once, where that
        is faster; see `KVCache.fork_sequence`.
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

    # Typed as they are after `__post_init__`, which replaces None.
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int = None  # type: ignore[assignment]
    dtype: str = "float16"
    kv_dtype: str = None  # type: ignore[assignment]
    page_size: int = 16
    max_num_sequences: int = 32
    max_total_tokens: int = 65536
    prefill_chunk_size: int = 2048
    rope: RopeConfig = field(default_factory=RopeConfig)
    layers: tuple[LayerSpec, ...] = None  # type: ignore[assignment]
    sliding_window: bool = False
    logit_softcap: float | None = None
    share_prefix: bool = True
    alibi: bool | tuple[float, ...] | None = None
    enable_kv_transfer: bool = False
    layer_indptr: tuple[int, ...] = None  # type: ignore[assignment]
    stage: int | None = None
    prefix_cache: PrefixCacheConfig | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            num_layers: int,
            num_qo_heads: int,
            num_kv_heads: int,
            qk_head_dim: int,
            v_head_dim: int | None = None,
            dtype: str = "float16",
            kv_dtype: str | None = None,
            page_size: int = 16,
            max_num_sequences: int = 32,
            max_total_tokens: int = 65536,
            prefill_chunk_size: int = 2048,
            rope: RopeConfig = ...,
            layers: Sequence[LayerSpec] | None = None,
            sliding_window: bool = False,
            logit_softcap: float | None = None,
            share_prefix: bool = True,
            alibi: bool | Sequence[float] | None = None,
            enable_kv_transfer: bool = False,
            layer_indptr: Sequence[int] | None = None,
            stage: int | None = None,
            prefix_cache: PrefixCacheConfig | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_transfer, bool):
            raise TypeError(f"enable_kv_transfer must be a bool, got {self.enable_kv_transfer!r}")
        if not isinstance(self.prefix_cache, (PrefixCacheConfig, type(None))):
            raise TypeError(f"prefix_cache must be a PrefixCacheConfig, got {self.prefix_cache!r}")
        for name in ("num_layers", "max_num_sequences", "max_total_tokens", "prefill_chunk_size"):
            check_int(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPES)
        is_kv_dtype_given = self.kv_dtype is not None
        object.__setattr__(self, "kv_dtype", self.kv_dtype if is_kv_dtype_given else self.dtype)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        check_int("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.qk_head_dim)
        if not isinstance(self.share_prefix, bool):
            raise TypeError(f"share_prefix must be a bool, got {self.share_prefix!r}")
        if not isinstance(self.rope, RopeConfig):
            raise TypeError(f"rope must be a RopeConfig, got {self.rope!r}")
        if self.logit_softcap is not None:
            cap = check_positive("logit_softcap", self.logit_softcap)
            object.__setattr__(self, "logit_softcap", cap)
        object.__setattr__(self, "alibi", freeze(self.alibi))
        layers = (LayerSpec(),) * self.num_layers if self.layers is None else tuple(self.layers)
        if len(layers) != self.num_layers:
            raise ValueError(f"layers has {len(layers)} entries for {self.num_layers} layers")
        object.__setattr__(
            self, "layers", tuple(self._complete(i, s) for i, s in enumerate(layers))
        )
        if all(layer.kind == "linear" for layer in self.layers):
            raise ValueError("a cache needs a layer that keeps K and V; all are of kind 'linear'")
        self._settle_kv_dtype(is_kv_dtype_given)
        self._check_stages()
        if self.sliding_window:
            self._check_sliding_window()

    def _settle_kv_dtype(self, is_given: bool) -> None:
        """Check that a layer has the type of the cache, or take that of the layers."""
        types = [layer.kv_dtype for layer in self.layers if layer.kind != "linear"]
        if self.kv_dtype in types:
            return
        if is_given:
            raise ValueError(
                f"no layer has the kv_dtype {self.kv_dtype!r} of the cache, for each has its own; "
                "leave that of the layers None"
            )
        object.__setattr__(self, "kv_dtype", types[0])

    def _check_stages(self) -> None:
        indptr = (0, self.num_layers) if self.layer_indptr is None else tuple(self.layer_indptr)
        for begin in indptr:
            check_int("layer_indptr's numbers", begin, 0, self.num_layers)
        indptr = tuple(map(int, indptr))
        if indptr[:1] + indptr[-1:] != (0, self.num_layers) or list(indptr) != sorted(indptr):
            raise ValueError(
                f"layer_indptr must begin with 0, ascend, and end with the number of layers, "
                f"{self.num_layers}; got {list(indptr)}"
            )
        object.__setattr__(self, "layer_indptr", indptr)
        if self.stage is not None:
            check_int("stage", self.stage, 0, len(indptr) - 2)

    def _check_sliding_window(self) -> None:
        for i, layer in enumerate(self.layers):
            if layer.kind == "mla":
                raise ValueError(
                    f"layer {i}: sliding_window is not possible with MLA layers, whose kernels "
                    "do not support it"
                )

    def _complete(self, index: int, layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer, LayerSpec):
            raise TypeError(f"layers[{index}] must be a LayerSpec, got {layer!r}")
        filled = {
            name: getattr(self, name) if getattr(layer, name) is None else getattr(layer, name)
            for name in ("num_qo_heads", "num_kv_heads", "qk_head_dim", "v_head_dim", "rope")
        }
        if layer.kind == "mla":
            if layer.num_kv_heads not in (None, 1):
                raise ValueError(
                    f"layer {index}: num_kv_heads of kind 'mla' must be 1, for all query heads "
                    f"share the latent rows; got {layer.num_kv_heads}"
                )
            filled["num_kv_heads"] = 1
        check_int("num_qo_heads", filled["num_qo_heads"], 1, 4096)
        check_int("num_kv_heads", filled["num_kv_heads"], 1, 4096)
        if filled["num_qo_heads"] % filled["num_kv_heads"]:
            raise ValueError(
                f"num_qo_heads ({filled['num_qo_heads']}) must be a multiple of num_kv_heads "
                f"({filled['num_kv_heads']})"
            )
        check_head_dim("qk_head_dim", filled["qk_head_dim"])
        check_head_dim("v_head_dim", filled["v_head_dim"])
        if layer.kind == "mla":
            check_int("v_head_dim", filled["v_head_dim"], 8, filled["qk_head_dim"])
        elif filled["v_head_dim"] != filled["qk_head_dim"]:
            raise ValueError(
                f"layer {index}: a page keeps K and V rows of one width, so v_head_dim "
                f"({filled['v_head_dim']}) must equal qk_head_dim ({filled['qk_head_dim']}); pad "
                "the narrower one with zeros"
            )
        filled["alibi"] = self._alibi_of(index, layer, filled["num_qo_heads"])
        if layer.kind != "linear":
            filled["kv_dtype"] = layer.kv_dtype or self.kv_dtype
            _check_codec(index, replace(layer, **filled))
        rotary_dim = filled["rope"].rotary_dim
        if rotary_dim is not None and rotary_dim > filled["qk_head_dim"]:
            raise ValueError(
                f"rope.rotary_dim ({rotary_dim}) exceeds qk_head_dim ({filled['qk_head_dim']})"
            )
        return replace(layer, **filled)

    def _alibi_of(self, index: int, layer: LayerSpec, num_heads: int) -> bool | tuple[float, ...]:
        """Return the ALiBi slopes of a layer, or False."""
        alibi = self.alibi if layer.alibi is None else layer.alibi
        if alibi is None or alibi is False:
            return False
        name = "alibi" if layer.alibi is None else f"layers[{index}].alibi"
        if layer.kind == "mla":
            raise ValueError(f"{name}: layer {index} is of kind 'mla', which has no ALiBi")
        return resolve_slopes(name, alibi, num_heads)

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool of layers without a window."""
        return -(-self.max_total_tokens // self.page_size)

    def num_pages_of(self, layer: LayerSpec) -> int:
        """Return the number of pages in the pool of `layer`: at most what it can ever need."""
        return num_pages_of(self, layer)

    def memory_bytes(self) -> int:
        """Return the bytes that a new cache allocates on its device, without making one.

        With several pipeline stages and no `stage`, this is the largest stage. It equals the
        ``allocated_bytes`` of `KVCache.stats` on a CPU; on a GPU those count the auxiliary arrays
        four times, one copy per step in flight.

        Only the auxiliary arrays can grow later: if sequences share pages, the page table of a step
        can have more entries than the pool has pages, and token trees can grow over several steps
        before a commit.
        """
        return memory_bytes(self)


def _check_codec(index: int, layer: LayerSpec) -> None:
    """Raise a ValueError if rows of a complete layer cannot be quantized as it says."""
    if layer.codec is None:
        return
    try:
        layer.codec.check_row(layer.qk_head_dim, layer.v_head_dim)
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from None
    if layer.codec.has_hadamard and layer.rope.mode == "inline" and layer.kind in MHA_KINDS:
        raise ValueError(
            f"layer {index}: kv_dtype {layer.kv_dtype!r} keeps K multiplied with a Hadamard "
            'matrix, which rope mode "inline" cannot rotate when it is read; choose "int8" or '
            '"float8_e4m3fn", or rope mode "normal"'
        )
