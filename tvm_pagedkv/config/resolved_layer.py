# SPDX-License-Identifier: Apache-2.0
"""`ResolvedLayer`: a layer whose fields all have values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .._checks import check_head_dim, check_int
from .._codecs import KEY_CODECS, codec_of
from .alibi import resolve_slopes
from .dtypes import ITEMSIZE
from .layer_spec import KV_KINDS, LATENT_KINDS, MHA_KINDS, LayerSpec
from .recurrent_config import ConvConfig, RecurrentConfig
from .rope_config import RopeConfig
from .static_scales import resolve_scales

if TYPE_CHECKING:
    from tir_kernels.codec import Codec, CodecPair

    from .static_scales import Scales


@dataclass(frozen=True)
class ResolvedLayer:
    """A `LayerSpec` whose fields have the values that the layer's kernels and pages are made for.

    The fields are those of `LayerSpec`. `alibi` is one slope per query head, or None; `kv_scales`
    are those of K, then of V, of each KV head; `kv_dtype` is None for layers that keep no K and V;
    fields of other kinds are None.
    """

    kind: str
    window: int | None
    num_qo_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    mla_original_qk_head_dim: int | None
    mla_original_v_head_dim: int | None
    alibi: tuple[float, ...] | None
    kv_dtype: str | None
    recurrent: RecurrentConfig | None = None
    conv: ConvConfig | None = None
    lists: bool = False
    page_bounds: bool = False
    sink_logits: bool = False
    kv_scales: tuple[tuple[float, ...], ...] | None = None

    @property
    def keeps_kv(self) -> bool:
        """Whether the layer has pages of K and V."""
        return self.kind in KV_KINDS

    @property
    def rows_per_slot(self) -> int:
        """Rows per position in the pages of the layer: K and V of each head, or a latent row."""
        if not self.keeps_kv:
            return 0
        return 1 if self.kind in LATENT_KINDS else 2 * self.num_kv_heads

    @property
    def codec(self) -> Codec | CodecPair | None:
        """Return the codec of the pages, if they are quantized."""
        return None if self.kv_dtype is None else codec_of(self.kv_dtype)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of `page_size` slots."""
        num_rows = page_size * self.rows_per_slot
        if self.kv_dtype is None:
            return 0
        if self.codec is not None:
            return self.codec.page_bytes(num_rows, self.qk_head_dim, self.v_head_dim)
        width = self.qk_head_dim
        if self.kind != "mla":
            width = (self.qk_head_dim + self.v_head_dim) // 2  # both are multiples of 8
        return num_rows * width * ITEMSIZE[self.kv_dtype]

    def page_bounds_bytes(self, dtype: str) -> int:
        """Return the bytes of the bounds of a page, which are of the cache's dtype."""
        if not self.page_bounds:
            return 0
        return self.num_kv_heads * 2 * self.qk_head_dim * ITEMSIZE[dtype]


def resolve_layer(index: int, layer: LayerSpec, defaults: LayerSpec) -> ResolvedLayer:
    """Return layer `index` with the values of `defaults` for those that it leaves None.

    Raises
    ------
    ValueError, TypeError
        If no layer can have a value; the message names the field.
    """
    inherited = ("num_qo_heads", "num_kv_heads", "qk_head_dim", "v_head_dim", "rope", "kv_dtype")
    said = {
        name: getattr(layer if getattr(layer, name) is not None else defaults, name)
        for name in inherited
    }
    if layer.kind in LATENT_KINDS:
        if layer.num_kv_heads not in (None, 1):
            raise ValueError(
                f"layer {index}: num_kv_heads of kind {layer.kind!r} must be 1, for all query "
                f"heads share the latent rows; got {layer.num_kv_heads}"
            )
        said["num_kv_heads"] = 1
    if layer.kind not in KV_KINDS:
        said["kv_dtype"] = None
    if layer.kind == "index":
        said |= _index_fields(index, layer, said["kv_dtype"])
    if said["v_head_dim"] is None:
        said["v_head_dim"] = defaults.qk_head_dim
    _check_heads(said["num_qo_heads"], said["num_kv_heads"])
    _check_widths(layer.kind, said["qk_head_dim"], said["v_head_dim"])
    _check_rope(said["rope"], said["qk_head_dim"])
    said["rope"] = said["rope"].resolved()
    resolved = ResolvedLayer(
        kind=layer.kind,
        window=layer.window,
        mla_original_qk_head_dim=layer.mla_original_qk_head_dim,
        mla_original_v_head_dim=layer.mla_original_v_head_dim,
        alibi=_slopes(index, layer, defaults, said["num_qo_heads"]),
        recurrent=layer.recurrent,
        conv=layer.conv,
        lists=layer.lists,
        page_bounds=layer.page_bounds,
        sink_logits=layer.sink_logits,
        kv_scales=_scales(index, layer, said["num_kv_heads"]),
        **said,
    )
    _check_codec(index, resolved)
    _check_lists(index, resolved)
    return resolved


def _index_fields(index: int, layer: LayerSpec, kv_dtype: str) -> dict[str, Any]:
    """Return what an index lane has of its own; a ValueError if it cannot be."""
    if layer.num_qo_heads is None or layer.qk_head_dim is None:
        raise ValueError(
            f"layer {index}: kind 'index' needs num_qo_heads and qk_head_dim of its own, the index "
            "heads and the width of their keys"
        )
    if codec_of(kv_dtype) is not None and kv_dtype not in KEY_CODECS:
        raise ValueError(
            f"layer {index}: index keys are kept as float32, float16, bfloat16, "
            f"{' or '.join(KEY_CODECS)}, got kv_dtype {kv_dtype!r}; give the layer a kv_dtype of "
            "its own"
        )
    return {"v_head_dim": layer.qk_head_dim, "rope": RopeConfig(mode="none")}


def _check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    check_int("num_qo_heads", num_qo_heads, 1, 4096)
    check_int("num_kv_heads", num_kv_heads, 1, 4096)
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads ({num_qo_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )


def _check_widths(kind: str, qk_head_dim: int, v_head_dim: int) -> None:
    check_head_dim("qk_head_dim", qk_head_dim)
    check_head_dim("v_head_dim", v_head_dim)
    if kind == "mla":
        check_int("v_head_dim", v_head_dim, 8, qk_head_dim)


def _check_rope(rope: RopeConfig, qk_head_dim: int) -> None:
    if not isinstance(rope, RopeConfig):
        raise TypeError(f"rope must be a RopeConfig, got {rope!r}")
    if rope.rotary_dim is not None and rope.rotary_dim > qk_head_dim:
        raise ValueError(f"rope.rotary_dim ({rope.rotary_dim}) exceeds qk_head_dim ({qk_head_dim})")


def _scales(index: int, layer: LayerSpec, num_heads: int) -> tuple[tuple[float, ...], ...] | None:
    if layer.kv_scales is None:
        return None
    scales = cast("Scales", layer.kv_scales)  # as `LayerSpec` has frozen them
    return resolve_scales(f"layers[{index}].kv_scales", scales, num_heads)


def _slopes(
    index: int, layer: LayerSpec, defaults: LayerSpec, num_heads: int
) -> tuple[float, ...] | None:
    """Return the ALiBi slopes of a layer, if it has any."""
    name, alibi = f"layers[{index}].alibi", layer.alibi
    if alibi is None:
        name, alibi = "alibi", defaults.alibi
    if alibi is None or alibi is False:
        return None
    if layer.kind == "index" and layer.alibi is None:
        return None
    if layer.kind in LATENT_KINDS:
        raise ValueError(f"{name}: layer {index} is of kind {layer.kind!r}, which has no ALiBi")
    return resolve_slopes(name, alibi, num_heads)


def _check_lists(index: int, layer: ResolvedLayer) -> None:
    """Raise a ValueError if rows of the layer cannot attend to lists, or to pages, as it says."""
    if not layer.lists and not layer.page_bounds:
        return
    what = "lists" if layer.lists else "page_bounds"
    need = "attention to lists needs" if layer.lists else "page_bounds need"
    if layer.kind != "mla" and layer.v_head_dim != layer.qk_head_dim:
        raise ValueError(
            f"layer {index}: {need} rows of K and V of one width, so v_head_dim "
            f"({layer.v_head_dim}) must equal qk_head_dim ({layer.qk_head_dim})"
        )
    if layer.alibi is not None:
        raise ValueError(f"layer {index}: {what} are not possible with ALiBi")
    if layer.page_bounds and layer.codec is not None and layer.codec.has_hadamard:
        raise ValueError(
            f"layer {index}: page_bounds are not possible with kv_dtype {layer.kv_dtype!r}, which "
            'keeps K rotated; choose "int8", "float8_e4m3fn" or a type that is not quantized'
        )
    if layer.kind in MHA_KINDS and layer.rope.mode == "inline":
        raise ValueError(
            f'layer {index}: {what} need K as it is attended to, so rope mode "inline", which '
            'rotates K when it is read, is not possible; choose "normal" or "none"'
        )


def _is_eight_bits(layer: ResolvedLayer) -> bool:
    codec = layer.codec
    return codec is not None and {codec.k.name, codec.v.name} <= set(KEY_CODECS)


def _check_codec(index: int, layer: ResolvedLayer) -> None:
    """Raise a ValueError if rows of the layer cannot be quantized as it says."""
    if layer.kv_scales is not None and not _is_eight_bits(layer):
        raise ValueError(
            f'layer {index}: kv_scales are for kv_dtype "int8" or "float8_e4m3fn", whose rows have '
            f"one scale, got {layer.kv_dtype!r}"
        )
    if layer.codec is None:
        return
    if layer.kind != "mla" and layer.v_head_dim != layer.qk_head_dim:
        raise ValueError(
            f"layer {index}: quantized pages keep K and V rows of one width, so with kv_dtype "
            f"{layer.kv_dtype!r} v_head_dim ({layer.v_head_dim}) must equal qk_head_dim "
            f"({layer.qk_head_dim})"
        )
    try:
        layer.codec.check_row(layer.qk_head_dim, layer.v_head_dim)
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from None
    if layer.codec.has_hadamard and layer.rope.mode == "inline" and layer.kind in MHA_KINDS:
        raise ValueError(
            f"layer {index}: kv_dtype {layer.kv_dtype!r} keeps rows multiplied with a Hadamard "
            'matrix, while rope mode "inline" rotates K when it is read; choose "int8" or '
            '"float8_e4m3fn", or rope mode "normal"'
        )
