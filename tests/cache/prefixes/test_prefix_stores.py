# SPDX-License-Identifier: Apache-2.0
"""Stores below the host memory of a cache: what they give back, and how they may fail."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS

from ...support.cases.caches.quantized_cache_cases import LAYER, make_quantized
from ...support.emulators.dict_store import DictStore, HangingStore
from ...support.harness.selections import few_of
from .test_prefix_cache import Texts
from .test_prefix_tiers import MB, SMALL, TieredTexts

ROOT = Path(__file__).resolve().parents[3]


def test_a_store_serves_another_cache():
    values: dict[bytes, bytes] = {}
    prompt = list(range(30))
    one = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    one.once(prompt)
    assert one.cache.flush_prefixes(60)
    assert one.tiers["num_stored_pages"] == 7 == len(values)
    two = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    assert two.cache.match_prefix(prompt) == 0
    assert two.cache.add_sequence(0, prompt) == 0  # it does not wait
    two.cache.remove_sequence(0)
    assert two.start(1, prompt) == 0
    two.finish(1)
    two.cache.add_sequence(0, [*prompt, 1], lookup_timeout=60)
    assert two.cache.sequence_length(0) == 28
    two.cache.remove_sequence(0)
    assert two.run(1, [*prompt, 1]) == 28
    two.check_kv(1)
    assert two.tiers["num_fetched_pages"] == 7
    assert two.tiers["reused_store_tokens"] == 28
    assert one.cache.close_prefixes(60) and two.cache.close_prefixes(60)


OTHERS = [{"model_id": "n"}, {"page_size": 8}, {"windows": (0, 6)}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_models_and_layouts_never_meet(other):
    values: dict[bytes, bytes] = {}
    prompt = list(range(32))
    one = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    one.once(prompt)
    assert one.cache.close_prefixes(60) and values
    fields = {k: v for k, v in other.items() if k != "model_id"}
    name = other.get("model_id", "m")
    tiers = {"store": DictStore(values), "model_id": name, "lookup_timeout": 60.0}
    two = TieredTexts(tiers=tiers, **fields)
    assert two.run(0, prompt) == 0
    two.cache.close_prefixes(60)


def test_rows_of_another_revision_of_a_codec_are_never_found(monkeypatch):
    values: dict[bytes, bytes] = {}
    prompt = list(range(25))

    def reused() -> int:
        cache = make_quantized([LAYER], "int4", max_total_tokens=64)
        config = pkv.PrefixCacheConfig(store=DictStore(values), model_id="m")
        pkv.open_prefix_cache(cache, config)
        length = cache.add_sequence(0, prompt, lookup_timeout=60)
        rest = prompt[length:]
        with cache.forward([0], [len(rest)], tokens=rest):
            shape = (len(rest), LAYER["num_qo_heads"] + 2 * LAYER["num_kv_heads"], 32)
            cache.attention(0, np.ones(shape, "float32"))
        assert cache.close_prefixes(60)
        return length

    assert [reused(), reused()] == [0, 24]
    monkeypatch.setitem(CODECS, "int4", replace(CODECS["int4"], revision=2))
    assert [reused(), reused()] == [0, 24]


def test_the_default_timeout_is_that_of_the_configuration():
    values: dict[bytes, bytes] = {}
    prompt = list(range(30))
    one = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    one.once(prompt)
    one.cache.close_prefixes(60)
    two = TieredTexts(tiers={"store": DictStore(values), "model_id": "m", "lookup_timeout": 60.0})
    assert two.cache.add_sequence(0, prompt) == 28
    two.cache.close_prefixes(60)


def test_nothing_waits_for_a_store_that_hangs():
    store = HangingStore()
    texts = TieredTexts(tiers={"store": store, "model_id": "m"})
    texts.once(list(range(30)))
    assert store.entered.wait(60)
    texts.fill(50)
    texts.cache.prefetch(list(range(200, 230)))
    assert not texts.cache.flush_prefixes(0)
    assert texts.cache.add_sequence(0, list(range(200, 230)), lookup_timeout=0.01) == 0
    assert not texts.cache.close_prefixes(0)
    assert texts.once([1, 2, 3, 4, 5]) == 0  # the cache works on
    store.release.set()
    assert texts.cache.close_prefixes(60)
    assert store.closed.is_set() and store.values


INTERRUPTED = """
import os, signal, sys, threading, traceback
from tests.cache.prefixes.test_prefix_stores import TieredTexts
from tests.support.emulators.dict_store import HangingStore

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
store = HangingStore()
texts = TieredTexts(tiers={"store": store, "model_id": "m"})
cache, prompt = texts.cache, list(range(30))
main = threading.main_thread().ident
calls = {
    "add_sequence": lambda: cache.add_sequence(0, prompt, lookup_timeout=3600),
    "locate_prefix": lambda: cache.locate_prefix(prompt, timeout=3600),
    "flush_prefixes": lambda: cache.flush_prefixes(3600),
    "close_prefixes": lambda: cache.close_prefixes(3600),
}
if sys.argv[1] in ("flush_prefixes", "close_prefixes"):
    texts.once(prompt)

def interrupt():
    store.entered.wait()
    while sys.argv[1] not in {f.name for f in traceback.extract_stack(sys._current_frames()[main])}:
        pass
    while True:
        try:
            cache.add_sequence(5)  # another thread uses the cache
            break
        except RuntimeError as error:  # until the main thread waits
            assert "another thread is inside" in str(error)
    os.kill(os.getpid(), signal.SIGINT)

thread = threading.Thread(target=interrupt)
thread.start()
try:
    calls[sys.argv[1]]()
except KeyboardInterrupt:
    thread.join()
    print("interrupted", cache.sequence_ids())
assert not cache.close_prefixes(0)  # the store still hangs
store.release.set()
cache.check_integrity()
assert cache.close_prefixes(60) and store.closed.is_set()
"""


@pytest.mark.parametrize(
    "call", few_of(["add_sequence", "close_prefixes", "locate_prefix", "flush_prefixes"], 2)
)
def test_ctrl_c_ends_a_wait_for_a_store(call):
    command = [sys.executable, "-c", INTERRUPTED, call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted [5]\n"


def test_what_another_thread_did_during_a_wait_counts():
    store = HangingStore()
    texts = TieredTexts(tiers={"store": store, "model_id": "m"})
    errors = []

    def wait_for_the_store():
        try:
            texts.cache.add_sequence(0, list(range(30)), lookup_timeout=3600)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait_for_the_store)
    thread.start()
    assert store.entered.wait(60)
    is_added = False
    while not is_added:
        with contextlib.suppress(RuntimeError):  # until the other thread waits
            texts.cache.add_sequence(0)
            is_added = True
    store.release.set()
    thread.join()
    assert errors == ["sequence 0 is in the cache already"]
    texts.cache.check_integrity()
    texts.cache.close_prefixes(60)


def test_a_store_that_raises_is_a_miss(caplog):
    class Broken(DictStore):
        def exists(self, keys):
            raise ConnectionError("no such host")

        def put_from(self, keys, addresses, sizes):
            return []  # of the wrong length

    texts = TieredTexts(tiers={"store": Broken(), "model_id": "m"})
    with caplog.at_level(logging.WARNING, "tvm_pagedkv.stores"):
        # A lookup first: three failures open the circuit breaker, however writes are batched.
        assert texts.cache.add_sequence(0, list(range(100, 130)), lookup_timeout=60) == 0
        assert texts.once(list(range(30))) == 0
        assert texts.cache.flush_prefixes(60)
    assert "no such host" in caplog.text and "returned 0 results" in caplog.text
    assert texts.tiers["num_failed_stores"] == 7
    texts.cache.close_prefixes(60)


@pytest.mark.parametrize("damage", ["bit", "short", "swapped", "version"])
def test_damaged_values_are_misses(damage, caplog):
    values: dict[bytes, bytes] = {}
    prompt = list(range(30))
    one = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    one.once(prompt)
    one.cache.close_prefixes(60)
    for i, (key, value) in enumerate(list(values.items())):
        changed = bytearray(value)
        if damage == "bit":
            changed[len(value) - 1 - i] ^= 16
        elif damage == "short":
            changed = changed[:-1]
        elif damage == "version":
            changed[16] += 1
        else:
            changed = bytearray(list(values.values())[i - 1])
        values[key] = bytes(changed)
    two = TieredTexts(tiers={"store": DictStore(values), "model_id": "m"})
    caplog.set_level(logging.WARNING, "tvm_pagedkv.stores")
    two.cache.add_sequence(0, prompt, lookup_timeout=60)
    reused = two.cache.sequence_length(0)
    two.cache.remove_sequence(0)
    assert reused < 28
    assert two.tiers["num_failed_fetches"] > 0
    two.once(prompt)
    two.cache.close_prefixes(60)
    assert ("damaged" in caplog.text) == (damage != "short")


def test_a_worker_ends_with_its_cache():
    store = DictStore()
    texts = TieredTexts(tiers={"store": store, "model_id": "m"})
    texts.once(list(range(30)))
    del texts
    gc.collect()
    assert store.closed.wait(60)
    assert len(store.values) == 7  # what was pending was written
    assert len(store.registered) == 1 and store.registered[0][1] >= MB // 2


AT_EXIT = """
import sys
import tvm_pagedkv as pkv
from tests.cache.prefixes.test_prefix_stores import TieredTexts
from tests.support.emulators.dict_store import DictStore, HangingStore

class Telling(DictStore):
    def close(self):
        print("closed with", len(self.values), flush=True)

store = Telling() if sys.argv[1] == "works" else HangingStore()
texts = TieredTexts(tiers={"store": store, "model_id": "m"})
texts.once(list(range(30)))
print("end", flush=True)
"""


@pytest.mark.parametrize("store", ["works", pytest.param("hangs", marks=pytest.mark.slow)])
def test_the_interpreter_exits(store):
    """Pending pages are written at exit; a store that hangs costs some seconds."""
    command = [sys.executable, "-c", AT_EXIT, store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "end"
    assert ("closed with 7" in done.stdout) == (store == "works")
    assert ("has not taken all pages" in done.stderr) == (store == "hangs")


def test_wrong_arguments_of_workers():
    texts = TieredTexts()
    tier = tvm_ffi.get_global_func("pagedkv.prefix_tier")(texts.cache)
    call = tvm_ffi.get_global_func
    for name, arguments in {
        "next_job": (0.0,),
        "finish_job": (0, b""),
        "wait": (1, 0.0),
        "flush": (0.0,),
        "close": (),
        "memory": (),
    }.items():
        function = call(f"pagedkv.tier_{name}")
        for wrong in (None, texts.cache, 3, "tier"):
            with pytest.raises((TypeError, ValueError)):
                function(wrong, *arguments)
        with pytest.raises(TypeError):
            function(tier, *arguments, None)
    for number in (0, 1, -1, 2**63 - 1):
        with pytest.raises(ValueError, match="there is no job"):
            call("pagedkv.tier_finish_job")(tier, number, b"")
    for seconds in (float("nan"), -1.0, float("-inf")):
        assert call("pagedkv.tier_next_job")(tier, seconds)["kind"] == "none"
    assert call("pagedkv.tier_wait")(tier, 77, float("inf"))  # there is no such lookup
    assert call("pagedkv.tier_flush")(tier, float("inf"))
    call("pagedkv.tier_close")(tier)
    assert call("pagedkv.tier_next_job")(tier, float("inf"))["kind"] == "closed"
    texts.once(list(range(9)))


def test_jobs_take_one_result_for_each_key():
    texts = Texts(**SMALL)
    options = {
        "host_bytes": MB, "model_id": "m", "write_policy": "through", "min_hits": 1,
        "lookup_timeout": 0.0,
    }  # fmt: skip
    call = tvm_ffi.get_global_func
    tier = call("pagedkv.prefix_open")(texts.cache, {**options, "has_store": True})
    texts.run(0, list(range(9)))
    job = call("pagedkv.tier_next_job")(tier, 0.0)
    assert job["kind"] == "put" and len(job["keys"]) == 2
    address, size = call("pagedkv.tier_memory")(tier)
    for begin, count in zip(job["addresses"], job["sizes"], strict=True):
        assert address <= begin and begin + count <= address + size
    for results in (b"", b"\1", b"\1" * 3):
        with pytest.raises(ValueError, match="has 2 keys, got"):
            call("pagedkv.tier_finish_job")(tier, job["id"], results)
    assert texts.cache.stats()["prefix_tiers"]["num_pending_stores"] == 2
    call("pagedkv.tier_finish_job")(tier, job["id"], b"\1\0")
    with pytest.raises(ValueError, match="there is no job"):
        call("pagedkv.tier_finish_job")(tier, job["id"], b"\1\0")
    stats = texts.cache.stats()["prefix_tiers"]
    assert (stats["num_stored_pages"], stats["num_failed_stores"]) == (1, 1)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
