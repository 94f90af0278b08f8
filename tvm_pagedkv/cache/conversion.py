# SPDX-License-Identifier: Apache-2.0
"""Sequences of a cache whose pages have other types: `KVCache.load` with ``convert=True``."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import tvm

from .._codecs import codec_of
from .._functions import CACHE, global_function
from .inspection import CacheInspection
from .page_format import PageFormat, page_groups

# The text of a layout, as runtime_ext/checkpoint/checkpoint_metadata.cc writes it.
_LAYOUT = re.compile(r"(page_size=\d+) dtype=([^;]*); (.*)", re.DOTALL)
_RUN = re.compile(r"(\d{1,9}) x ([\w.,]+)")
_LAYERS = re.compile(r"(\d{1,6}) x (.*)", re.DOTALL)
_SCALES = re.compile(r" kv_scales=\w+$")


def types_of(layout: str, num_layers: int) -> tuple[list[str], str]:
    """Return the type of each layer's pages in a layout, and the layout without them.

    A codec has its revision behind its name: "int8.1".

    Raises
    ------
    ValueError
        If the text is no layout of so many layers.
    """
    match = _LAYOUT.fullmatch(layout)
    if match is None:
        raise ValueError("its layout cannot be read")
    page_size, types, layers = match.groups()
    rest = f"{page_size}; {layers}"
    if " x " not in types:
        return [types] * num_layers, rest
    runs = [_RUN.fullmatch(run) for run in types.split(", ")]
    counts = [(int(run[1]), run[2]) for run in runs if run is not None]
    if len(counts) != len(runs) or sum(count for count, _ in counts) != num_layers:
        raise ValueError("its layout cannot be read")
    return [kv_dtype for count, kv_dtype in counts for _ in range(count)], rest


def formats_of(cache: CacheInspection, layout: str, *, convert: bool) -> list[PageFormat]:
    """Return how a file with a layout holds the pages of each page group.

    Raises
    ------
    ValueError
        If the cache cannot take them: the layout differs, in more than types if they may be
        converted.
    """
    groups, ours = page_groups(cache), cache.description["layout"]
    num_layers = sum(not group["has_states"] for group in groups)
    own_formats = [PageFormat.of(cache, index) for index in range(len(groups))]
    if layout == ours:
        return own_formats
    message = f"has another layout than the cache: {layout}; but the cache has {ours}"
    try:
        theirs, rest = types_of(layout, num_layers)
    except ValueError:
        raise ValueError(message) from None
    own, own_rest = types_of(ours, num_layers)
    if _without_scales(rest) != _without_scales(own_rest):
        raise ValueError(message)
    if not convert:
        layers = (i for i in range(num_layers) if theirs[i] != own[i])
        layer = next(layers, None)
        difference = "The static scales of K and V (kv_scales) differ"
        if layer is not None:
            difference = (
                f"Layer {layer} has kv_dtype {theirs[layer]} in the file and {own[layer]} in the "
                "cache"
            )
        raise ValueError(
            f"{message}. {difference}: load it with convert=True, which rounds the rows again, or "
            "into a cache with those of the file"
        )
    formats = [PageFormat.of(cache, layer, _kv_dtype(text)) for layer, text in enumerate(theirs)]
    return formats + own_formats[num_layers:]


def _without_scales(layers: str) -> list[str]:
    """Return the parts of a layout, one for each layer, without static scales: they are rounding.

    Layers that differ in nothing else are in one part, or in several.
    """
    found = []
    for part in layers.split("; "):
        run = _LAYERS.fullmatch(part)
        count, text = (int(run[1]), run[2]) if run else (1, part)
        found += [_SCALES.sub("", text)] * count
    return found


def _kv_dtype(text: str) -> str:
    """Return the kv_dtype of a type in a layout.

    Raises
    ------
    ValueError
        If it is another revision of a codec.
    """
    name, _, revision = text.partition(".")
    codec = codec_of(name)
    if codec is not None and revision != str(codec.revision):
        raise ValueError(
            f"holds rows of revision {revision or 'unknown'} of {name}, and this version of "
            f"tvm_pagedkv knows revision {codec.revision}"
        )
    return name


def retyped(cache: CacheInspection, metadata: str) -> str:
    """Return the metadata of a sequence as this cache would have written it."""
    about = json.loads(metadata)
    layout = cache.description["layout"]
    about["layout"] = layout
    about["layout_hash"] = global_function(CACHE + "get_layout_hash")(cache)
    match = _LAYOUT.fullmatch(layout)
    assert match is not None
    about["dtype"] = match[2]
    infos = page_groups(cache)
    types, _ = types_of(layout, sum(not info["has_states"] for info in infos))
    for layer, group in enumerate(about["groups"]):
        if infos[layer]["has_states"]:
            continue
        own = PageFormat.of(cache, layer)
        num_pages = int(group["num_logical_pages"])
        group.pop("kv_dtype", None)
        group |= {"kv_dtype": types[layer]} if own.codec_page_bytes else {}
        group |= {
            "dtype": own.dtype,
            "shape": [1, num_pages, *own.shape],
            "nbytes": num_pages * own.num_bytes,
        }
    return json.dumps(about)


def import_converted(
    cache: CacheInspection, seq_id: int, layer: int, source: PageFormat, pages: np.ndarray
) -> None:
    """Give the next pages of a layer to an import, as rows that the layer rounds.

    Parameters
    ----------
    pages : uint8 ``[n, source.num_bytes]``
    """
    info = page_groups(cache)[layer]
    dtype = ml_dtypes.bfloat16 if info["row_dtype"] == "bfloat16" else info["row_dtype"]
    with np.errstate(all="ignore"):  # what float16 cannot hold becomes infinite
        rows = source.numbers(pages).astype(dtype)
    if info["kind"] == "mla":
        planes = [rows.reshape(-1, source.width)]
    else:  # [n, 2, num_kv_heads, page_size, head_dim]: K and V in the order of slots
        heads = source.row_shape[1]
        planes = [
            rows[:, plane].swapaxes(1, 2).reshape(-1, heads, source.width) for plane in range(2)
        ]
    device = cache.description["device"]
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(plane), device) for plane in planes]
    k, v = tensors if len(tensors) == 2 else (tensors[0], None)
    global_function("pagedkv.import_rows")(cache, seq_id, layer, k, v)
