# SPDX-License-Identifier: Apache-2.0
"""Kernels in NumPy, called back from the runtime object, to test it apart from the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi

import tvm_pagedkv as pkv

from ... import reference
from ...reference import window as reference_window
from ...reference.shared_prefix import shared_attention, shared_latent_attention


def view(tensor: tvm_ffi.Tensor) -> np.ndarray:
    """A NumPy array on the memory of a tensor."""
    return np.from_dlpack(tensor)


def _rope(theta: float, dim: int, scale: float = 1.0) -> reference.Rope:
    return reference.Rope(theta=theta, scale=scale, rotary_dim=dim)


def _alibi(slopes, q_positions, k_offsets):
    return None if slopes is None else (slopes, view(q_positions), view(k_offsets))


def _inline(rotary_mode, rope_theta, rope_scale, dim, q_positions, k_offsets):
    if not rotary_mode:
        return None
    return _rope(rope_theta, dim, rope_scale), view(q_positions), view(k_offsets)


def transpose_append(pages, k, v, slots):
    pages = view(pages)
    pages[...] = reference.append(pages, view(k), view(v), view(slots))


def split_rotary(qkv, positions, q, k, v, apply_rope):
    qkv, positions = view(qkv), view(positions)
    q, k, v = view(q), view(k), view(v)
    num_qo_heads, num_kv_heads = q.shape[1], k.shape[1]
    rotate = (
        (lambda x: reference.rotate(x, positions, _rope(1e4, x.shape[2])))
        if apply_rope
        else (lambda x: x)
    )
    q[...] = rotate(qkv[:, :num_qo_heads])
    k[...] = rotate(qkv[:, num_qo_heads : num_qo_heads + num_kv_heads])
    v[...] = qkv[:, num_qo_heads + num_kv_heads :]


def rope_append(qkv, query_indptr, positions, slots, q, pages, apply_rope):
    qkv = view(qkv)
    num_qo_heads, num_kv_heads = view(q).shape[1], view(pages).shape[2]
    k = tvm.runtime.tensor(qkv[:, num_qo_heads : num_qo_heads + num_kv_heads].copy())
    v = tvm.runtime.tensor(qkv[:, num_qo_heads + num_kv_heads :].copy())
    assert view(query_indptr)[-1] == len(qkv)
    split_rotary(tvm.runtime.tensor(qkv.copy()), positions, q, k, v, apply_rope)
    transpose_append(pages, k, v, slots)


def append_prefill(
    qkv, query_indptr, rope_positions, slots, pages, page_indptr, page_ids, lengths,
    k_offsets, q_positions, o, lse, apply_rope, sm_scale,
):  # fmt: skip
    q = tvm.runtime.tensor(np.zeros_like(view(o)))
    rope_append(qkv, query_indptr, rope_positions, slots, q, pages, apply_rope)
    prefill(
        q, query_indptr, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
        1, 0, 1.0, 1e4, sm_scale,
    )  # fmt: skip


def prefill(
    q, query_indptr, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
    causal, rotary_mode, rope_scale, rope_theta, sm_scale, window=None, *, softcap=None,
    slopes=None,
):  # fmt: skip
    dim, alibi = view(q).shape[2], _alibi(slopes, q_positions, k_offsets)
    windows = view(lengths).reshape(-1, len(view(query_indptr)) - 1)
    if len(windows) > 1:
        view(o)[...], view(lse)[...] = reference_window.paged_attention(
            view(q), view(query_indptr), view(pages), view(page_indptr), view(page_ids), windows,
            sm_scale, causal=bool(causal), softcap=softcap, alibi=alibi,
            inline=_inline(rotary_mode, rope_theta, rope_scale, dim, q_positions, k_offsets),
        )  # fmt: skip
        return
    view(o)[...], view(lse)[...] = reference.paged_attention(
        view(q), view(query_indptr), view(pages), view(page_indptr), view(page_ids),
        view(lengths), sm_scale, causal=bool(causal), window=window, k_offsets=view(k_offsets),
        softcap=softcap, alibi=alibi,
        inline=_inline(rotary_mode, rope_theta, rope_scale, dim, q_positions, k_offsets),
    )  # fmt: skip


def decode(
    q, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
    rotary_mode, rope_scale, rope_theta, sm_scale, window=None, **extras,
):  # fmt: skip
    indptr = tvm.runtime.tensor(np.arange(len(view(q)) + 1, dtype="int32"))
    # With a window the caller leaves out the row itself where it is not in the pages; a chunk
    # begins where that of the row does.
    is_past = False
    if window is not None and window < 0:
        num_pages, page_size = np.diff(view(page_indptr)), view(pages).shape[3]
        kv_lens = np.where(num_pages > 0, (num_pages - 1) * page_size + view(lengths), 0)
        is_past = bool((view(q_positions) - view(k_offsets) >= kv_lens).all())
    prefill(
        q, indptr, pages, page_indptr, page_ids, lengths, k_offsets, q_positions, o, lse,
        int(not is_past), rotary_mode, rope_scale, rope_theta, sm_scale, window, **extras,
    )  # fmt: skip


def _segments(page_indptr, page_ids, row_indptr, row_ids, first_positions, first, last):
    pages, page_ids, starts, rows = (view(x) for x in (page_indptr, page_ids, row_indptr, row_ids))
    return [
        (
            page_ids[pages[s] : pages[s + 1]],
            rows[starts[s] : starts[s + 1]],
            0 if first_positions is None else view(first_positions)[s],
        )
        for s in range(first, last)
    ]


def prefill_shared(
    q, pages, page_indptr, page_ids, first_positions, row_indptr, row_ids, q_positions, o, lse,
    first, last, rotary_mode, rope_scale, rope_theta, sm_scale, *, softcap=None, slopes=None,
):  # fmt: skip
    rope = _rope(rope_theta, view(q).shape[2], rope_scale)
    segments = _segments(page_indptr, page_ids, row_indptr, row_ids, first_positions, first, last)
    view(o)[...], view(lse)[...] = shared_attention(
        view(q), view(pages), segments, view(o), view(lse), sm_scale, softcap=softcap,
        inline=(rope, view(q_positions)) if rotary_mode else None,
        alibi=None if slopes is None else (slopes, view(q_positions)),
    )  # fmt: skip


def mla_prefill_shared(
    q, pages, page_indptr, page_ids, row_indptr, row_ids, o, lse, first, last, sm_scale
):
    segments = _segments(page_indptr, page_ids, row_indptr, row_ids, None, first, last)
    view(o)[...], view(lse)[...] = shared_latent_attention(
        view(q), view(pages), segments, view(o), view(lse), sm_scale
    )


def prefill_ragged(
    q, query_indptr, k, v, kv_indptr, q_positions, k_offsets, o, lse,
    causal, rotary_mode, rope_scale, rope_theta, sm_scale, window=None, *, softcap=None,
    slopes=None,
):  # fmt: skip
    dim = view(q).shape[2]
    view(o)[...], view(lse)[...] = reference.ragged_attention(
        view(q), view(query_indptr), view(k), view(v), view(kv_indptr), sm_scale,
        causal=bool(causal), window=window, k_offsets=view(k_offsets), softcap=softcap,
        alibi=_alibi(slopes, q_positions, k_offsets),
        inline=_inline(rotary_mode, rope_theta, rope_scale, dim, q_positions, k_offsets),
    )  # fmt: skip


def merge(o, lse, o_other, lse_other):
    o, lse = view(o), view(lse)
    o[...], lse[...] = reference.merge(o, lse, view(o_other), view(lse_other))


def apply_sinks(o, lse, sinks):
    o, lse = view(o), view(lse)
    o[...], lse[...] = reference.apply_sinks(o, lse, view(sinks))


def copy_single_page(pages, source, destination, length):
    pages = view(pages)
    pages[destination, ..., :length, :] = pages[source, ..., :length, :]


def copy_pages(pages, copies):
    for copy in view(copies).T:
        copy_single_page(pages, *copy)


def transpose_append_mla(pages, kv, slots):
    pages, slots = view(pages), view(slots)
    pages.reshape(-1, pages.shape[2])[slots[slots >= 0]] = view(kv)[slots >= 0]


def mla_prefill(
    q,
    query_indptr,
    pages,
    page_indptr,
    page_ids,
    lengths,
    o,
    lse,
    causal,
    sm_scale,
    window=None,
):
    view(o)[...], view(lse)[...] = reference.mla_paged_attention(
        view(q), view(query_indptr), view(pages), view(page_indptr), view(page_ids),
        view(lengths), view(o).shape[2], sm_scale, causal=bool(causal), window=window,
    )  # fmt: skip


KERNELS: dict[str, Callable] = {
    "transpose_append": transpose_append,
    "split_rotary": split_rotary,
    "prefill": prefill,
    "decode": decode,
    "prefill_ragged": prefill_ragged,
    "merge": merge,
    "apply_sinks": apply_sinks,
    "prefill_sliding": prefill,
    "prefill_ragged_sliding": prefill_ragged,
    "decode_sliding": decode,
    "prefill_shared": prefill_shared,
    "copy_single_page": copy_single_page,
}
MLA_KERNELS: dict[str, Callable] = {
    "transpose_append_mla": transpose_append_mla,
    "mla_prefill": mla_prefill,
    "mla_prefill_sliding": mla_prefill,
    "mla_prefill_shared": mla_prefill_shared,
    "prefill_ragged": prefill_ragged,
    "prefill_ragged_sliding": prefill_ragged,
    "merge": merge,
    "copy_single_page": copy_single_page,
}

LAYER = {"kind": "mha", "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 8}
MLA_LAYER = {
    "kind": "mla",
    "num_qo_heads": 4,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "mla_original_qk_head_dim": 16,
    "mla_original_v_head_dim": 8,
}


def make_config(num_layers: int = 2, layers: list | None = None, **fields: Any) -> dict[str, Any]:
    """Named fields of a small cache: 16 pages of 4 slots unless told otherwise."""
    small = {
        "max_num_sequences": 8,
        "max_total_tokens": 64,
        "prefill_chunk_size": 32,
        "page_size": 4,
        "dtype": "float32",
        "rope_mode": 0,
    }
    return {**small, **fields, "layers": [LAYER] * num_layers if layers is None else layers}


def make_cache(
    kernels: Any = None, device: tvm.runtime.Device | None = None, **fields: Any
) -> pkv.KVCache:
    """A cache over the NumPy kernels; `kernels` replaces or adds some of them.

    On the CPU, or on a device, on which kernels of `EmulatedDevice.kernels` are launched.
    """
    create = tvm_ffi.get_global_func("pagedkv.create")
    if not isinstance(kernels, list):
        kernels = {**KERNELS, **(kernels or {})}
    return create(make_config(**fields), kernels, device or tvm.cpu())


def poison(cache: pkv.KVCache) -> None:
    """NaN into every free page and every slot that is not in use."""
    tvm_ffi.get_global_func("pagedkv.poison_free_pages")(cache)


def share_every_prefix(cache: pkv.KVCache) -> None:
    """Read every page that sequences of a step share once, however little that saves."""
    tvm_ffi.get_global_func("pagedkv.share_every_prefix")(cache)


def shuffle(cache: pkv.KVCache, seed: int) -> None:
    """Hand out the free pages in a random order."""
    tvm_ffi.get_global_func("pagedkv.shuffle_free_pages")(cache, seed)


def snapshot(cache: pkv.KVCache, seq_ids) -> dict[str, Any]:
    """Return everything that a failed call must leave alone."""
    groups = range(len(cache.stats()["groups"]))
    # Rows are read of all layers of a kind at a time, if these have one shape.
    shapes: dict[bool, set] = {}
    for x in cache.description["layers"]:
        shape = x["num_kv_heads"], x["qk_head_dim"]
        shapes.setdefault(x["kind"] == "mla", set()).add(shape)
    readers = [
        cache.debug_get_kv_mla if is_mla else cache.debug_get_kv
        for is_mla, several in shapes.items()
        if len(several) == 1
    ]
    state: dict[str, Any] = {"stats": cache.stats(), "in_forward": cache.is_in_forward}
    for seq_id in seq_ids:
        tables = [cache.page_table(seq_id, group) for group in groups]
        first = [cache.first_position(seq_id, group) for group in groups]
        rows = []
        for read in readers:
            kv = read(seq_id, max(first))
            rows += [x.numpy().tobytes() for x in (kv if isinstance(kv, tuple) else [kv])]
        lengths = cache.sequence_length(seq_id), cache.sequence_window(seq_id)
        state[seq_id] = lengths, tables, first, rows
    return state
