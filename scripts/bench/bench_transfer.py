# SPDX-License-Identifier: Apache-2.0
"""Throughput from one cache to another, beside a copy of as many bytes.

python scripts/bench/bench_transfer.py
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi

import tvm_pagedkv  # noqa: F401  (registers the global functions)
from tvm_pagedkv.transfer import (
    ChannelClosed,
    NixlChannel,
    Receiver,
    Sender,
    SharedMemoryChannel,
    local_channels,
)
from tvm_pagedkv.transfer.nixl import use_loopback

CHANNELS = {"shared_memory": SharedMemoryChannel, "nixl": NixlChannel}


def make_cache(options, is_sender: bool):
    """A Llama-shaped cache whose kernels do nothing: it is the transfer that is measured."""
    layer = {
        "kind": "mha",
        "num_qo_heads": options.qo_heads,
        "num_kv_heads": options.kv_heads,
        "qk_head_dim": options.head_dim,
        "v_head_dim": options.head_dim,
        "rope_theta": 5e5,
        "rope_scale": 1.0,
        "kernel_set": 0,
    }
    config = {
        "max_num_sequences": 2,
        "max_total_tokens": 2 * options.tokens,
        "prefill_chunk_size": options.tokens,
        "page_size": options.page_size,
        "dtype": "float16",
        "rope_mode": 1,
        "enable_kv_transfer": is_sender,
        "layers": [layer] * options.layers,
    }
    nothing = tvm_ffi.convert(lambda *_: None)
    names = ("transpose_append", "split_rotary", "prefill", "decode", "copy_single_page", "merge")
    kernels = dict.fromkeys(names, nothing)
    cache = tvm_ffi.get_global_func("pagedkv.create")(config, kernels, tvm.cpu())
    if is_sender:  # every byte is written once, as a prefill would
        for index in range(options.layers):
            pages = tvm_ffi.get_global_func("pagedkv.pages_of")(cache, index)
            np.from_dlpack(pages)[...] = 1
    return cache


def append(cache, options, length: int) -> None:
    """Append rows to sequence 0, in every layer: others must not get what a layer left out."""
    heads = options.qo_heads + 2 * options.kv_heads
    qkv = np.zeros((length, heads, options.head_dim), np.float16)
    out = np.empty((length, options.qo_heads, options.head_dim), np.float16)
    with cache.forward([0], [length]):
        for layer in range(options.layers):
            cache.attention(layer, qkv, out=out)


def answer(options, sender: Sender, cache) -> None:
    """Have the rows of one request computed, and send them."""
    request = sender.next_request()
    cache.add_sequence(0)
    send = sender.send(request, 0)
    append(cache, options, request.length)
    sender.finish(send)
    cache.remove_sequence(0)
    return send


def sending_process(options, kind: str, address: str) -> None:
    if kind == "nixl":
        use_loopback()
    cache = make_cache(options, is_sender=True)
    sender = Sender(cache, CHANNELS[kind].connect(address))
    try:
        while True:
            sender.wait(answer(options, sender, cache))
    except ChannelClosed:
        pass


def measure(options, once) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    once()
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return seconds


def copy_of(num_bytes: int):
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


def within_a_process(options):
    one, other = local_channels()
    source, target = make_cache(options, True), make_cache(options, False)
    sender, receiver = Sender(source, one), Receiver(target, other)

    def once():
        target.add_sequence(0)
        ticket = receiver.request(0, options.tokens)
        send = answer(options, sender, source)
        while receiver.poll() | sender.poll():
            pass
        assert ticket.is_done and send.is_done
        target.remove_sequence(0)

    return measure(options, once)


def between_processes(options, kind: str):
    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory) / "channel")
        process = multiprocessing.get_context("spawn").Process(
            target=sending_process, args=(options, kind, address), daemon=True
        )
        process.start()
        if kind == "nixl":
            use_loopback()
        target = make_cache(options, is_sender=False)
        with Receiver(target, CHANNELS[kind].listen(address)) as receiver:
            receiver.connect()

            def once():
                target.add_sequence(0)
                receiver.wait(receiver.request(0, options.tokens))
                target.remove_sequence(0)

            seconds = measure(options, once)
        process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--qo-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    num_bytes = options.layers * options.tokens * 2 * options.kv_heads * options.head_dim * 2
    print(
        f"{options.tokens} tokens, {options.layers} layers, {options.kv_heads} KV heads of "
        f"{options.head_dim}, float16, pages of {options.page_size}: {num_bytes / 2**20:.0f} MiB; "
        f"median of {options.repeat} (fastest)"
    )
    results = {"memcpy, one thread": measure(options, copy_of(num_bytes))}
    results["within a process"] = within_a_process(options)
    results["shared memory"] = between_processes(options, "shared_memory")
    if importlib.util.find_spec("nixl_cu12"):
        results["NIXL (UCX, loopback)"] = between_processes(options, "nixl")
    else:
        print("NIXL is not installed: pip install 'tvm-pagedkv[nixl]'")
    limit = statistics.median(results["memcpy, one thread"])
    print(f"{'':24}{'ms':>18}{'GB/s':>8}{'of memcpy':>11}")
    for name, seconds in results.items():
        middle = statistics.median(seconds)
        times = f"{middle * 1e3:.1f} ({min(seconds) * 1e3:.1f})"
        print(f"{name:24}{times:>18}{num_bytes / middle / 1e9:8.2f}{limit / middle:11.2f}")


if __name__ == "__main__":
    main()
