# SPDX-License-Identifier: Apache-2.0
"""Timings of begin_forward where decode steps continue the last one, and where they do not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import tvm_ffi
from gpu_check_clock import Clock, Time

import tvm_pagedkv as pkv

KERNEL = "advance_arrays"
NUM_RUNS, NUM_WARM = 40, 8  # in the first steps arrays grow
MAX_PAGES_BEGUN = 6  # of each sequence, in all runs


def step_times(
    bundle: pkv.Bundle, device, clock: Clock, batches: Sequence[int], num_pages: int
) -> Iterator[tuple[str, str, Time]]:
    """Time begin_forward on an idle device, with and without the kernel `advance_arrays`.

    All sequences are forks of one, so that their pages fit into memory; page tables name every page
    of every sequence.

    Parameters
    ----------
    bundle : Bundle
        Of layers without a window.
    batches : sequence of int
        Numbers of sequences.
    num_pages : int
        That each sequence has.

    Yields
    ------
    case, peer : str
    time : Time
        Of the call on the host, and from the call until the first kernel has run.
    """
    for batch in batches:
        for peer, without in (("ours", ""), ("ours, all arrays copied", KERNEL)):
            cache = _forked(bundle, device, batch, num_pages, without)
            host, first_kernel = _times_of(cache, clock, batch)
            size = f"{batch} x {num_pages} pages"
            yield f"continued begin_forward on the host, {size}", peer, host
            yield f"continued begin_forward to the first kernel, {size}", peer, first_kernel


def _forked(bundle: pkv.Bundle, device, batch: int, num_pages: int, without: str) -> pkv.KVCache:
    """A cache with sequences that share all of their pages."""
    page_size = bundle.config.page_size
    context = num_pages * page_size
    described = bundle.cache_map(
        max_num_sequences=batch,
        max_total_tokens=context + batch * MAX_PAGES_BEGUN * page_size,
        prefill_chunk_size=max(context, batch),
    )
    described["share_prefix"] = False
    sets = [{n: f for n, f in each.items() if n != without} for each in bundle.kernel_sets]
    cache = tvm_ffi.get_global_func("pagedkv.create")(described, sets, device)
    cache.add_sequence(0)
    cache.begin_forward([0], [context])
    cache.end_forward()
    for seq_id in range(1, batch):
        # Sequences begin pages in different steps, as they do where prompts have all lengths.
        cache.fork_sequence(0, seq_id, context - seq_id % page_size)
    return cache


def _times_of(cache: pkv.KVCache, clock: Clock, batch: int) -> tuple[Time, Time]:
    ids, ones = tvm_ffi.Shape(range(batch)), tvm_ffi.Shape([1] * batch)
    begin = tvm_ffi.get_global_func("vm.builtin.kv_state_begin_forward")
    end = tvm_ffi.get_global_func("vm.builtin.kv_state_end_forward")
    first = torch.zeros(8, device=clock.device)  # what follows does next to nothing
    on_host, to_first_kernel = [], []
    for i in range(NUM_WARM + NUM_RUNS):
        clock.wait()
        start = time.perf_counter()
        begin(cache, ids, ones, None)
        begun = time.perf_counter()
        first.add_(1)
        clock.wait()
        done = time.perf_counter()
        end(cache)
        if i >= NUM_WARM:
            on_host.append(begun - start)
            to_first_kernel.append(done - start)
    return _summary(on_host), _summary(to_first_kernel)


def _summary(times: list[float]) -> Time:
    return Time(statistics.median(times), min(times), len(times))
