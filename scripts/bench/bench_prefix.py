#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Savings of the prefix cache: workloads replayed on a real model, with and without it.

Requests arrive on a virtual clock that advances by the measured time of each step of a
continuous-batching loop. The time to first token counts from a request's arrival. The hit rate is
the share of the prompts' tokens that were not computed. The one beside it is that of an exact
simulation of a least-recently-used cache of as many pages, under the same schedule. tokens/s are
those of prompts and answers over the time of all steps. "same" is the share of requests whose first
token is that of the run without the cache.

With tiers below the smallest pool, host memory has room for a share of the workload's distinct
pages (`--host`), and what is below it for all of them. A second line has the share of the prompts'
tokens and the bytes of K and V that each tier gave, and the bytes that it holds at the end. The
simulation then has as many pages as all tiers together, in one list.

    python scripts/bench/bench_prefix.py --plot prefix.png
    python scripts/bench/bench_prefix.py --tiers host disk store --valkey valkey://127.0.0.1:6379
    python scripts/bench/bench_prefix.py --trace conversation_trace.jsonl   # in Mooncake's format
    python scripts/bench/bench_prefix.py --workloads random --rounds 15 --steady --pools 1  # misses

The model is the included one; `--model` takes another, such as one of random_llama.py. Lengths and
counts of published workloads are scaled (`--scale`, `--requests`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.prefix.mooncake import generate_trace, read_trace, select, trace_workload  # noqa: E402
from lib.prefix.oracle import oracle_hits  # noqa: E402
from lib.prefix.replay import Policy, Replay, Run  # noqa: E402
from lib.prefix.tiers import DISK, HOST, STORE, TierRun, Tiers, print_tiers, store_opener  # noqa: E402
from lib.prefix.workloads import GENERATORS, Source, Workload  # noqa: E402

MOONCAKE = "mooncake"
TRACE_SCALE = 0.25  # of a trace's lengths, times --scale: its prompts are long


@dataclass(frozen=True)
class Setup:
    """A cache to run a workload with.

    Parameters
    ----------
    label : str
    num_pages : int
    finds_prefix : bool
    tiers : Tiers, optional
        Tiers below the pages.
    num_text_pages : int
        Distinct pages of the workload.
    """

    label: str
    num_pages: int
    finds_prefix: bool = True
    tiers: Tiers | None = None
    num_text_pages: int = 0

    @property
    def num_oracle_pages(self) -> int:
        """Pages of all tiers together."""
        if self.tiers is None:
            return self.num_pages
        # What several requests are computing at a time has copies.
        below = 2 * self.num_text_pages if self.tiers.below else 0
        return self.num_pages + self.tiers.host_pages + below


def workloads_of(options: argparse.Namespace, vocab_size: int) -> list[Workload]:
    """The workloads of the command line; each depends on the seed and its name only."""
    made = []
    for name in options.workloads:
        source = Source(options.seed, vocab_size, options.scale)
        if name != MOONCAKE:
            made.append(GENERATORS[name](source, options.requests))
            continue
        source.scale *= TRACE_SCALE
        if options.trace:
            records, label = read_trace(options.trace), f"trace {options.trace.stem}"
        else:
            records, label = generate_trace(options.seed, 10 * options.requests), "mooncake shape"
        records = select(records, options.seed, options.requests)
        made.append(trace_workload(source, records, label, options.longest))
    return made


def distinct_pages(workload: Workload, page_size: int) -> int:
    """Return the pages of all texts of a workload, with equal beginnings counted once."""
    nodes: dict[tuple[int, bytes], int] = {}
    for request in workload.requests:
        node, text = 0, request.text
        for begin in range(0, len(text), page_size):
            key = node, text[begin : begin + page_size].tobytes()
            node = nodes.setdefault(key, len(nodes) + 1)
    return len(nodes)


def setups_of(workload: Workload, page_size: int, options: argparse.Namespace) -> list[Setup]:
    """Return the setups: no cache and room for a full batch, pools of several sizes, tiers.

    Share 0 is the pages of a quarter of a batch of requests of mean length, or of the longest one;
    to these comes a share of the workload's distinct pages.
    """
    lengths = [-(-len(request.text) // page_size) + 1 for request in workload.requests]
    batch = max(max(lengths), round(statistics.mean(lengths) * options.max_running / 4))
    distinct = distinct_pages(workload, page_size)
    extra = [round(share * distinct) for share in options.pools]
    setups = [Setup("off", 4 * batch + max(extra), finds_prefix=False)]
    for share, pages in zip(options.pools, extra, strict=True):
        setups.append(Setup(f"pool + {share:.0%}", batch + pages))
    host = max(1, round(options.host * distinct))
    for name in options.tiers:
        tiers = Tiers(host, "" if name == HOST else name)
        setups.append(Setup(f"+ {name}", batch + min(extra), True, tiers, distinct))
    return setups


class Pace:
    """Times of the model, measured once; they decide how fast requests may arrive."""

    def __init__(self, model, chunk: int):
        cache, rng = model.create_cache(8, 8 * (2 * chunk + 64), chunk), np.random.default_rng(0)
        part = rng.integers(model.config.vocab_size, size=chunk).tolist()
        times = []
        for _ in range(3):
            cache.add_sequence(0)
            for _ in range(2):
                times.append(_seconds(model.prefill, cache, [0], [part]))
            cache.remove_sequence(0)
        self.row_s = min(times[::2]) / chunk
        self.depth_s = max(0.0, min(times[1::2]) - min(times[::2])) / chunk**2  # row, position
        for i in range(8):
            cache.add_sequence(i)
            model.prefill(cache, [i], [part])
        ids = list(range(8))
        steps = [_seconds(model.decode, cache, ids, ids) for _ in range(10)]
        self.answer_s = min(steps) / 8

    def seconds(self, workload: Workload) -> float:
        """Estimate how long a workload takes without a cache."""
        lengths = [len(request.prompt) for request in workload.requests]
        prompts = sum(n * self.row_s + n * n / 2 * self.depth_s for n in lengths)
        return prompts + workload.output_tokens * self.answer_s


def _seconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def touch(cache, model, capacity: int, chunk: int) -> None:
    """Write to all pages: the first write to memory takes longer."""
    config = model.config
    num_heads = config.num_heads + 2 * config.num_kv_heads
    dtype = getattr(ml_dtypes, model.options.dtype, model.options.dtype)
    qkv = tvm.runtime.tensor(np.zeros((chunk, num_heads, config.head_dim), dtype))
    for i in range(capacity // (-(-chunk // model.options.page_size) * model.options.page_size)):
        cache.add_sequence(i)
        with cache.forward([i], [chunk]):
            for layer in range(config.num_layers):
                cache.attention(layer, qkv)
    cache.clear()


def measure(model, workload: Workload, setup: Setup, options: argparse.Namespace) -> Run:
    """Replay a workload once."""
    if setup.tiers is not None:
        with tempfile.TemporaryDirectory(prefix="bench-prefix-", dir=options.folder) as folder:
            return measure_tiers(model, workload, setup, options, Path(folder))
    return replay(model, workload, setup, options)[0]


def measure_tiers(model, workload: Workload, setup: Setup, options, folder: Path) -> Run:
    """Replay a workload with tiers; `Run.tiers` gets their figures."""
    groups = model.create_cache(1, model.options.page_size, options.chunk).stats()["groups"]
    page_bytes = sum(group["num_layers"] * group["page_bytes"] for group in groups)
    opener = store_opener(options.valkey, options.mooncake)
    tiers = TierRun(setup.tiers, page_bytes, setup.num_text_pages, folder, opener)
    run, cache = replay(model, workload, setup, options, tiers.config)
    run.tiers = tiers.close(cache, run.by_tier, page_bytes / model.options.page_size)
    return run


def replay(model, workload: Workload, setup: Setup, options, prefix_cache=None):
    """Replay a workload; returns the run and its cache."""
    capacity = setup.num_pages * model.options.page_size
    cache = model.create_cache(
        options.max_running, capacity, options.chunk, prefix_cache=prefix_cache
    )
    touch(cache, model, capacity, options.chunk)
    step_s = (lambda rows, answers: rows * 1e-4 + answers * 1e-4) if options.steady else None
    policy = Policy(
        setup.finds_prefix, options.chunk, options.max_running, options.admission, step_s
    )
    return Replay(model, cache, workload, policy)(), cache


def record_of(workload: Workload, setup: Setup, runs: Sequence[Run], off: dict | None) -> dict:
    """The figures of a setup: of the run of median time."""
    run = sorted(runs, key=lambda each: each.busy_s)[(len(runs) - 1) // 2]
    record = {
        "workload": workload.name,
        "about": workload.about,
        "setup": setup.label,
        "num_requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "num_pages": run.num_pages,
        "busy_s": run.busy_s,
        "all_busy_s": [each.busy_s for each in runs],
        "tokens_s": (workload.prompt_tokens + workload.output_tokens) / run.busy_s,
        "ttft_median_s": float(np.median(run.ttft_s)),
        "ttft_p90_s": float(np.percentile(run.ttft_s, 90)),
        "first_tokens": run.first_tokens,
    }
    if not setup.finds_prefix:
        return record
    prompts = [request.prompt for request in workload.requests]
    texts = [request.text for request in workload.requests]
    hits, missing = oracle_hits(run.events, prompts, texts, (setup.num_oracle_pages, run.page_size))
    record["hit_rate"] = sum(run.reused) / workload.prompt_tokens
    record["oracle_hit_rate"] = sum(hits.values()) / workload.prompt_tokens
    record["oracle_missing_pages"] = missing
    if setup.tiers is not None:
        record["tiers"] = run.tiers
        record["host_capacity_pages"] = setup.tiers.host_pages
    if off is not None:
        same = [a == b for a, b in zip(run.first_tokens, off["first_tokens"], strict=True)]
        record["same_first_tokens"] = sum(same) / len(same)
        for name in ("ttft_median_s", "ttft_p90_s"):
            record[f"{name[:-2]}_gain"] = off[name] / record[name]
        record["tokens_gain"] = record["tokens_s"] / off["tokens_s"]
    return record


def print_record(record: dict) -> None:
    """A line."""
    line = f"{record['setup']:12} {record['num_pages']:6}"
    if "hit_rate" in record:
        line += f" {record['hit_rate']:7.1%} {record['oracle_hit_rate']:7.1%}"
    else:
        line += " " * 16
    for name, unit in (("ttft_median", 1e3), ("ttft_p90", 1e3), ("tokens", 1)):
        gain = record.get(f"{name}_gain")
        line += f" {record[name + '_s'] * unit:9.1f} " + (f"{gain:5.2f}x" if gain else " " * 6)
    if "same_first_tokens" in record:
        line += f" {record['same_first_tokens']:6.1%}"
    print(line, flush=True)
    if "tiers" in record:
        print_tiers(record["tiers"], record["prompt_tokens"])


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*GENERATORS, MOONCAKE]
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory (default: the included model)")
    add("--dtype", help="of the model")
    add("--workloads", nargs="+", default=names, choices=names)
    add("--trace", type=Path, help="a file in Mooncake's format (default: one is generated)")
    add("--requests", type=int, default=96, help="of each workload (default 96)")
    add("--scale", type=float, default=0.25, help="of lengths (default 0.25)")
    add("--longest", type=int, default=8192, help="tokens of a trace's prompt (default 8192)")
    add("--load", type=float, default=0.7, help="share of the time that the cacheless run works")
    add("--pools", type=float, nargs="+", default=[0.0, 0.25, 1.0], help="shares of all pages")
    add("--tiers", nargs="*", default=[HOST, DISK], choices=[HOST, DISK, STORE])
    add("--host", type=float, default=0.25, help="share of all pages that host memory holds")
    add("--folder", type=Path, help="where the disk is (default: a temporary folder)")
    add("--valkey", help="URL of the server that is the store")
    add("--mooncake", help="address of the master that is the store")
    add("--chunk", type=int, default=256, help="rows of a step (default 256)")
    add("--max-running", type=int, default=16, help="requests at a time (default 16)")
    add("--admission", default="wait", choices=["wait", "fcfs"], help="see lib/prefix/replay.py")
    add("--steady", action="store_true", help="the clock counts rows: all schedules are the same")
    add("--rounds", type=int, default=1, help="alternating runs of each; the median counts")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=os.cpu_count())
    add("--json", type=Path, help="write all records")
    add("--plot", help="draw times to first token and hit rates")
    options = parser.parse_args(arguments)
    if not options.pools or min(options.pools) < 0 or options.requests < 1 or options.rounds < 1:
        parser.error("--pools, --requests and --rounds take positive numbers")
    if (STORE in options.tiers) != ((options.valkey or options.mooncake) is not None):
        parser.error("--tiers store and one of --valkey and --mooncake go together")
    return options


def main() -> None:
    options = options_of()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    from bench_cpu import device_name

    from tvm_pagedkv_lm import DecoderModel

    model = DecoderModel.from_pretrained(options.model, options.dtype, progress=print)
    pace, records = Pace(model, options.chunk), []
    name = options.model.name if options.model else "the included model"
    device = f"{device_name()}, {options.threads} threads; {name}, {model.options.dtype}"
    print(f"{device}; seed {options.seed}")
    for workload in workloads_of(options, model.config.vocab_size):
        seconds = pace.seconds(workload) / options.load
        workload = workload.lasting(seconds)
        print(
            f"\n{workload.name}: {workload.about}; {workload.prompt_tokens} tokens of prompts, "
            f"{workload.output_tokens} of answers, in {seconds:.1f} s\n"
            f"{'':12} {'pages':>6} {'hits':>7} {'oracle':>7} {'TTFT ms':>9} {'':6} {'p90 ms':>9} "
            f"{'':6} {'tokens/s':>9} {'':6} {'same':>6}"
        )
        setups = setups_of(workload, model.options.page_size, options)
        runs: list[list[Run]] = [[] for _ in setups]
        for _ in range(options.rounds):
            for setup, own in zip(setups, runs, strict=True):
                own.append(measure(model, workload, setup, options))
        off = None
        for setup, own in zip(setups, runs, strict=True):
            records.append(record_of(workload, setup, own, off))
            off = off or records[-1]
            print_record(records[-1])
    result = {"device": device, "seed": options.seed, "records": records}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        from lib.prefix.plot import draw

        draw(result, options.plot)


if __name__ == "__main__":
    main()
