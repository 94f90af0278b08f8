# SPDX-License-Identifier: Apache-2.0
"""The caches of workers hold the same sequences, whatever one of them alone cannot do."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tvm_pagedkv as pkv  # noqa: E402
from tvm_pagedkv.distributed import current_worker  # noqa: E402
from tvm_pagedkv_lm import ParallelModel  # noqa: E402
from tvm_pagedkv_lm.parallel.parallel_worker import ModelWorker  # noqa: E402

from ..support.cases.models.model_cases import (  # noqa: E402
    PAGE_SIZE,
    assert_close,
    random_tokens,
    write_checkpoint,
)

SHAPE = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 80,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model of transformers, and ours: a stage without windows, and one with a window."""
    folder = tmp_path_factory.mktemp("model")
    theirs = write_checkpoint(folder, "gemma3_text", SHAPE)
    options = {"stages": 2, "page_size": PAGE_SIZE, "threads": True}
    with ParallelModel.from_pretrained(folder, "float32", **options) as model:
        yield theirs, model


def counts(cache) -> list[list[int]]:
    """What the caches of all workers hold."""
    names = ("num_sequences", "total_tokens", "num_used_pages")
    return [[stats[name] for name in names] for stats in cache.stats_of_workers()]


def fill(model, cache, seq_id: int, tokens) -> None:
    cache.add_sequence(seq_id)
    for chunk in np.split(tokens, range(32, len(tokens), 32)):
        model.prefill(cache, [seq_id], [chunk])
    cache.record_tokens(seq_id, tokens)


@pytest.fixture
def old(pair):
    """A cache whose second stage has given up the pages that sequence 0 has left behind."""
    _, model = pair
    cache = model.create_cache(4, 400, 32)
    text, *others = random_tokens(0, 96, 96, 96)
    fill(model, cache, 0, text)
    for seq_id in (1, 2, 3):  # the pages that they leave behind are those of sequence 0
        for tokens in others:
            fill(model, cache, seq_id, tokens)
            cache.remove_sequence(seq_id)
    fill(model, cache, 1, others[0])
    return cache, text


@pytest.mark.parametrize(
    "call", [lambda cache: cache.pop_n(0, 70), lambda cache: cache.fork_sequence(0, 9, 26)]
)
def test_what_one_stage_cannot_do_no_stage_does(pair, old, call):
    theirs, model = pair
    cache, text = old
    before = counts(cache)
    with pytest.raises(ValueError, match="have been reclaimed"):
        call(cache)
    assert counts(cache) == before
    with torch.no_grad():
        expected = theirs(torch.tensor([[*text, 7]])).logits[0, -1].numpy()
    assert_close(model.decode(cache, [0], [7])[0], expected)


def fail_once(monkeypatch, method: str, rank: int) -> None:
    """Let the next call of a method of a worker's cache fail."""
    real = getattr(pkv.KVCache, method)

    def failing(cache, *args):
        if current_worker().rank != rank:
            return real(cache, *args)
        monkeypatch.undo()
        raise MemoryError("no memory for a moment")

    monkeypatch.setattr(pkv.KVCache, method, failing)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("method", "args"),
    [("add_sequence", (5,)), ("add_sequence", (5, [1, 2, 3, 4, 5])), ("fork_sequence", (0, 5))],
)
def test_a_call_that_fails_on_one_worker_changes_none(pair, monkeypatch, method, args, rank):
    _, model = pair
    cache = model.create_cache(4, 400, 32)
    cache.add_sequence(0)
    model.prefill(cache, [0], [[1, 2, 3, 4, 5]])
    before = counts(cache)
    fail_once(monkeypatch, method, rank)
    with pytest.raises(MemoryError, match="no memory for a moment"):
        getattr(cache, method)(*args)
    assert counts(cache) == before
    getattr(cache, method)(*args)
    assert [each[0] for each in counts(cache)] == [2, 2]


@pytest.mark.parametrize("method", ["pop_n", "remove_sequence", "end_forward"])
def test_caches_that_differ_are_not_used(pair, monkeypatch, method):
    """Where nothing brings back what a worker has done, which no check has foreseen."""
    _, model = pair
    cache = model.create_cache(4, 400, 32)
    cache.add_sequence(0)
    model.prefill(cache, [0], [[1, 2, 3, 4, 5]])
    fail_once(monkeypatch, method, 1)
    with pytest.raises(MemoryError):
        if method == "pop_n":
            cache.pop_n(0, 2)
        elif method == "remove_sequence":
            cache.remove_sequence(0)
        else:
            model.decode(cache, [0], [1])
    what = "a step" if method == "end_forward" else method
    for call in (lambda: model.decode(cache, [0], [1]), lambda: cache.add_sequence(1)):
        with pytest.raises(RuntimeError, match=f"may differ: {what} has failed on some"):
            call()
    cache.clear()
    cache.add_sequence(0)
    model.prefill(cache, [0], [[1, 2, 3]])


def test_workers_reuse_the_same_positions(pair, old):
    """One stage has all pages of a text, the other one no longer those of its beginning."""
    theirs, model = pair
    cache, text = old
    cache.remove_sequence(0)
    for tokens in ([*text[:25], 7], [*text, 7]):
        length = cache.add_sequence(4, tokens)
        assert [each[1] for each in counts(cache)] == [96 + length] * 2
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits[0, -1].numpy()
        for part in np.split(tokens[length:], range(32, len(tokens) - length, 32)):
            logits = model.prefill(cache, [4], [part])
        assert_close(logits[0], expected)
        cache.remove_sequence(4)


@pytest.mark.parametrize(
    ("method", "args"),
    [("pop_n", (0, 1.9)), ("add_sequence", ("5",)), ("fork_sequence", (0, 1, 2.5))],
)
def test_numbers_that_are_no_integers_are_refused(pair, method, args):
    _, model = pair
    cache = model.create_cache(4, 400, 32)
    cache.add_sequence(0)
    model.prefill(cache, [0], [[1, 2, 3]])
    before = counts(cache)
    with pytest.raises(TypeError, match="integer"):
        getattr(cache, method)(*args)
    assert counts(cache) == before


def test_a_cache_that_one_worker_cannot_make(pair, monkeypatch):
    _, model = pair
    create, held = ModelWorker.create_cache, []

    def failing(worker, *sizes):
        held.append((worker.worker.rank, len(worker.caches)))
        if len(held) <= 2 and worker.worker.rank == 1:
            next(worker.ids)
            raise MemoryError("no memory for a moment")
        return create(worker, *sizes)

    monkeypatch.setattr(ModelWorker, "create_cache", failing)
    with pytest.raises(MemoryError):
        model.create_cache(4, 400, 32)
    model.create_cache(4, 400, 32).add_sequence(0)
    assert sorted(held[:2]) == sorted(held[2:])  # the other worker has freed its own


def test_a_cache_that_is_dropped_while_a_worker_computes(pair, monkeypatch):
    """The collector runs in the thread of worker 0, which cannot wait for itself."""
    _, model = pair
    cache = model.create_cache(4, 400, 32)
    cache.add_sequence(0)
    cycle = [model.create_cache(4, 400, 32)]
    cycle.append(cycle)
    number = cycle[0].id
    del cycle
    compute, kept = ModelWorker._compute, []

    def collecting(worker, *args):
        gc.collect()
        kept.append(number in worker.caches)
        return compute(worker, *args)

    monkeypatch.setattr(ModelWorker, "_compute", collecting)
    for _ in range(2):
        model.prefill(cache, [0], [[1, 2, 3]])
    assert kept == [True, True, False, False]


def test_a_model_is_closed_between_two_calls_of_another_thread():
    model = ParallelModel.from_pretrained(num_shards=2, threads=True)
    cache, errors, has_begun = model.create_cache(2, 4096, 64), [], threading.Event()
    cache.add_sequence(0)

    def compute() -> None:
        try:
            while True:
                model.prefill(cache, [0], [[1] * 40])
                has_begun.set()
                cache.pop_n(0, 40)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compute)
    thread.start()
    has_begun.wait()
    model.close()
    thread.join(60)
    assert errors == ["the model is closed: its workers have ended"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
