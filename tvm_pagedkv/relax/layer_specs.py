# SPDX-License-Identifier: Apache-2.0
"""The layers of a model's cache, from the arguments of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import MHA_KINDS, WINDOW_KINDS, LayerSpec, RopeConfig

_LATENT = ("mla", "mla_sliding")
_KINDS = (*MHA_KINDS, *_LATENT, "linear", "index")


def layer_specs(
    attn_kind: str | list[str],
    ropes: Sequence[RopeConfig],
    kv_scales: Sequence[Any] | None,
    index_lane: LayerSpec | None,
    *,
    qk_head_dim: int,
    window: int,
    mla_original_qk_head_dim: int,
    mla_original_v_head_dim: int,
    lists: bool,
    page_bounds: bool,
    sink_logits: bool,
) -> list[LayerSpec]:
    """Return one `LayerSpec` for each layer.

    Parameters
    ----------
    ropes : sequence of RopeConfig
        One for each layer. The other arguments are those of `PagedKVCache`.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit the kinds of the layers.
    """
    kinds = [attn_kind] * len(ropes) if isinstance(attn_kind, str) else list(attn_kind)
    if len(kinds) != len(ropes):
        raise ValueError(f"attn_kind has {len(kinds)} entries for {len(ropes)} layers")
    for kind in kinds:
        if kind not in _KINDS:
            raise ValueError(f"attn_kind must be of {', '.join(_KINDS)}; got {kind!r}")
    _check_index_lane(kinds, index_lane)
    scales = [None] * len(kinds) if kv_scales is None else list(kv_scales)
    if len(scales) != len(kinds):
        raise ValueError(f"kv_scales has {len(scales)} entries for {len(kinds)} layers")

    def spec(kind: str, rope: RopeConfig, own_scales: Any) -> LayerSpec:
        if kind == "index" and index_lane is not None:
            return index_lane
        is_latent = kind in _LATENT
        return LayerSpec(
            kind="mla" if is_latent else kind,
            v_head_dim=None if is_latent or "mla" not in kinds else qk_head_dim,
            window=window if kind in (*WINDOW_KINDS, "mla_sliding") else None,
            mla_original_qk_head_dim=mla_original_qk_head_dim if is_latent else None,
            mla_original_v_head_dim=mla_original_v_head_dim if is_latent else None,
            rope=rope,
            lists=lists and kind in ("mha", "mla"),
            page_bounds=page_bounds,
            sink_logits=sink_logits and kind != "linear",
            kv_scales=own_scales,
        )

    return [spec(*each) for each in zip(kinds, ropes, scales, strict=True)]


def accepts_sequence_windows(layers: Sequence[LayerSpec]) -> bool:
    """Whether the cache can be configured with windows of sequences.

    The runtime object accepts them for other layers too, without effect where layers have windows
    of their own: models say only when a cache is created whether its sequences have windows.
    """
    return not any(layer.kind in ("mla", "index", "mha_chunked") for layer in layers)


def _check_index_lane(kinds: list[str], index_lane: LayerSpec | None) -> None:
    if not isinstance(index_lane, (LayerSpec, type(None))):
        raise TypeError(f"index_lane must be a LayerSpec, got {index_lane!r}")
    kind = None if index_lane is None else index_lane.kind
    if ("index" in kinds) != (kind == "index") or kind not in (None, "index"):
        raise ValueError(
            "layers of kind 'index' and index_lane, a LayerSpec of this kind, need each other; got "
            f"kinds {sorted(set(kinds))} and index_lane={index_lane!r}"
        )
    if kind is not None and {*kinds} <= {"index", "linear"}:
        raise ValueError(
            "layers of kind 'index' need a layer of attention beside them, whose positions they "
            f"choose; got kinds {sorted(set(kinds))}"
        )
