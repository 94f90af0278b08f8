# SPDX-License-Identifier: Apache-2.0
"""What looks at a cache from outside: lengths, counters, rows, page tables, invariants."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import tvm
import tvm_ffi

from .._functions import CACHE, as_int, global_function
from .._tensors import as_tensor
from .page_map import PageMap
from .stats import CacheStats


class CacheInspection:
    """The part of `KVCache` that looks at it from outside."""

    __slots__ = ()

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What the cache was made from: sizes, dtypes, and a list of the layers that it keeps."""
        raw = dict(global_function("pagedkv.describe")(self).items())
        raw["layer_indptr"] = tuple(raw["layer_indptr"])
        raw["layers"] = [dict(layer.items()) for layer in raw["layers"]]
        return raw

    def sequence_length(self, seq_id: int) -> int:
        """Positions of a sequence."""
        return global_function(CACHE + "get_sequence_length")(self, as_int("seq_id", seq_id))

    def total_length(self) -> int:
        """Sum of the lengths of all sequences."""
        return global_function(CACHE + "get_total_sequence_length")(self)

    def num_available_pages(self) -> int:
        """Free pages, of the group of layers that has fewest.

        Beside layers without a window, those with one do not count: they never run out first, if
        the cache was made without ``sliding_window``.
        """
        return global_function(CACHE + "get_num_available_pages")(self)

    def is_empty(self) -> bool:
        """Whether there is no sequence."""
        return bool(global_function(CACHE + "empty")(self))

    def is_in_forward(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(global_function("pagedkv.is_in_forward")(self))

    def debug_get_kv(
        self, seq_id: int, begin: int = 0, end: int | None = None
    ) -> tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]:
        """K and V of the positions ``[begin, end)`` of a sequence, as the pages hold them.

        An IndexError where a layer with a window no longer has all of them.

        Returns
        -------
        k, v : tvm tensors ``[num_layers, end - begin, num_kv_heads, head_dim]``, the pages' dtype
            Of the layers that are not MLA.
        """
        begin, end = self._range(seq_id, begin, end)
        k, v = (self._empty_rows("mha", seq_id, begin, end) for _ in range(2))
        global_function(CACHE + "debug_get_kv")(self, as_int("seq_id", seq_id), begin, end, k, v)
        return k, v

    def debug_get_kv_mla(
        self, seq_id: int, begin: int = 0, end: int | None = None
    ) -> tvm.runtime.Tensor:
        """Latent rows of the positions ``[begin, end)`` of a sequence, as the pages hold them.

        Returns
        -------
        kv : tvm tensor ``[num_layers, end - begin, qk_head_dim]``, the pages' dtype
            Of the MLA layers.
        """
        begin, end = self._range(seq_id, begin, end)
        kv = self._empty_rows("mla", seq_id, begin, end)
        global_function(CACHE + "debug_get_kv_mla")(self, as_int("seq_id", seq_id), begin, end, kv)
        return kv

    def debug_set_kv(self, seq_id: int, begin: int, k: Any, v: Any) -> None:
        """Overwrite K and V of the positions from `begin`; forks keep what they have.

        Parameters
        ----------
        k, v : ``[num_layers, n, num_kv_heads, head_dim]``, the pages' dtype
        """
        k, v = self._tensor("k", k), self._tensor("v", v)
        ids = as_int("seq_id", seq_id), as_int("begin", begin)
        global_function("pagedkv.debug_set_kv")(self, *ids, k, v)

    def debug_set_kv_mla(self, seq_id: int, begin: int, kv: Any) -> None:
        """Overwrite latent rows from `begin` by ``kv [num_layers, n, qk_head_dim]``."""
        ids = as_int("seq_id", seq_id), as_int("begin", begin)
        global_function("pagedkv.debug_set_kv_mla")(self, *ids, self._tensor("kv", kv))

    def stats(self) -> CacheStats:
        """Return counts of pages, bytes and events.

        Returns
        -------
        CacheStats
            A dictionary; its entry ``groups`` has a dictionary for each layer group.
        """
        raw = dict(global_function("pagedkv.stats")(self).items())
        raw["groups"] = [dict(group.items()) for group in raw["groups"]]
        return cast("CacheStats", raw)

    def check_integrity(self) -> None:
        """Prove the invariants of the state; raise a RuntimeError that says what is broken."""
        global_function("pagedkv.check_integrity")(self)

    def sequence_ids(self) -> list[int]:
        """Ids of all sequences, in ascending order."""
        return list(global_function("pagedkv.sequence_ids")(self))

    def draw(self, path: str | Path | None = None) -> str:
        """The page table of every sequence as text, by group; ``*`` marks a shared page.

        Parameters
        ----------
        path : optional
            Where to write a picture as well: an SVG of who owns which page, and how full they are.
        """
        page_map = PageMap.of(self)
        if path is not None:
            Path(path).write_text(page_map.to_svg(), encoding="utf-8")
        return page_map.to_text()

    def page_table(self, seq_id: int, group: int = 0) -> list[int]:
        """Page ids that a group of layers keeps of a sequence, in order of position."""
        ids = as_int("seq_id", seq_id), as_int("group", group)
        return list(global_function("pagedkv.page_table")(self, *ids))

    def cached_pages(self, group: int = 0) -> list[int]:
        """Pages of a group of layers that no sequence holds, but whose content is still known.

        They count as available. The least recently used page comes first: it is reclaimed first.
        """
        return list(global_function("pagedkv.cached_pages")(self, as_int("group", group)))

    def sequence_window(self, seq_id: int) -> tuple[int, int, int]:
        """Window of a sequence (0: none), its sinks, and how many positions it has dropped."""
        return tuple(global_function("pagedkv.sequence_window")(self, as_int("seq_id", seq_id)))

    def first_position(self, seq_id: int, group: int = 0) -> int:
        """First position that a group of layers keeps of a sequence; 0 without a window."""
        ids = as_int("seq_id", seq_id), as_int("group", group)
        return global_function("pagedkv.first_position")(self, *ids)

    def _tensor(self, name: str, value: Any) -> tvm_ffi.Tensor:
        return as_tensor(name, value, self.description["device"])

    def _range(self, seq_id: int, begin: int, end: int | None) -> tuple[int, int]:
        end = self.sequence_length(seq_id) if end is None else as_int("end", end)
        return as_int("begin", begin), end

    def _empty_rows(self, kind: str, seq_id: int, begin: int, end: int) -> tvm.runtime.Tensor:
        """Room for these positions of all MLA layers, or of all others."""
        info = self.description
        layers = [x for x in info["layers"] if (x["kind"] == "mla") == (kind == "mla")]
        count = max(0, end - begin)
        # A range that is too long must fail by its bounds, not by an attempt to allocate it.
        if not layers or end > self.sequence_length(seq_id):
            shape: tuple[int, ...] = (0,)
        else:
            heads = () if kind == "mla" else (layers[0]["num_kv_heads"],)
            shape = (len(layers), count, *heads, layers[0]["qk_head_dim"])
        return tvm.runtime.empty(shape, info["kv_dtype"], info["device"])
