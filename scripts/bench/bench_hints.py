#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Reused tokens of agents' traces, with and without hints about what comes again.

All agents begin with one system prompt that lists many tools. An agent takes turns; after each it
waits for a tool, for 5 s to 10 min. While it waits for subagents, these share its first text, take
a turn or two and are never heard of again. Other users send prompts of their own all the time. The
trace is generated from a seed, and its requests run one after the other.

With hints, the system prompt is pinned, the text of an agent is retained while it waits (for twice
the usual pause), and the text of a subagent that has finished is demoted.

    python scripts/bench/bench_hints.py                # counts, with a cache of one small layer
    python scripts/bench/bench_hints.py --model        # the included model: times to first text

A pool of 100 % has room for all distinct pages of the trace. Shares are of the tokens of prompts;
"agents" counts requests of agents that come back from a pause, which users wait for. With
`--model`, the time to first text is the time from the lookup to the logits, mean and 95th
percentile; runs with and without hints alternate request by request on caches of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm_ffi

import tvm_pagedkv as pkv

PAGE_SIZE = 16
VOCAB_SIZE = 256  # at most that of the included model
PAUSE_S = (5.0, 60.0, 600.0)  # the shortest, usual and longest wait for a tool


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt at a time, and the answer that it gets."""

    time: float
    kind: str  # "agent", "subagent" or "user"
    owner: int
    prompt: np.ndarray
    answer: np.ndarray
    is_last: bool  # of its owner

    @property
    def text(self) -> np.ndarray:
        """The tokens that get rows: all but the last one of the answer."""
        return np.concatenate([self.prompt, self.answer[:-1]])


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and counts."""

    system: int = 768
    brief: int = 256
    turn: int = 96
    answer: int = 48
    user: int = 512
    agents: int = 8
    turns: int = 6
    users: int = 160

    def scaled(self, scale: float) -> Sizes:
        """Return sizes with other lengths."""
        names = ("system", "brief", "turn", "answer", "user")
        return Sizes(
            **{**vars(self), **{n: max(2, round(getattr(self, n) * scale)) for n in names}}
        )


@dataclass
class Trace:
    """Requests of agents, subagents and users, in the order of time."""

    system: np.ndarray
    requests: list[Request] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Distinct full pages of all texts."""
        pages = set()
        for request in self.requests:
            text = request.text.tobytes()
            for end in range(PAGE_SIZE, len(request.text) + 1, PAGE_SIZE):
                pages.add(hash(text[: end * request.text.itemsize]))
        return len(pages)


def generate(seed: int, sizes: Sizes, vocab_size: int) -> Trace:
    """Generate a trace."""
    rng = np.random.default_rng(seed)

    def tokens(mean: int) -> np.ndarray:
        size = max(2, round(mean * float(rng.uniform(0.5, 1.5))))
        return rng.integers(3, vocab_size, size).astype("int32")

    def pause() -> float:
        return float(np.clip(np.exp(rng.normal(np.log(PAUSE_S[1]), 1.0)), PAUSE_S[0], PAUSE_S[2]))

    trace = Trace(rng.integers(3, vocab_size, sizes.system).astype("int32"))
    next_owner = 0
    for _ in range(sizes.agents):
        owner, next_owner = next_owner, next_owner + 1
        now, brief = float(rng.uniform(0, 300)), np.concatenate([trace.system, tokens(sizes.brief)])
        text = brief
        for turn in range(sizes.turns):
            prompt, answer = np.concatenate([text, tokens(sizes.turn)]), tokens(sizes.answer)
            is_last = turn == sizes.turns - 1
            trace.requests.append(Request(now, "agent", owner, prompt, answer, is_last))
            text, end = np.concatenate([prompt, answer]), now + pause()
            for _ in range(int(rng.integers(0, 4))):  # subagents work while it waits
                sub, next_owner = next_owner, next_owner + 1
                start, part = float(rng.uniform(now, end)), brief
                for step in (0, 1):
                    part = np.concatenate([part, tokens(2 * sizes.turn)])
                    answer = tokens(sizes.answer)
                    is_end = step == 1
                    at = min(start + step, end)
                    trace.requests.append(Request(at, "subagent", sub, part, answer, is_end))
                    part = np.concatenate([part, answer])
            now = end
    span = max(request.time for request in trace.requests)
    for _ in range(sizes.users):
        owner, next_owner = next_owner, next_owner + 1
        at = float(rng.uniform(0, span))
        request = Request(at, "user", owner, tokens(sizes.user), tokens(sizes.answer), True)
        trace.requests.append(request)
    trace.requests.sort(key=lambda request: request.time)
    return trace


class Run:
    """A cache that serves the requests of a trace.

    Parameters
    ----------
    cache : KVCache
    compute : callable
        Cache and tokens -> None: a step of sequence 0, up to the logits of the last token.
    trace : Trace
    has_hints : bool
    """

    def __init__(self, cache: pkv.KVCache, compute: Callable, trace: Trace, has_hints: bool):
        self.cache, self.compute, self.has_hints = cache, compute, has_hints
        self.waiting: dict[int, int] = {}
        self.reused: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.seconds: list[float] = []
        self.clock = 0.0
        if has_hints:
            cache.pin(trace.system)

    def serve(self, request: Request) -> None:
        """Run a request, and give the hints that its sender knows of."""
        advance = tvm_ffi.get_global_func("pagedkv.prefix_advance_clock")
        advance(self.cache, max(request.time - self.clock, 0.0))
        self.clock = request.time
        start = time.perf_counter()
        reused = self.cache.add_sequence(0, request.prompt)
        self.compute(self.cache, request.prompt[reused:])
        seconds = time.perf_counter() - start
        if len(request.answer) > 1:
            self.compute(self.cache, request.answer[:-1])
        self.cache.record_tokens(0, request.text[reused:])
        self.cache.remove_sequence(0)
        is_back = request.owner in self.waiting
        kind = "agents" if request.kind == "agent" and is_back else request.kind
        self.reused[kind] = self.reused.get(kind, 0) + reused
        self.prompts[kind] = self.prompts.get(kind, 0) + len(request.prompt)
        if kind == "agents":
            self.seconds.append(seconds)
        self.hint(request)

    def hint(self, request: Request) -> None:
        """Retain the text of an agent that waits; give up that of a subagent that has finished."""
        hint = self.waiting.pop(request.owner, 0)
        if hint:
            self.cache.release(hint)
        if request.kind == "agent" and not request.is_last:
            self.waiting[request.owner] = 0
            if self.has_hints:
                ttl = 2 * PAUSE_S[1]
                self.waiting[request.owner] = self.cache.retain(request.text, ttl=ttl)
        elif request.kind != "user" and request.is_last and self.has_hints:
            self.cache.demote(request.text)

    def share(self, *kinds: str) -> float:
        """Return the share of the tokens of prompts that were reused."""
        kinds = kinds or tuple(self.prompts)
        total = sum(self.prompts.get(kind, 0) for kind in kinds)
        return sum(self.reused.get(kind, 0) for kind in kinds) / max(total, 1)


def small_caches(num_tokens: Sequence[int]) -> tuple[Callable, list[pkv.KVCache]]:
    """Return a function that computes a step, and a cache of one small layer for each size."""
    longest = 8192

    def compute(cache: pkv.KVCache, tokens: np.ndarray) -> None:
        with cache.forward([0], [len(tokens)]):
            cache.attention(0, np.zeros((len(tokens), 3, 16), "float32"))

    caches = [
        pkv.create(
            pkv.KVCacheConfig(
                num_layers=1, num_qo_heads=1, num_kv_heads=1, qk_head_dim=16, dtype="float32",
                page_size=PAGE_SIZE, max_num_sequences=1, max_total_tokens=each,
                prefill_chunk_size=min(longest, each),
            )
        )
        for each in num_tokens
    ]  # fmt: skip
    return compute, caches


def model_caches(num_tokens: Sequence[int]) -> tuple[Callable, list[pkv.KVCache]]:
    """Return the same for the included model."""
    from tvm_pagedkv_lm import DecoderModel

    model = DecoderModel.from_pretrained()

    def compute(cache: pkv.KVCache, tokens: np.ndarray) -> None:
        chunk = cache.description["prefill_chunk_size"]
        for begin in range(0, len(tokens), chunk):
            model.prefill(cache, [0], [tokens[begin : begin + chunk].tolist()])

    caches = [model.create_cache(max_num_sequences=1, max_total_tokens=each) for each in num_tokens]
    return compute, caches


def main() -> None:
    """Replay a trace for each size of the pool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pools", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--agents", type=int, default=Sizes.agents)
    parser.add_argument("--users", type=int, default=Sizes.users)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", action="store_true", help="compute with the included model")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    sizes = Sizes(agents=options.agents, users=options.users).scaled(options.scale)
    rows, trace = [], generate(options.seed, sizes, VOCAB_SIZE)
    longest = max(len(request.text) for request in trace.requests) + PAGE_SIZE
    print(
        f"{len(trace.requests)} requests, {sum(len(r.prompt) for r in trace.requests)} tokens of "
        f"prompts, {trace.num_pages} distinct pages"
    )
    for share in options.pools:
        tokens = max(round(trace.num_pages * share) * PAGE_SIZE, 2 * longest)
        make_caches = model_caches if options.model else small_caches
        compute, caches = make_caches([tokens] * 2)
        runs = [Run(caches[i], compute, trace, has_hints=bool(i)) for i in (0, 1)]
        for number, request in enumerate(trace.requests):
            for run in runs if number % 2 else runs[::-1]:
                run.serve(request)
        for run in runs:
            run.cache.check_integrity()
            row = {
                "pool": share,
                "tokens": tokens,
                "hints": run.has_hints,
                "reused": run.share(),
                "reused_agents": run.share("agents"),
            }
            if options.model and run.seconds:
                row["first_text_ms"] = 1e3 * float(np.mean(run.seconds))
                row["first_text_p95_ms"] = 1e3 * float(np.percentile(run.seconds, 95))
            rows.append(row)
            times = (
                f", first text of agents {row['first_text_ms']:6.1f} ms, "
                f"95 % within {row['first_text_p95_ms']:6.1f} ms"
                if "first_text_ms" in row
                else ""
            )
            print(
                f"pool {share:4.0%} ({tokens} tokens), {'hints' if run.has_hints else 'none ':5}: "
                f"{row['reused']:5.1%} reused, agents {row['reused_agents']:5.1%}{times}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
