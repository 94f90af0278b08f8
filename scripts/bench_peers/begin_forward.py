# SPDX-License-Identifier: Apache-2.0
"""``begin_forward`` of one row for every sequence, as a decode step does."""

from __future__ import annotations

import functools

import tvm
from tvm_ffi import Shape

from bench_peers.peer import Prepared
from tvm_pagedkv import KVCacheConfig, build, use_stock_runtime

CONTEXT = 64


def prepare_begin_forward(runtime: str, batch: int) -> Prepared:
    """A cache of `runtime` with `batch` sequences of `CONTEXT` positions.

    Each run is one ``begin_forward``; what comes before it closes the last step and takes its
    rows away again.
    """
    from tests.stock import create_positional, stock_kernels

    tokens = batch * 2 * CONTEXT
    config = KVCacheConfig(
        *(1, 1, 1, 8), max_num_sequences=batch, max_total_tokens=tokens, prefill_chunk_size=tokens
    )
    if runtime == "stock":
        use_stock_runtime()
        kernels, tag = stock_kernels(1, 1, 8, "float32"), "tirx"
    else:
        kernels, tag = build(config).kernels, "pagedkv"
    cache = create_positional(config, kernels, tag)
    prefix = "vm.builtin.kv_state_"
    add, pop, begin, end = (
        tvm.get_global_func(prefix + name)
        for name in ("add_sequence", "popn", "begin_forward", "end_forward")
    )

    def undo() -> None:
        end(cache)
        for i in range(batch):
            pop(cache, i, 1)

    for i in range(batch):
        add(cache, i)
    ids = Shape(range(batch))
    begin(cache, ids, Shape([CONTEXT] * batch))
    end(cache)
    begin(cache, ids, Shape([1] * batch))
    undo()
    run = functools.partial(begin, cache, ids, Shape([1] * batch))
    return Prepared(run, before=undo)
