# SPDX-License-Identifier: Apache-2.0
"""A model that was loaded and has run before a fork generates in the children, with new caches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = '''
import multiprocessing, os, signal, sys, threading
import tvm_ffi
from tvm_pagedkv_lm import DecoderModel

PROMPT = [(7 * i) % 250 for i in range(300)]
NUM_TOKENS = 8
model = None


def generate():
    """The most likely tokens, with a cache of its own."""
    cache = model.create_cache(1, 400, 400)
    cache.add_sequence(0)
    tokens = [int(model.prefill(cache, [0], [PROMPT])[0].argmax())]
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(model.decode(cache, [0], [tokens[-1]])[0].argmax()))
    return tokens


def check(expected):
    assert generate() == expected


def run_children(count, check_child, leave):
    """Fork, and wait for the children; one that hangs is ended by its alarm."""
    children = []
    for _ in range(count):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(20)
            status = 1
            try:
                check_child()
                status = 7
            finally:
                leave(status)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def main():
    global model
    model = DecoderModel.from_pretrained()
    expected = generate()
    assert tvm_ffi.get_global_func("runtime.NumThreads")() == 2

    # A server that loads its model before it forks its workers.
    run_children(3, lambda: check(expected), os._exit)
    check(expected)
    run_children(1, lambda: check(expected), sys.exit)

    # A grandchild; its parent has run kernels, too.
    def with_child():
        check(expected)
        run_children(1, lambda: check(expected), os._exit)
        check(expected)

    run_children(1, with_child, os._exit)

    # A thread that has run kernels, and is no more.
    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    run_children(1, lambda: check(expected), os._exit)

    # Forks while other threads are in kernels.
    stop = threading.Event()

    def go_on():
        other = model_of_thread
        cache = other.create_cache(1, 400, 400)
        while not stop.is_set():
            cache.clear()
            cache.add_sequence(0)
            other.prefill(cache, [0], [PROMPT])

    model_of_thread = DecoderModel.from_pretrained()
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(4):
            run_children(1, lambda: check(expected), os._exit)
    finally:
        stop.set()
        thread.join()

    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.apply_async(generate).get(60) == expected
    print("ok")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_children_generate(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env=os.environ | {"TVM_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
