# SPDX-License-Identifier: Apache-2.0
"""``begin_forward`` of one row for every sequence, as a decode step does."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tvm
from lib.cases import Heads
from tvm_ffi import Shape

from bench_peers.peer import Prepared
from tvm_pagedkv import KVCacheConfig

CONTEXT = 64
SMALL = Heads(1, 1, 8)  # begin_forward calls no kernel
KERNELS = (
    *("transpose_append", "prefill_ragged", "prefill", "decode", "merge", "split_rotary"),
    *("copy_single_page", "debug_get_kv", "compact_copy"),
)


def prepare_begin_forward(kernels: Mapping, tag: str | None, batch: int) -> Prepared:
    """A cache with `batch` sequences of `CONTEXT` positions.

    Each run is one ``begin_forward``; what comes before it closes the last step and takes its
    rows away again.

    Parameters
    ----------
    kernels : name -> function
        Those of `KERNELS`, for one layer of heads `SMALL` in float32.
    tag : str or None
        Of the kernels, as the positional constructor takes it.
    batch : int
    """
    from tests.support.emulators.stock import create_positional

    tokens = batch * 2 * CONTEXT
    config = KVCacheConfig(
        *(1, SMALL.query, SMALL.kv, SMALL.dim),
        max_num_sequences=batch,
        max_total_tokens=tokens,
        prefill_chunk_size=tokens,
    )
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
    return Prepared(functools.partial(begin, cache, ids, Shape([1] * batch)), before=undo)
