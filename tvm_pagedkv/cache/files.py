# SPDX-License-Identifier: Apache-2.0
"""The part of `KVCache` that saves sequences to files and loads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from . import checkpoint
from .prefix import CachePrefix


class CacheFiles(CachePrefix):
    """The methods of `KVCache` for files."""

    __slots__ = ()

    def save(
        self,
        path: str | os.PathLike,
        seq_ids: Iterable[int] | None = None,
        *,
        history: bool = True,
    ) -> None:
        """Write sequences to a file in the safetensors format, for `load`.

        Shared pages are written once. The file is renamed to `path` when it is complete, and
        replaces an older one. It has a checksum per layer, and only its owner can read it (mode
        0600). Saving needs a few megabytes of memory beside the cache.

        Parameters
        ----------
        path : path
        seq_ids : iterable of int, optional
            Sequences to write; None: all.
        history : bool
            Whether forks and pops of a loaded sequence reach back as far as they do now, in caches
            with windows of layers or recurrent layers. Without it the file is smaller: it has what
            the next steps and pops of 16 positions need.

        Raises
        ------
        KeyError
            If there is no such sequence.
        ValueError
            If an id repeats, a step is in progress, or a layer left a row of a sequence out of its
            step.
        OSError
            If the file cannot be written.
        """
        checkpoint.save(self, path, seq_ids, history=history)

    def load(
        self,
        path: str | os.PathLike,
        seq_ids: Mapping[int, int] | Iterable[int] | None = None,
        *,
        convert: bool = False,
    ) -> list[int]:
        """Add sequences from a file that `save` wrote: either all of them or none.

        The sequences share pages as they did when they were saved, and continue bit for bit as they
        would have. Capacity and device of the cache may differ. The layout must not:
        ``description["layout"]``, which has the kinds, windows, heads, dimensions and rotation of
        the layers, and the size and type of pages.

        Parameters
        ----------
        path : path
        seq_ids : mapping or iterable of int, optional
            Ids in the file -> new ids, or ids to keep; None: all.
        convert : bool
            Whether to take a file whose pages have another `kv_dtype` or other static scales. Rows
            are dequantized and rounded again, layer by layer, so the sequences do not continue bit
            for bit.

        Returns
        -------
        list of int
            The ids of the new sequences.

        Raises
        ------
        ValueError
            If the file is damaged or has another layout (with `convert`: in more than these),
            or if an id is in use.
        KeyError
            If the file has no such sequence.
        CacheFullError
            If too few pages are available.
        OSError
            If the file cannot be read.
        """
        return checkpoint.load(self, path, seq_ids, convert=convert)
