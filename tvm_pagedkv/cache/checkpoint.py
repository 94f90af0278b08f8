# SPDX-License-Identifier: Apache-2.0
"""Sequences in a file, in the safetensors format: each page once, whoever shares it.

A file has a tensor ``layer.{i}`` for each layer, ``[num_pages, *page]`` as `PageFormat` describes
pages, ``states.{i}`` for the states of each recurrent layer, and in its ``__metadata__`` what a
checkpoint says of each sequence, the tables that tell which pages these have, and checksums of the
header and of every tensor. What was never written to a page is zero in the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import json
import math
import operator
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .._functions import CACHE, STATE, global_function
from .conversion import formats_of, import_converted, retyped
from .inspection import CacheInspection
from .page_format import PageFormat, PoolPages, page_groups

_FORMAT, _VERSION = "tvm_pagedkv.sequences", "1"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * (2 * _DIGEST_BYTES)
_HEADER_DIGEST = re.compile(rb'"header_checksum":"([0-9a-f]{%d})"' % len(_NO_DIGEST))
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BLOCK_BYTES = 8 * 2**20

_digest = functools.partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)


# --- write --------------------------------------------------------------------------------------


def save(
    cache: CacheInspection,
    path: str | os.PathLike,
    seq_ids: Iterable[int] | None = None,
    *,
    history: bool = True,
) -> None:
    """`KVCache.save`."""
    path = Path(path)
    seq_ids = cache.sequence_ids() if seq_ids is None else _ids(seq_ids)
    if not isinstance(history, bool):
        raise TypeError(f"history must be a bool, got {history!r}")
    metadata = [global_function("pagedkv.checkpoint_metadata")(cache, i, history) for i in seq_ids]
    lengths = [cache.sequence_length(i) for i in seq_ids]
    infos = page_groups(cache)
    pools: dict[int, PoolPages] = {}
    for index, info in enumerate(infos):
        if info["pool"] not in pools:
            pools[info["pool"]] = PoolPages(cache, index, seq_ids, lengths, history)

    # Layers whose pages are shared alike have one table.
    tables: list[list[list[int]]] = []
    for pages in pools.values():
        if pages.numbers not in tables:
            tables.append(pages.numbers)
    num_pages = [len(pools[info["pool"]].ids) for info in infos]
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "header_checksum": _NO_DIGEST,
        "layout": cache.description["layout"],
        "seq_ids": _json(seq_ids),
        "metadata": _json(metadata),
        "tables": _json(tables),
        "table_of_layer": _json([tables.index(pools[x["pool"]].numbers) for x in infos]),
        "checksums": _json([_NO_DIGEST] * len(infos)),
    }
    formats = [PageFormat.of(cache, index) for index in range(len(infos))]
    header = {"__metadata__": about} | _tensors(infos, formats, num_pages)

    # Under another name until it is whole.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(unfinished, "xb", opener=_open_private) as file:
            file.write(_encode(header))
            checksums = []
            for index, info in enumerate(infos):
                pages, digest = pools[info["pool"]], _digest()
                for block in _blocks(formats[index], len(pages.ids)):
                    data = _empty(formats[index], len(block))
                    global_function("pagedkv.export_pages")(
                        cache, index, pages.shape(pages.ids, block),
                        pages.shape(pages.num_slots, block), data,
                    )  # fmt: skip
                    digest.update(_bytes(data))
                    file.write(_bytes(data))
                checksums.append(digest.hexdigest())
            about["checksums"] = _json(checksums)
            about["header_checksum"] = _digest(_encode(header)).hexdigest()
            file.seek(0)
            file.write(_encode(header))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _open_private(path: str, flags: int) -> int:
    """K and V tell what was said: the file is its owner's alone, from the first byte on."""
    return os.open(path, flags, 0o600)


# --- read ---------------------------------------------------------------------------------------


def load(
    cache: CacheInspection,
    path: str | os.PathLike,
    seq_ids: Mapping[int, int] | Iterable[int] | None = None,
    *,
    convert: bool = False,
) -> list[int]:
    """`KVCache.load`."""
    with open(path, "rb") as file:
        try:
            return _load(cache, file, seq_ids, convert)
        except _DamagedFile as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


class _DamagedFile(Exception):
    """Says what is wrong with the file."""


def _load(
    cache: CacheInspection,
    file: io.BufferedReader,
    seq_ids: Mapping[int, int] | Iterable[int] | None,
    convert: bool,
) -> list[int]:
    header = _read_header(file)
    contents = _Contents(cache, header, convert)
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes != file.tell() + contents.num_bytes:
        raise _DamagedFile(
            f"must have {file.tell() + contents.num_bytes} bytes by its header, got {file_bytes}"
        )
    new_ids = contents.select(seq_ids)
    taken = sorted(set(new_ids.values()) & set(cache.sequence_ids()))
    if taken:
        raise ValueError(f"sequence {taken[0]} is in the cache already; load it under another id")
    wanted = contents.prepare(new_ids)
    try:
        for layer in range(len(wanted)):
            _read_layer(cache, file, layer, contents, wanted[layer], new_ids)
        if new_ids:
            global_function(CACHE + "finish_import")(cache, next(iter(new_ids.values())))
    except BaseException:
        if new_ids:
            importing = next(iter(new_ids.values()))
            global_function(STATE + "remove_sequence")(cache, importing)  # and all of the import
        raise
    return list(new_ids.values())


def _read_header(file: io.BufferedReader) -> dict[str, Any]:
    """The header, once its checksum is right."""
    prefix = file.read(8)
    num_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or num_bytes > _MAX_HEADER_BYTES:
        raise _DamagedFile(f"is not a safetensors file: its header would have {num_bytes} bytes")
    raw = file.read(num_bytes)
    found = _HEADER_DIGEST.search(raw)
    if len(raw) < num_bytes or not raw.startswith(b"{") or not found:
        raise _DamagedFile("was not written by KVCache.save, or its header is damaged")
    blank = raw[: found.start(1)] + _NO_DIGEST.encode() + raw[found.end(1) :]
    if _digest(prefix + blank).hexdigest().encode() != found[1]:
        raise _DamagedFile("the header is damaged: its checksum is wrong")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise _DamagedFile("the header is not JSON") from None


class _Contents:
    """The content of a header, compared with the cache; checksums do not stop malice."""

    def __init__(self, cache: CacheInspection, header: dict[str, Any], convert: bool):
        self.cache = cache
        try:
            about = header.pop("__metadata__")
            if (about["format"], about["version"]) != (_FORMAT, _VERSION):
                raise _DamagedFile(
                    f"must have format {_FORMAT} {_VERSION}, got {about['format']} "
                    f"{about['version']}"
                )
            try:
                self.formats = formats_of(cache, about["layout"], convert=convert)
            except ValueError as error:
                raise _DamagedFile(str(error)) from None
            self.is_converted = about["layout"] != cache.description["layout"]
            self.seq_ids = _ids(_integers(json.loads(about["seq_ids"])))
            self.metadata = [str(text) for text in json.loads(about["metadata"])]
            if self.is_converted:
                self.metadata = [retyped(cache, text) for text in self.metadata]
            tables = [[_integers(x) for x in table] for table in json.loads(about["tables"])]
            of_layer = _integers(json.loads(about["table_of_layer"]))
            self.checksums = list(json.loads(about["checksums"]))
            self.infos = page_groups(cache)
            num_layers = len(self.infos)
            if {len(of_layer), len(self.checksums)} != {num_layers}:
                raise ValueError(f"it does not have {num_layers} layers")
            if {len(self.metadata), *map(len, tables)} - {len(self.seq_ids)}:
                raise ValueError("its lists of sequences differ in length")
            if any(n < 0 for table in tables for x in table for n in x):
                raise ValueError("a page number is negative")
            if any(not 0 <= index < len(tables) for index in of_layer):
                raise ValueError("a layer has no table")
            self.tables = [tables[index] for index in of_layer]
            self.num_pages = [
                1 + max((n for x in table for n in x), default=-1) for table in self.tables
            ]
            tensors = _tensors(self.infos, self.formats, self.num_pages)
            if header != tensors:
                raise ValueError("its tensors do not match its page tables")
        except (
            AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError,
            ValueError,
        ) as error:  # fmt: skip
            raise _DamagedFile(f"the header is malformed: {error}") from None
        self.num_bytes = max((x["data_offsets"][1] for x in tensors.values()), default=0)

    def select(self, seq_ids: Mapping[int, int] | Iterable[int] | None) -> dict[int, int]:
        """Ids in the file -> ids in the cache."""
        old = self.seq_ids if seq_ids is None else _ids(seq_ids)
        new = _ids(seq_ids.values()) if isinstance(seq_ids, Mapping) else old
        new_ids = dict(zip(old, new, strict=True))
        unknown = [i for i in new_ids if i not in self.seq_ids]
        if unknown:
            raise KeyError(f"no sequence {unknown[0]} in the file, which has {self.seq_ids}")
        return new_ids

    def prepare(self, new_ids: dict[int, int]) -> list[np.ndarray]:
        """Begin the import; returns per layer which pages of the file it needs."""
        chosen = [self.seq_ids.index(i) for i in new_ids]
        wanted: list[np.ndarray] = []
        pool_tables: dict[int, list[list[int]]] = {}
        for info, table in zip(self.infos, self.tables, strict=True):
            numbers = [table[i] for i in chosen]
            mask = np.zeros(self.num_pages[len(wanted)], np.bool_)
            mask[np.array([n for x in numbers for n in x], np.int64)] = True
            renumbered = (np.cumsum(mask) - 1).tolist()
            numbers = [[renumbered[n] for n in x] for x in numbers]
            if pool_tables.setdefault(info["pool"], numbers) != numbers:
                raise _DamagedFile("layers of one kind have different tables")
            wanted.append(mask)
        if not chosen:
            return wanted
        per_sequence = [
            [tvm_ffi.Shape(tuple(pool_tables[p][i])) for p in sorted(pool_tables)]
            for i in range(len(chosen))
        ]
        try:
            global_function("pagedkv.prepare_imports")(
                self.cache, tvm_ffi.Shape(tuple(new_ids.values())),
                [self.metadata[i] for i in chosen], per_sequence,
            )  # fmt: skip
        except ValueError as error:
            raise _DamagedFile(str(error)) from None
        return wanted


def _read_layer(
    cache: CacheInspection,
    file: io.BufferedReader,
    layer: int,
    contents: _Contents,
    wanted: np.ndarray,
    new_ids: dict[int, int],
) -> None:
    """Read all pages of a layer, for the checksum, and import those that are wanted."""
    digest, pages = _digest(), contents.formats[layer]
    for block in _blocks(pages, len(wanted)):
        data = _empty(pages, len(block))
        view = _bytes(data)
        if file.readinto(view) != len(view):
            raise _DamagedFile(f"ends within layer {layer}")
        digest.update(view)
        mask = wanted[block.start : block.stop]
        if not mask.any():
            continue
        importing = next(iter(new_ids.values()))
        if contents.is_converted and "row_width" not in contents.infos[layer]:
            rows = np.frombuffer(view, np.uint8).reshape(len(block), -1)[mask]
            import_converted(cache, importing, layer, pages, rows)
            continue
        if not mask.all():
            rows = np.frombuffer(view, np.uint8).reshape(len(block), -1)[mask]
            data = _empty(pages, len(rows))
            _bytes(data)[:] = rows.reshape(-1)
        global_function("pagedkv.import_pages")(cache, importing, layer, data)
    if digest.hexdigest() != contents.checksums[layer]:
        raise _DamagedFile(f"layer {layer} is damaged: its checksum is wrong")


# --- both ---------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _ids(values: Iterable[int]) -> list[int]:
    """Ids that a caller gives."""
    ids = [operator.index(value) for value in values]
    if len(set(ids)) != len(ids):
        raise ValueError(f"sequence ids must be distinct, got {ids}")
    return _integers(ids)


def _integers(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(x) is not int for x in values):
        raise ValueError("expected a list of integers")
    if any(not -(2**63) <= x < 2**63 for x in values):
        raise ValueError("an integer exceeds 64 bits")
    return values


def _encode(header: dict[str, Any]) -> bytes:
    """Length and text of a header, with blanks that align the tensors."""
    text = _json(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError("the page tables exceed the size limit of a file's header")
    return len(text).to_bytes(8, "little") + text


def _tensors(
    infos: list[dict[str, Any]], formats: list[PageFormat], num_pages: list[int]
) -> dict[str, Any]:
    """The header's entries of the tensors, one after the other."""
    entries, begin = {}, 0
    for info, pages, count in zip(infos, formats, num_pages, strict=True):
        end = begin + count * pages.num_bytes
        entries[info["name"]] = {
            "dtype": _DTYPES[pages.dtype],
            "shape": [count, *pages.shape],
            "data_offsets": [begin, end],
        }
        begin = end
    return entries


def _blocks(pages: PageFormat, num_pages: int) -> Iterator[range]:
    step = max(1, _BLOCK_BYTES // pages.num_bytes)
    for begin in range(0, num_pages, step):
        yield range(begin, min(begin + step, num_pages))


def _empty(pages: PageFormat, num_pages: int) -> tvm.runtime.Tensor:
    """Room for a part of a page group, on the host."""
    return tvm.runtime.empty((1, num_pages, *pages.shape), pages.dtype)


def _bytes(tensor: tvm.runtime.Tensor) -> memoryview:
    """The memory of a tensor on the host, which must outlive it."""
    num_bytes = math.prod(tensor.shape) * tvm_ffi.dtype(tensor.dtype).itemsize
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")
