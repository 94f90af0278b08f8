# SPDX-License-Identifier: Apache-2.0
"""`LayerSpec`: one layer of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._checks import check_choice, check_head_dim, check_int
from .alibi import freeze_slopes
from .dtypes import check_kv_dtype
from .recurrent_config import ConvConfig, RecurrentConfig
from .rope_config import RopeConfig
from .static_scales import freeze_scales

WINDOW_KINDS = ("mha_sliding", "mha_chunked")
MHA_KINDS = ("mha", *WINDOW_KINDS)
LIST_KINDS = ("mha", "mla")  # whose rows can attend to lists
ATTENTION_KINDS = (*MHA_KINDS, "mla")
LATENT_KINDS = ("mla", "index")  # with one row per position
KV_KINDS = (*MHA_KINDS, *LATENT_KINDS)  # layers that keep K and V, or keys alone
LAYER_KINDS = (*KV_KINDS, "linear", "recurrent", "conv")


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a cache. Fields that are None take the value of the cache's configuration.

    Parameters
    ----------
    kind : {"mha", "mha_sliding", "mha_chunked", "mla", "index", "linear", "recurrent", "conv"}
        "mha" covers multi-query and grouped-query attention. A "recurrent" layer keeps a state of
        fixed size, a "conv" layer the last rows of its input. An "index" layer keeps index keys, by
        which rows choose the positions that they list: `KVCache.index_top_k`. A "linear" layer
        keeps nothing; it is listed so that the other layers have the ids of the model.
    window : int, optional
        Number of positions that a row of an "mha_sliding" layer sees, its own included; a window
        of an "mla" layer is the same, and None lets its rows see everything. Rows of an
        "mha_chunked" layer, as in Llama 4, see from the start of their chunk of `window` positions.
    num_qo_heads, num_kv_heads, qk_head_dim, v_head_dim : int, optional
        For "mla", `qk_head_dim` is the width of a latent row, `v_head_dim` the number of its
        leading columns that are V, and `num_kv_heads` is always 1. For "index", `num_qo_heads` is
        the number of index heads and `qk_head_dim` the width of a key.
    rope : RopeConfig, optional
        Unused by "mla", whose models rotate Q and K themselves.
    mla_original_qk_head_dim, mla_original_v_head_dim : int, optional
        For "mla", the head dimensions before absorption. Without them the layer has no
        `KVCache.self_attention`.
    alibi : bool or sequence of float, optional
        ALiBi, as for `KVCacheConfig`; False for none. Not possible with "mla".
    kv_dtype : str or (str, str), optional
        Type of the layer's pages, as for `KVCacheConfig`. For layers that keep K and V, or index
        keys, whose codec may be "int8" or "float8_e4m3fn".
    lists : bool
        Whether rows can attend to lists of positions, `KVCache.attention` with `positions`. For
        "mha" and "mla", without a window.
    page_bounds : bool
        Whether the cache keeps bounds of K beside the pages, by which decode steps can attend to a
        part of them: `KVCache.attention` with `budget`. For "mha".
    sink_logits : bool
        Whether the layer has learned sinks: its attention kernels take the `sink_logits` of
        `KVCache.attention` then. Without it, sinks are a pass after attention, and impossible for
        "mla".
    kv_scales : (float or sequence of float, float or sequence of float), optional
        Static scales of K and of V, as of checkpoints that were calibrated for 8-bit pages: for all
        KV heads, or for each. A value is kept as the code nearest to it divided by the scale, and
        cut off where there is none so large. None: each row has a scale of its own. For layers
        with K and V in "int8" or "float8_e4m3fn".
    recurrent : RecurrentConfig, optional
        The state of a "recurrent" layer.
    conv : ConvConfig, optional
        The convolution of a "conv" layer, or the one before the recurrence of a "recurrent" layer.

    Raises
    ------
    ValueError, TypeError
        If a field has no possible meaning; the message names it.
    """

    kind: str = "mha"
    window: int | None = None
    num_qo_heads: int | None = None
    num_kv_heads: int | None = None
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    rope: RopeConfig | None = None
    mla_original_qk_head_dim: int | None = None
    mla_original_v_head_dim: int | None = None
    alibi: bool | Sequence[float] | None = None
    kv_dtype: str | Sequence[str] | None = None
    recurrent: RecurrentConfig | None = None
    conv: ConvConfig | None = None
    lists: bool = False
    page_bounds: bool = False
    sink_logits: bool = False
    kv_scales: Sequence[float | Sequence[float]] | None = None

    def __post_init__(self) -> None:
        check_choice("layer.kind", self.kind, LAYER_KINDS)
        if (self.kind in WINDOW_KINDS) != (self.window is not None) and self.kind != "mla":
            raise ValueError(
                "layer.window is required for kinds 'mha_sliding' and 'mha_chunked' and invalid "
                f"otherwise, except for 'mla'; got kind {self.kind!r} with window {self.window!r}"
            )
        if self.window is not None:
            check_int("layer.window", self.window)
        object.__setattr__(self, "alibi", freeze_slopes("layer.alibi", self.alibi))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", check_kv_dtype("layer.kv_dtype", self.kv_dtype))
            if self.kind not in KV_KINDS:
                raise ValueError(
                    f"layer.kv_dtype is not for kind {self.kind!r}, which keeps no K and V; got "
                    f"{self.kv_dtype!r}"
                )
        if not isinstance(self.lists, bool):
            raise TypeError(f"layer.lists must be a bool, got {self.lists!r}")
        if self.lists and self.kind not in LIST_KINDS:
            raise ValueError(f"layer.lists is for kinds 'mha' and 'mla', not {self.kind!r}")
        if self.lists and self.window is not None:
            raise ValueError(
                f"layer.lists is for layers that keep all positions; got window={self.window}"
            )
        if not isinstance(self.page_bounds, bool):
            raise TypeError(f"layer.page_bounds must be a bool, got {self.page_bounds!r}")
        if self.page_bounds and self.kind != "mha":
            raise ValueError(f"layer.page_bounds is for kind 'mha', not {self.kind!r}")
        if not isinstance(self.sink_logits, bool):
            raise TypeError(f"layer.sink_logits must be a bool, got {self.sink_logits!r}")
        if self.sink_logits and self.kind not in ATTENTION_KINDS:
            raise ValueError(
                f"layer.sink_logits is for kinds {', '.join(ATTENTION_KINDS)}, not {self.kind!r}"
            )
        if self.kv_scales is not None:
            object.__setattr__(self, "kv_scales", freeze_scales("layer.kv_scales", self.kv_scales))
            if self.kind not in MHA_KINDS:
                raise ValueError(
                    f"layer.kv_scales is for kinds {', '.join(MHA_KINDS)}, not {self.kind!r}"
                )
        self._check_original_dims()
        self._check_states()

    def _check_states(self) -> None:
        for name, kind, kinds in (
            ("recurrent", RecurrentConfig, ("recurrent",)),
            ("conv", ConvConfig, ("conv", "recurrent")),
        ):
            value = getattr(self, name)
            if not isinstance(value, (kind, type(None))):
                raise TypeError(f"layer.{name} must be a {kind.__name__}, got {value!r}")
            if value is not None and self.kind not in kinds:
                raise ValueError(f"layer.{name} is invalid for kind {self.kind!r}")
            if value is None and self.kind == name:
                raise ValueError(f"layer.{name} is required for kind {self.kind!r}")

    def _check_original_dims(self) -> None:
        names = ("mla_original_qk_head_dim", "mla_original_v_head_dim")
        values = [getattr(self, name) for name in names]
        if values == [None, None]:
            return
        if self.kind != "mla" or None in values:
            raise ValueError(
                f"layer.{names[0]} and layer.{names[1]} are for kind 'mla' only and need "
                f"each other; got {values[0]} and {values[1]} with kind {self.kind!r}"
            )
        for name, value in zip(names, values, strict=True):
            check_head_dim(f"layer.{name}", value)
