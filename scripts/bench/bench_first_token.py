#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a prompt that is cached, beside computing it.

The longest prompt is computed once, in chunks that end where the shorter ones do: prompts of all
lengths are beginnings of one text, so one computation times all of them. Only then its tokens are
told to the cache, which copies the pages to host memory and to a folder; so computing does not pay
for the copies. After that, each length is looked up in rounds that alternate between

- pages: they are in the pool,
- host: the pool was cleared, and pages come back from host memory,
- disk: pool and host memory have forgotten the text, and pages come back from the folder, whose
  reads bypass the page cache of the system,
- restart: a new cache over the same folder, whose memory has never been written to.

The time to the first token is that of `add_sequence`, which looks up and loads, and of the step
that computes the rest: the last token, and tokens of a last page that is not full.
GB/s are bytes of K and V over the time of `add_sequence`. K and V of every lookup are compared with
the computed ones, bit for bit; "same" is whether the first token is the same, too.

    python scripts/tools/random_llama.py /tmp/llama-1b
    python scripts/bench/bench_first_token.py --model /tmp/llama-1b --dtype bfloat16
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TIERS = ("pool", "host", "disk", "restart")
WAIT_S = 600.0  # for the store
MIB = 1 << 20


@dataclass(frozen=True)
class Computed:
    """Times and results of computing a prompt of some length."""

    ttft_s: float
    first_token: int
    digest: bytes  # of K and V of its full pages


@dataclass(frozen=True)
class Lookup:
    """Times of a cached prompt: `add_s` to find and load it, `step_s` to compute the rest."""

    num_reused: int
    add_s: float
    step_s: float
    is_same_token: bool

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.add_s + self.step_s


class FirstToken:
    """Measures the prompts that one text begins with.

    Parameters
    ----------
    model : DecoderModel
    name : str
        The name of the weights in the folder.
    lengths : sequence of int
        Of the prompts, ascending.
    chunk : int
        Maximum number of rows of a step.
    folder : Path
        For the pages on disk.
    seed : int
        Of the text, whose tokens are random.

    Raises
    ------
    RuntimeError
        If a tier does not give back what was computed.
    """

    def __init__(self, model, name: str, lengths: Sequence[int], chunk: int, folder: Path, seed=0):
        self.model, self.name, self.chunk, self.folder = model, name, chunk, folder
        self.lengths, self.page_size = list(lengths), model.options.page_size
        rng = np.random.default_rng(seed)
        self.text = rng.integers(model.config.vocab_size, size=lengths[-1]).tolist()
        groups = model.create_cache(1, self.page_size, chunk).stats()["groups"]
        self.num_groups = len(groups)
        self.token_bytes = sum(g["num_layers"] * g["page_bytes"] for g in groups) / self.page_size
        self.cache = self._open()
        self.computed: dict[int, Computed] = {}
        self.save_s = 0.0  # to host memory and to the folder

    def _open(self):
        """Make a cache with room for the text in each tier."""
        from tvm_pagedkv import PrefixCacheConfig

        capacity = (-(-self.lengths[-1] // self.page_size) + 2) * self.page_size
        num_bytes = int(capacity * self.token_bytes)
        tiers = PrefixCacheConfig(
            host_bytes=num_bytes * 5 // 4 + 16 * MIB,
            disk_path=self.folder,
            disk_bytes=4 * num_bytes + 64 * MIB,
            model_id=self.name,
            lookup_timeout=WAIT_S,
        )
        return self.model.create_cache(1, capacity, self.chunk, prefix_cache=tiers)

    def compute(self) -> None:
        """Compute the text, and let all tiers have it."""
        self.cache.add_sequence(0)
        position, elapsed = 0, 0.0
        for length in self.lengths:
            while position < length:
                part = self.text[position : min(length, position + self.chunk)]
                start = time.perf_counter()
                logits = self.model.prefill(self.cache, [0], [part])
                elapsed += time.perf_counter() - start
                position += len(part)
            token = int(logits[0].argmax())
            self.computed[length] = Computed(elapsed, token, self._digest(self.cache, length))
        start = time.perf_counter()
        self.cache.record_tokens(0, self.text)
        if not self.cache.flush_prefixes(WAIT_S):
            raise RuntimeError("the folder did not take the pages in time")
        self.save_s = time.perf_counter() - start
        self.cache.remove_sequence(0)

    def look_up(self, length: int, tier: str) -> Lookup:
        """Add a prompt whose pages are in this tier, and compute its first token."""
        self._leave_in(tier)
        cache = self._open() if tier == "restart" else self.cache
        prompt, before = self.text[:length], _counts(cache)
        start = time.perf_counter()
        num_reused = cache.add_sequence(1, prompt)
        added = time.perf_counter()
        logits = self.model.prefill(cache, [1], [prompt[num_reused:]])
        end = time.perf_counter()
        self._check(cache, length, tier, num_reused, before)
        cache.remove_sequence(1)
        if cache is not self.cache:
            cache.close_prefixes(WAIT_S)
        is_same = int(logits[0].argmax()) == self.computed[length].first_token
        return Lookup(num_reused, added - start, end - added, is_same)

    def _leave_in(self, tier: str) -> None:
        """Let the text be in this tier, and in none above it."""
        if tier in ("pool", "host"):
            self.cache.add_sequence(1, self.text)
            self.cache.remove_sequence(1)
        if tier == "host":
            self.cache.clear()
        elif tier == "disk":
            self.cache.forget_prefixes()

    def _check(self, cache, length: int, tier: str, num_reused: int, before: tuple) -> None:
        """Raise a RuntimeError unless the tier gave all full pages, as they were computed."""
        full = (length - 1) // self.page_size * self.page_size
        if num_reused < full:
            raise RuntimeError(f"{tier}: {num_reused} of {full} tokens were found")
        in_pool, fetched = (now - then for now, then in zip(_counts(cache), before, strict=True))
        num_pages = full // self.page_size * self.num_groups
        is_right = {
            "pool": in_pool >= full and fetched == 0,
            "host": in_pool == 0 and fetched == 0,
        }
        if not is_right.get(tier, in_pool == 0 and fetched >= num_pages):
            raise RuntimeError(
                f"{tier}: {in_pool} of {num_reused} tokens came from the pool, {fetched} of "
                f"{num_pages} pages from disk"
            )
        if self._digest(cache, length, 1) != self.computed[length].digest:
            raise RuntimeError(f"{tier}: K and V are not those that were computed")

    def _digest(self, cache, length: int, seq_id: int = 0) -> bytes:
        """Digest K and V of the full pages of a prompt."""
        digest = hashlib.blake2b()
        full = (length - 1) // self.page_size * self.page_size
        for begin in range(0, full, self.chunk):
            for tensor in cache.debug_get_kv(seq_id, begin, min(full, begin + self.chunk)):
                digest.update(np.ascontiguousarray(tensor.numpy()).view(np.uint8))
        return digest.digest()

    def records(self, lookups: dict[tuple[int, str], list[Lookup]]) -> list[dict]:
        """Return the figures of each length: those of computing, then of each tier, by medians."""
        records = []
        for length in self.lengths:
            computed = self.computed[length].ttft_s
            base = {"prompt_tokens": length, "tier": "computed", "ttft_s": computed}
            records.append(base | {"tokens_s": length / computed})
            for tier in TIERS:
                own = sorted(lookups[length, tier], key=lambda each: each.ttft_s)
                median = own[(len(own) - 1) // 2]
                num_bytes = median.num_reused * self.token_bytes
                record = base | asdict(median) | {"tier": tier, "ttft_s": median.ttft_s}
                record["is_same_token"] = all(each.is_same_token for each in own)
                record["all_ttft_s"] = [each.ttft_s for each in lookups[length, tier]]
                record["reused_bytes"] = num_bytes
                record["gain"] = computed / median.ttft_s
                if tier != "pool":  # nothing is loaded to the pool from itself
                    record["gb_s"] = num_bytes / median.add_s / 1e9
                records.append(record)
        return records


def _counts(cache) -> tuple[int, int]:
    """Tokens that were found in the pool, and pages that came from disk."""
    tiers = cache.stats()["prefix_tiers"]
    return tiers["reused_pool_tokens"], tiers["num_fetched_pages"]


def print_records(records: Sequence[dict]) -> None:
    """Print a line for each record."""
    print(
        f"{'tokens':>7} {'tier':9} {'reused':>7} {'TTFT ms':>11} {'load ms':>9} {'step ms':>9} "
        f"{'GB/s':>6} {'tokens/s':>9} {'faster':>8}  same"
    )
    for r in records:
        line = f"{r['prompt_tokens']:7} {r['tier']:9} "
        if r["tier"] == "computed":
            print(f"{line}{'':7} {r['ttft_s'] * 1e3:11.1f} {'':26} {r['tokens_s']:9.1f}")
            continue
        speed = f"{r['gb_s']:6.2f}" if "gb_s" in r else " " * 6
        print(
            f"{line}{r['num_reused']:7} {r['ttft_s'] * 1e3:11.1f} {r['add_s'] * 1e3:9.1f} "
            f"{r['step_s'] * 1e3:9.1f} {speed} {'':9} {r['gain']:7.1f}x  "
            f"{'yes' if r['is_same_token'] else 'no'}"
        )


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory (default: the included model)")
    add("--dtype", help="of the model")
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens of the prompts")
    add("--chunk", type=int, default=512, help="rows of a step (default 512)")
    add("--rounds", type=int, default=5, help="alternating lookups of each; the median counts")
    add("--folder", type=Path, help="where to keep pages on disk (default: a temporary folder)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=os.cpu_count())
    add("--json", type=Path, help="write all records")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    if min(options.rounds, options.chunk) < 1:
        parser.error("--rounds and --chunk take positive numbers")
    return options


def main() -> None:
    options = options_of()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    from bench_cpu import device_name

    from tvm_pagedkv_lm import DecoderModel, fingerprint

    model = DecoderModel.from_pretrained(options.model, options.dtype, progress=print)
    shortest, context = model.options.page_size + 1, model.config.context_length
    if not shortest <= options.lengths[0] <= options.lengths[-1] <= context:
        raise SystemExit(f"--lengths must be from {shortest} to the model's context, {context}")
    name = options.model.name if options.model else "the included model"
    device = f"{device_name()}, {options.threads} threads; {name}, {model.options.dtype}"
    folder = Path(tempfile.mkdtemp(prefix="first-token-", dir=options.folder))
    try:
        weights = fingerprint(options.model)
        bench = FirstToken(
            model, weights, options.lengths, options.chunk, folder / "pages", options.seed
        )
        print(f"{device}; {bench.token_bytes / 1024:g} KiB of K and V for a token", flush=True)
        bench.compute()
        lookups: dict[tuple[int, str], list[Lookup]] = {}
        for _ in range(options.rounds):
            for length in options.lengths:
                for tier in TIERS:
                    lookups.setdefault((length, tier), []).append(bench.look_up(length, tier))
        records = bench.records(lookups)
        bench.cache.close_prefixes(WAIT_S)
    finally:
        shutil.rmtree(folder)
    print_records(records)
    saved = options.lengths[-1] * bench.token_bytes
    print(
        f"to write {saved / 1e9:.2f} GB to host memory and disk took {bench.save_s:.2f} s, "
        f"{saved / bench.save_s / 1e9:.2f} GB/s, {bench.save_s / records[-5]['ttft_s']:.1%} of "
        "computing it"
    )
    if options.json:
        result = {"device": device, "token_bytes": bench.token_bytes, "save_s": bench.save_s}
        options.json.write_text(json.dumps(result | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
