# SPDX-License-Identifier: Apache-2.0
"""A forked child cannot use its parent's caches, and takes nothing from the parent when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import gc, os, sys
import tvm_pagedkv as pkv
from tests.cache.prefixes.test_prefix_stores import TieredTexts
from tests.support.emulators.dict_store import DictStore, HangingStore
from tvm_pagedkv.transfer import SharedMemoryChannel

hanging = HangingStore()
busy = TieredTexts(tiers={"store": hanging, "model_id": "m"}, enable_kv_transfer=True)
idle = TieredTexts(tiers={"store": DictStore(), "model_id": "m"})
prompt = list(range(30))
for texts in (busy, idle):
    texts.run(0, prompt)
assert idle.cache.flush_prefixes(60) and hanging.entered.wait(60)  # a thread is in the store

listener = SharedMemoryChannel.listener(sys.argv[1])
here = SharedMemoryChannel.connect(sys.argv[1])
there = listener.accept()


def has_shared_pages():
    with open("/proc/self/maps") as maps:
        return "memfd:tvm_pagedkv" in maps.read()


assert has_shared_pages()
sys.stdout.flush()
child = os.fork()
if child == 0:
    assert not has_shared_pages()
    for texts in (busy, idle):
        cache = texts.cache
        for call in (
            lambda: cache.add_sequence(1),
            lambda: cache.add_sequence(1, prompt),
            lambda: cache.pop_n(0, 1),
            lambda: cache.stats(),
            lambda: cache.close_prefixes(60),
            lambda: cache.check_integrity(),
        ):
            try:
                call()
                print("no error")
            except RuntimeError as error:
                assert "made before a fork of its process" in str(error), error
    with listener, here, there:
        pass
    try:
        here.send({"a": 1})
        print("sent")
    except pkv.transfer.ChannelClosed:
        print("refused")
    del cache, texts, busy, idle, call
    gc.collect()
    sys.exit(7)  # runs what is registered for the exit
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for texts in (busy, idle):
    texts.check_kv(0)
    texts.cache.check_integrity()
here.send({"a": 2})
print(there.receive(60), os.path.exists(sys.argv[1]))
hanging.release.set()
print(busy.cache.close_prefixes(60), len(hanging.values), idle.cache.close_prefixes(60))
"""


def test_a_forked_child(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    expected = ["refused", "child 7", "{'a': 2} True", "True 7 True"]
    assert done.stdout.splitlines() == expected, done.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
