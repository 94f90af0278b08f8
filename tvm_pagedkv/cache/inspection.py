# SPDX-License-Identifier: Apache-2.0
"""Inspection of a cache: lengths, counters, rows, page tables, invariants."""

from __future__ import annotations

import functools
from typing import Any, cast

import tvm
import tvm_ffi

from .._functions import CACHE, as_int, global_function
from .._tensors import as_tensor
from .stats import CacheStats


class CacheInspection:
    """The methods of `KVCache` that read its state, and the ``debug_*`` methods."""

    __slots__ = ()

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Return what the cache was made from.

        A dictionary with sizes, dtypes and the device, ``layout`` (what two caches must have in
        common to exchange pages), and ``layers``, a dictionary for each layer that it keeps.
        """
        raw = dict(global_function("pagedkv.describe")(self).items())
        raw["layer_indptr"] = tuple(raw["layer_indptr"])
        raw["layers"] = [dict(layer.items()) for layer in raw["layers"]]
        for layer in raw["layers"]:  # lists, so that the description can be written as JSON
            layer["sections"] = [list(section) for section in layer["sections"]]
        return raw

    def sequence_length(self, seq_id: int) -> int:
        """Return the number of positions of a sequence.

        Raises
        ------
        KeyError
            If there is no such sequence.
        """
        return global_function(CACHE + "get_sequence_length")(self, as_int("seq_id", seq_id))

    def total_length(self) -> int:
        """Return the sum of the lengths of all sequences."""
        return global_function(CACHE + "get_total_sequence_length")(self)

    def num_available_pages(self) -> int:
        """Return the available pages, free or cached, of the layer group that has fewest.

        Layers with a window are ignored if there are others: they cannot run out first unless the
        cache was made with ``sliding_window``.
        """
        return global_function(CACHE + "get_num_available_pages")(self)

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no sequence."""
        return bool(global_function(CACHE + "empty")(self))

    @property
    def is_in_forward(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(global_function("pagedkv.is_in_forward")(self))

    def debug_get_kv(
        self, seq_id: int, begin: int = 0, end: int | None = None
    ) -> tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]:
        """Read K and V of positions ``[begin, end)`` of a sequence, as the pages hold them.

        Parameters
        ----------
        seq_id : int
        begin, end : int
            Range of positions; `end` None: the length of the sequence.

        Returns
        -------
        k, v : tvm tensors ``[num_layers, end - begin, num_kv_heads, head_dim]``, the pages' dtype
            One entry per layer that is not MLA. Quantized rows are dequantized to the cache's
            dtype.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If the range is not within the sequence, or layers differ in their heads or dtype.
        IndexError
            If a layer with a window has dropped a part of the range.
        """
        begin, end = self._range(seq_id, begin, end)
        widths = "qk_head_dim", "v_head_dim"
        k, v = (self._empty_rows("mha", seq_id, begin, end, width) for width in widths)
        global_function(CACHE + "debug_get_kv")(self, as_int("seq_id", seq_id), begin, end, k, v)
        return k, v

    def debug_get_kv_mla(
        self, seq_id: int, begin: int = 0, end: int | None = None
    ) -> tvm.runtime.Tensor:
        """Read the latent rows of positions ``[begin, end)`` of a sequence.

        Parameters and errors are those of `debug_get_kv`.

        Returns
        -------
        kv : tvm tensor ``[num_layers, end - begin, qk_head_dim]``, the dtype of `debug_get_kv`
            One entry per MLA layer.
        """
        begin, end = self._range(seq_id, begin, end)
        kv = self._empty_rows("mla", seq_id, begin, end)
        global_function(CACHE + "debug_get_kv_mla")(self, as_int("seq_id", seq_id), begin, end, kv)
        return kv

    def debug_set_kv(self, seq_id: int, begin: int, k: Any, v: Any) -> None:
        """Overwrite K and V of the positions from `begin` on. Forks keep what they have.

        Parameters
        ----------
        seq_id, begin : int
        k, v : tensors ``[num_layers, n, num_kv_heads, head_dim]``, the dtype of `debug_get_kv`
            One entry per layer that is not MLA. Layers with a codec quantize them.

        Raises
        ------
        KeyError, IndexError, ValueError
            As `debug_get_kv`, or if a tensor does not fit.
        CacheFullError
            If a shared page must be copied and no page is available.
        """
        k, v = self._tensor("k", k), self._tensor("v", v)
        ids = as_int("seq_id", seq_id), as_int("begin", begin)
        global_function("pagedkv.debug_set_kv")(self, *ids, k, v)

    def debug_set_kv_mla(self, seq_id: int, begin: int, kv: Any) -> None:
        """Overwrite the latent rows of the positions from `begin` on. Forks keep what they have.

        Parameters
        ----------
        seq_id, begin : int
        kv : tensor ``[num_layers, n, qk_head_dim]``, the dtype of `debug_get_kv`
            One entry per MLA layer.

        Raises
        ------
        KeyError, IndexError, ValueError, CacheFullError
            As `debug_set_kv`.
        """
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
        for name in ("groups", "state_groups"):
            raw[name] = [dict(group.items()) for group in raw[name]]
        if "prefix_tiers" in raw:
            raw["prefix_tiers"] = dict(raw["prefix_tiers"].items())
        return cast("CacheStats", raw)

    def check_integrity(self) -> None:
        """Check the invariants of the state.

        Every page is free, cached, or counted once per owner; lengths match pages; nothing dangles.

        Raises
        ------
        RuntimeError
            If one is broken; the message says which.
        """
        global_function("pagedkv.check_integrity")(self)

    def sequence_ids(self) -> list[int]:
        """Return the ids of all sequences, in ascending order."""
        return list(global_function("pagedkv.sequence_ids")(self))

    def page_table(self, seq_id: int, group: int = 0) -> list[int]:
        """Return the page ids of a sequence in a layer group, in order of position.

        Raises
        ------
        KeyError, IndexError
            If there is no such sequence or group.
        """
        ids = as_int("seq_id", seq_id), as_int("group", group)
        return list(global_function("pagedkv.page_table")(self, *ids))

    def cached_pages(self, group: int = 0) -> list[int]:
        """Return the cached pages of a layer group: those without owner whose content is known.

        They count as available. The least recently used page comes first and is reclaimed first.
        """
        return list(global_function("pagedkv.cached_pages")(self, as_int("group", group)))

    def sequence_window(self, seq_id: int) -> tuple[int, int, int]:
        """Return the sliding window of a sequence.

        Returns
        -------
        window, sinks, num_dropped : int
            Positions that the window keeps (0: there is none), leading ones of these, and the
            number of positions that have left it.
        """
        return tuple(global_function("pagedkv.sequence_window")(self, as_int("seq_id", seq_id)))

    def first_position(self, seq_id: int, group: int = 0) -> int:
        """Return the first position that a layer group keeps of a sequence; 0 without a window."""
        ids = as_int("seq_id", seq_id), as_int("group", group)
        return global_function("pagedkv.first_position")(self, *ids)

    def _state_table(self, seq_id: int, state_group: int) -> tuple[int, int, list[int]]:
        """Return the positions of the last state, the state pages given up, and those held."""
        length, first, *pages = global_function("pagedkv.state_table")(self, seq_id, state_group)
        return length, first, pages

    @property
    def _kept_layers(self) -> list[dict[str, Any]]:
        """What is kept of each layer. A recurrent layer with a convolution is here twice."""
        kinds = ("layers", "recurrent_layers", "conv_layers")
        return [layer for kind in kinds for layer in self.description[kind]]

    def _tensor(self, name: str, value: Any) -> tvm_ffi.Tensor:
        return as_tensor(name, value, self.description["device"])

    def _range(self, seq_id: int, begin: int, end: int | None) -> tuple[int, int]:
        end = self.sequence_length(seq_id) if end is None else as_int("end", end)
        return as_int("begin", begin), end

    def _empty_rows(
        self, kind: str, seq_id: int, begin: int, end: int, width: str = "qk_head_dim"
    ) -> tvm.runtime.Tensor:
        """Allocate rows for these positions of all MLA layers, or of all others."""
        info = self.description
        layers = [x for x in info["layers"] if (x["kind"] == "mla") == (kind == "mla")]
        count = max(0, end - begin)
        # A range that is too long must fail with an IndexError, not with a failed allocation.
        if not layers or end > self.sequence_length(seq_id):
            shape: tuple[int, ...] = (0,)
        else:
            heads = () if kind == "mla" else (layers[0]["num_kv_heads"],)
            shape = (len(layers), count, *heads, layers[0][width])
        return tvm.runtime.empty(
            shape, layers[0]["row_dtype"] if layers else "float32", info["device"]
        )
