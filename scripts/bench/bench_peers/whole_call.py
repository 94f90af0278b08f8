# SPDX-License-Identifier: Apache-2.0
"""The call of a model for a layer: `KVCache.attention` with fused rows, no begin_forward.

Each run appends K and V of the step and attends, with the rotation, the checks and the calls from
Python that belong to it. A step of a model begins once for all of its layers, so `begin_forward` is
outside. The output exists already, as it does in a compiled model.
"""

from __future__ import annotations

import functools

import numpy as np
import tvm
from lib.cases import PAGE

import tvm_pagedkv as pkv
from bench_peers.peer import Prepared
from bench_peers.tvm_kernels import Ours


class OursWholeCall(Ours):
    """The whole call of a layer."""

    def prepare(self, case, inputs, dtype, heads) -> Prepared:
        if case.kind == "begin_forward":
            return super().prepare(case, inputs, dtype, heads)
        rows, contexts = case.rows_and_contexts()
        cache = _shuffled_cache(contexts, int(rows.sum()), dtype, heads)
        ids = list(range(len(rows)))
        k, v = (np.split(x, np.cumsum(contexts)[:-1]) for x in (inputs.k, inputs.v))
        for i, past in enumerate(contexts - rows):
            cache.add_sequence(i)
            for begin in range(0, past, cache.description["prefill_chunk_size"]):
                end = min(past, begin + cache.description["prefill_chunk_size"])
                _take_slots(cache, [i], [end - begin])
                cache.debug_set_kv(i, begin, k[i][None, begin:end], v[i][None, begin:end])
        cache.begin_forward(ids, rows.tolist())
        new_k, new_v = (
            np.concatenate([x[-n:] for x, n in zip(xs, rows, strict=True)]) for xs in (k, v)
        )
        positions = np.concatenate(
            [np.arange(end - n, end) for n, end in zip(rows, contexts, strict=True)]
        )
        q, new_k = (_turned_back(x, positions) for x in (inputs.q, new_k))
        qkv = tvm.runtime.tensor(np.concatenate([q, new_k, new_v], axis=1))
        output = tvm.runtime.tensor(np.zeros_like(inputs.q))
        run = functools.partial(cache.attention, 0, qkv, out=output)
        return Prepared(run, output.numpy)


def _shuffled_cache(contexts, num_rows: int, dtype: str, heads) -> pkv.KVCache:
    """An empty cache with room for the sequences, whose free pages are in random order."""
    num_pages = int((-(-contexts // PAGE)).sum())
    chunk = max(num_rows, 2048)
    cache = pkv.create(
        pkv.KVCacheConfig(
            *(1, heads.query, heads.kv, heads.dim),
            dtype=dtype,
            page_size=PAGE,
            max_num_sequences=max(num_pages, len(contexts)),
            max_total_tokens=num_pages * PAGE,
            prefill_chunk_size=chunk,
        )
    )
    for i in range(num_pages):
        cache.add_sequence(i)
    for i in range(0, num_pages, chunk // PAGE):
        ids = list(range(i, min(num_pages, i + chunk // PAGE)))
        _take_slots(cache, ids, [PAGE] * len(ids))
    for i in np.random.default_rng(0).permutation(num_pages):
        cache.remove_sequence(int(i))
    return cache


def _take_slots(cache: pkv.KVCache, ids: list[int], num_rows: list[int]) -> None:
    """Append rows without K and V."""
    cache.begin_forward(ids, num_rows)
    cache.end_forward()


def _turned_back(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rows that the rotation of the append turns into `rows`."""
    from tests.reference import Rope, rotate

    return rotate(rows, -positions, Rope(rotary_dim=rows.shape[-1])).astype(rows.dtype)
