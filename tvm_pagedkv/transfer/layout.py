# SPDX-License-Identifier: Apache-2.0
"""The layout that two caches must share, and the byte regions of rows in a layer's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cache import KVCache, page_groups
from .channel import TransferError

PROTOCOL = 1
_LAYER_FIELDS = (
    "id",
    "kind",
    "window",
    "group",
    "num_kv_heads",
    "qk_head_dim",
    "v_head_dim",
    "rope_mode",
    "rope_theta",
    "rope_scale",
)
_ROW_FIELDS = ("id", "kind", "group", "kv_dtype", "row_width")
_RECURRENT_FIELDS = (
    "num_heads",
    "num_key_heads",
    "key_dim",
    "value_dim",
    "has_channel_decay",
    "has_beta",
    "checkpoint_tokens",
    "state_dtype",
)


def layout_of(cache: KVCache) -> dict[str, Any]:
    """Return everything that decides the meaning of a page's bytes, as JSON values."""
    info = cache.description
    layers = [group for group in page_groups(cache) if not group["has_states"]]
    types = [str(layer["kv_dtype"]) for layer in layers]
    return {
        "protocol": PROTOCOL,
        "page_size": info["page_size"],
        "kv_dtype": types[0] if len(set(types)) == 1 else types,
        "layers": [_described(layer) for layer in layers],
    }


def _described(layer: dict[str, Any]) -> dict[str, Any]:
    if layer["kind"] == "recurrent":
        return {name: layer[name] for name in (*_ROW_FIELDS, *_RECURRENT_FIELDS)}
    if layer["kind"] == "conv":
        return {name: layer[name] for name in (*_ROW_FIELDS, "width")}
    # Sizes of plain pages follow from the other fields.
    codec = ["sections", "page_bytes", "codec_revision"]
    if layer["kv_scales"]:  # of rows whose codes depend on them
        codec.append("kv_scales")
    fields = (*_LAYER_FIELDS, *codec) if layer["is_quantized"] else _LAYER_FIELDS
    return {name: layer[name] for name in fields}


def pools_of(memory: dict[str, Any], num_layers: int) -> list[tuple[int, int]]:
    """Return the begin and size in bytes of each page group, from the peer's `Channel.expose`.

    Raises
    ------
    TransferError
        If the message is invalid.
    """
    layers = memory.get("layers")
    if not isinstance(layers, list) or len(layers) != num_layers:
        raise TransferError(f"expected the other side's pages of {num_layers} layers")
    pools = []
    for layer in layers:
        if not isinstance(layer, list) or len(layer) != 2 or any(type(n) is not int for n in layer):
            raise TransferError("expected where the other side's pages of a layer lie")
        begin, size = layer
        if not (0 <= begin < 2**63 and 0 <= size < 2**63):
            raise TransferError(f"the other side's pages cannot be {size} bytes at {begin}")
        pools.append((begin, size))
    return pools


def num_slots_of(cache: KVCache) -> list[int]:
    """Return the slots in the pool of each layer group, then the pages of each state group."""
    page_size, stats = cache.description["page_size"], cache.stats()
    slots = [group["num_pages"] * page_size for group in stats["groups"]]
    return slots + [group["num_pages"] for group in stats["state_groups"]]


def check_layout(ours: dict[str, Any], theirs: Any) -> None:
    """Raise a ValueError that names the first difference."""
    found = _difference("", ours, theirs)
    if found:
        raise ValueError(f"the layouts of the two caches differ: {found}")


def check_model(ours: dict[str, Any] | None, theirs: Any) -> None:
    """Raise a ValueError that names the first difference of two descriptions of models."""
    found = _difference("model", ours, theirs)
    if found:
        raise ValueError(f"the models of the two sides differ: {found:.500}")


def _difference(path: str, ours: Any, theirs: Any) -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            inner = f"{path}.{name}" if path else name
            found = _difference(inner, ours.get(name), theirs.get(name))
            if found:
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} here, {len(theirs)} there"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found = _difference(f"{path}[{i}]", a, b)
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} is {ours!r} here and {theirs!r} there"


def expand_map(
    numbers: Sequence[int], num_groups: int, num_state_groups: int = 0, begin: int = 0
) -> list[np.ndarray]:
    """Return the slot of every position, as int64 ``[n]`` per layer group; -1: it has none.

    Then per state group: the page of the state that is behind a position.
    """
    groups, at = [], 0
    for _ in range(num_groups):
        count = numbers[at]
        runs = np.array(numbers[at + 1 : at + 1 + 2 * count], np.int64).reshape(count, 2)
        groups.append(np.concatenate([_expand(slot, length) for slot, length in runs]))
        at += 1 + 2 * count
    length = sum(numbers[2 : 1 + 2 * numbers[0] : 2])
    for _ in range(num_state_groups):
        pages = np.full(length, -1, np.int64)
        if numbers[at]:
            page, position = numbers[at + 1 : at + 3]
            pages[position - 1 - begin] = page
        groups.append(pages)
        at += 1 + 2 * numbers[at]
    return groups


def _expand(slot: int, length: int) -> np.ndarray:
    return np.full(length, -1, np.int64) if slot < 0 else slot + np.arange(length)


def expand_runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the slots of runs, concatenated, from their first slots and lengths ``[n]``."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def regions(layer: dict[str, Any], page_size: int, runs: np.ndarray) -> np.ndarray:
    """Return the byte regions of runs of slots in the pages of a layer.

    Parameters
    ----------
    layer : dict
        An entry of `page_groups`.
    page_size : int
        1 for states, whose runs are of pages.
    runs : int64 ``[n, 3]``
        Source slot, destination slot and length; each run is within one page on both sides.

    Returns
    -------
    int64 ``[m, 3]``
        Destination offset, source offset and size in bytes. Whole pages that are adjacent on both
        sides form one region; otherwise there is one region for K and one for V of each KV head,
        and as many for the scales of quantized rows.
    """
    page_bytes = layer["page_bytes"]
    source, destination, length = runs.T
    whole = length == page_size
    pages = runs[whole, :2] // page_size
    starts = np.flatnonzero(np.any(np.diff(pages, axis=0, prepend=-2) != 1, axis=1))
    counts = np.diff(starts, append=len(pages))
    joined = np.stack([pages[starts, 1], pages[starts, 0], counts], 1) * page_bytes

    def section(begin: int, row: int, num_rows: int) -> np.ndarray:
        """Return the regions of `num_rows` rows of a slot, of `row` bytes each, in a section."""

        def offsets(slots: np.ndarray) -> np.ndarray:
            page, slot = np.divmod(slots[~whole], page_size)
            first = page * page_bytes + begin + slot * row
            return (first[:, None] + np.arange(num_rows) * page_size * row).ravel()

        sizes = np.repeat(length[~whole] * row, num_rows)
        return np.stack([offsets(destination), offsets(source), sizes], 1)

    sections = layer["sections"]
    return np.concatenate([joined, *(section(begin, row, n) for begin, row, _, n in sections)])
