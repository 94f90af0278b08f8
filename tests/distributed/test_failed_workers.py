# SPDX-License-Identifier: Apache-2.0
"""A step that fails on one worker fails on all, changes no cache, and leaves the model usable."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

import tvm_pagedkv as pkv
from tvm_pagedkv.distributed import current_worker
from tvm_pagedkv_lm import ParallelModel
from tvm_pagedkv_lm.parallel.parallel_worker import ModelWorker

CAPACITIES = (2, 256, 64)


@pytest.fixture(scope="module")
def model():
    """Two stages of two shards: workers 0 and 1, then 2 and 3."""
    with ParallelModel.from_pretrained(num_shards=2, stages=[0, 1, 4], threads=True) as model:
        yield model


def fail_once(monkeypatch, when: str, rank: int, error: Exception) -> None:
    """Let a worker fail as it begins its next step, before its layers, or after them."""
    begin, compute = pkv.KVCache.begin_forward, ModelWorker._compute

    def fail(at: str) -> None:
        if at == when and current_worker().rank == rank:
            monkeypatch.undo()
            raise error

    def failing_begin(cache, *args):
        fail("begin")
        return begin(cache, *args)

    def failing_compute(worker, *args):
        fail("before")
        logits = compute(worker, *args)
        fail("after")
        return logits

    monkeypatch.setattr(pkv.KVCache, "begin_forward", failing_begin)
    monkeypatch.setattr(ModelWorker, "_compute", failing_compute)


def counts(cache) -> list[list[int]]:
    """What the caches of all workers hold."""
    names = ("num_sequences", "total_tokens", "num_used_pages")
    return [[stats[name] for name in names] for stats in cache.stats_of_workers()]


@pytest.mark.parametrize("when", ["begin", "before", "after"])
def test_the_next_step_is_as_if_nothing_had_failed(model, monkeypatch, when):
    cache, undisturbed = (model.create_cache(*CAPACITIES) for _ in range(2))
    for each in (cache, undisturbed):
        each.add_sequence(0)
        model.prefill(each, [0], [[1, 2, 3]])
    for rank in range(4):
        before = counts(cache)
        fail_once(monkeypatch, when, rank, MemoryError("no memory for a moment"))
        with pytest.raises(MemoryError, match="no memory for a moment"):
            model.prefill(cache, [0], [[4, 5]])
        assert counts(cache) == before
        actual, expected = (model.decode(each, [0], [6]) for each in (cache, undisturbed))
        np.testing.assert_array_equal(actual, expected)


def test_errors_of_any_type_come_before_those_of_lost_connections(model, monkeypatch):
    cache = model.create_cache(*CAPACITIES)
    cache.add_sequence(0)
    fail_once(monkeypatch, "before", 3, NotImplementedError("out of ink"))
    with pytest.raises(RuntimeError, match="out of ink"):
        model.prefill(cache, [0], [[1, 2, 3]])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
