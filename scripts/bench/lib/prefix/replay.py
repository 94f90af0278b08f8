# SPDX-License-Identifier: Apache-2.0
"""A continuous-batching loop over a real model, with arrivals on a virtual clock.

Each step takes the next token of every running answer, and prompt tokens of the requests admitted
first, up to the size of a chunk. The clock advances by the measured time of each step, and jumps
over the time in which nothing runs. Answers are those of the workload, so all runs compute the same
texts.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lib.prefix.tiers import reused_tokens
from lib.prefix.workloads import Workload
from tvm_pagedkv.cache import KVCache
from tvm_pagedkv_lm import DecoderModel


@dataclass(frozen=True)
class Policy:
    """The scheduling of requests.

    Parameters
    ----------
    finds_prefix : bool
        Whether requests are added with their tokens, and tokens are recorded.
    chunk : int
        Maximum number of rows of a step.
    max_running : int
        Maximum number of requests that run at a time.
    admission : {"wait", "fcfs"}
        "wait": a request whose beginning is being computed for another one waits for it, and those
        behind it may overtake. "fcfs": requests begin as soon as there is room for them.
    step_s : callable, optional
        Number of prompt rows and of answers in a step -> seconds that the clock advances by. None:
        the measured time.
    """

    finds_prefix: bool
    chunk: int = 512
    max_running: int = 16
    admission: str = "wait"
    step_s: Callable[[int, int], float] | None = None


@dataclass
class Active:
    """A request that is running."""

    index: int
    prompt: np.ndarray
    output: list[int]
    text: np.ndarray
    length: int  # positions that have rows
    starts_in_page: bool  # the first step copies the page that its reused positions end in
    num_output: int = 0

    def num_missing_pages(self, page_size: int) -> int:
        """Pages that it will still take."""
        end, now = -(-len(self.text) // page_size), -(-self.length // page_size)
        return end - now + self.starts_in_page


@dataclass
class Run:
    """Measurements of a run. Lists have an element for each request.

    `by_tier` has the reused tokens by the tier that had them, in a cache with tiers, as
    `tiers.COUNTERS` names them. `busy_s` is the time of all steps; `events` is the schedule,
    as `oracle.oracle_hits` takes it.
    """

    num_pages: int
    page_size: int
    reused: list[int]
    ttft_s: list[float]
    first_tokens: list[int]
    by_tier: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, dict] = field(default_factory=dict)  # as `tiers.TierRun.close` says
    busy_s: float = 0.0
    num_steps: int = 0
    events: list[tuple] = field(default_factory=list)


class Replay:
    """One run of a workload.

    Parameters
    ----------
    model : DecoderModel
    cache : KVCache
        Of the model; it may know texts of an earlier run.
    workload : Workload
        With arrivals in seconds.
    policy : Policy

    Raises
    ------
    ValueError
        If the cache has too few pages for one of the requests.
    """

    def __init__(self, model: DecoderModel, cache: KVCache, workload: Workload, policy: Policy):
        self.model, self.cache, self.policy = model, cache, policy
        self.requests = workload.requests
        self.texts = [request.text for request in self.requests]
        stats, count = cache.stats(), len(self.requests)
        self.page_size = model.options.page_size
        longest = max(-(-len(text) // self.page_size) for text in self.texts)
        if longest + 1 > stats["num_pages"]:
            raise ValueError(
                f"a request needs {longest + 1} pages, the cache has {stats['num_pages']}"
            )
        self.run = Run(
            int(stats["num_pages"]), self.page_size, [0] * count, [0.0] * count, [0] * count
        )
        self.counted = reused_tokens(cache)
        self.now = 0.0
        self.arrived = [0.0] * count
        self.ended: dict[int, float] = {}
        self.begun: list[int] = []  # whose first token the last step computed
        self.done: list[int] = []  # whose last token it computed
        self.coming = deque(range(count))
        self.waiting: list[int] = []
        self.active: list[Active] = []
        self.retry = True  # whether pages may have become available since the last refusal
        self.common: dict[tuple[int, int], int] = {}

    def __call__(self) -> Run:
        """Run all requests to the end."""
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection within a step would count for it
        try:
            while self.coming or self.waiting or self.active:
                self._turn()
        finally:
            if was_enabled:
                gc.enable()
        return self.run

    # --- the clock --------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._arrive()
        if not self.waiting and not self.active:
            upcoming = [self.requests[i].arrival for i in self.coming if self._can_arrive(i)]
            self.now = max(self.now, min(upcoming))
            return
        start = time.perf_counter()
        self._admit()
        num_prompt_rows, num_answers = self._step()
        elapsed = time.perf_counter() - start
        if self.policy.step_s is not None:
            self.now += self.policy.step_s(num_prompt_rows, num_answers)
        else:
            self.now += elapsed
        self.run.busy_s += elapsed
        self.run.num_steps += 1
        for index in self.begun:
            self.run.ttft_s[index] = self.now - self.arrived[index]
        for index in self.done:
            self.ended[index] = self.now

    def _can_arrive(self, index: int) -> bool:
        previous = self.requests[index].previous
        return previous is None or previous in self.ended

    def _arrive(self) -> None:
        late = []
        while self.coming and self.requests[self.coming[0]].arrival <= self.now:
            index = self.coming.popleft()
            if self._can_arrive(index):
                self.waiting.append(index)
                # A turn whose time has come while the one before it was answered arrives now.
                previous = self.requests[index].previous
                at = self.requests[index].arrival
                self.arrived[index] = at if previous is None else max(at, self.ended[previous])
            else:
                late.append(index)
        self.coming.extendleft(reversed(late))

    # --- admission --------------------------------------------------------------------------------

    def _admit(self) -> None:
        left = []
        for place, index in enumerate(self.waiting):
            if len(self.active) >= self.policy.max_running or not self.retry:
                left += self.waiting[place:]
                break
            if self._gains_by_waiting(index):
                left.append(index)
            elif not self._add(index):
                self.retry = False
                left.append(index)
        self.waiting = left

    def _gains_by_waiting(self, index: int) -> bool:
        """Whether others compute more of the prompt's beginning than the cache has."""
        if not self.policy.finds_prefix or self.policy.admission != "wait":
            return False
        size = self.page_size
        coming = [a for a in self.active if a.length < len(a.prompt)]
        shared = max((self._common_pages(index, a.index) for a in coming), default=0) * size
        if shared == 0:
            return False
        return shared >= self.cache.match_prefix(self.requests[index].prompt) + size

    def _common_pages(self, a: int, b: int) -> int:
        """Return the full pages that begin both prompts, without the first one's last token."""
        if (a, b) not in self.common:
            first, second = self.requests[a].prompt[:-1], self.requests[b].prompt
            size = min(len(first), len(second))
            differ = np.flatnonzero(first[:size] != second[:size])
            common = int(differ[0]) if len(differ) else size
            self.common[a, b] = common // self.page_size
        return self.common[a, b]

    def _add(self, index: int) -> bool:
        """Admit a request if there are pages for all of it; return whether there are."""
        request, text = self.requests[index], self.texts[index]
        size, cache = self.page_size, self.cache
        reserved = sum(a.num_missing_pages(size) for a in self.active)
        prompt = request.prompt if self.policy.finds_prefix else None
        reused = cache.add_sequence(index, prompt)
        active = Active(
            index, request.prompt, request.output.tolist(), text, reused, reused % size > 0
        )
        by_tier = self._count_tiers()
        self.run.events.append(("add", index))
        if cache.num_available_pages() < reserved + active.num_missing_pages(size):
            cache.remove_sequence(index)
            self.run.events.append(("refuse", index))
            return False
        self.run.reused[index] = reused
        for tier, count in by_tier.items():
            self.run.by_tier[tier] = self.run.by_tier.get(tier, 0) + count
        self.active.append(active)
        return True

    def _count_tiers(self) -> dict[str, int]:
        """Return what the last request has reused of each tier."""
        before, self.counted = self.counted, self.counted and reused_tokens(self.cache)
        if before is None or self.counted is None:
            return {}
        return {tier: count - before[tier] for tier, count in self.counted.items()}

    # --- steps ------------------------------------------------------------------------------------

    def _step(self) -> tuple[int, int]:
        answering = [a for a in self.active if a.length >= len(a.prompt)]
        room, rows = self.policy.chunk - len(answering), []
        for a in self.active:
            if a.length < len(a.prompt) and room > 0:
                rows.append((a, a.prompt[a.length : a.length + room]))
                room -= len(rows[-1][1])
        ids = [a.index for a in answering] + [a.index for a, _ in rows]
        tokens = [a.output[a.num_output - 1] for a in answering]
        if rows:
            parts: list[Sequence[int]] = [[token] for token in tokens]
            logits = self.model.prefill(self.cache, ids, parts + [part for _, part in rows])
        else:
            logits = self.model.decode(self.cache, ids, tokens)
        for a in answering:
            a.length += 1
            a.num_output += 1
        for a, part in rows:
            a.length += len(part)
            a.starts_in_page = False
        stepped = answering + [a for a, _ in rows]
        self.run.events.append(("step", {a.index: a.length for a in stepped}))
        self._publish(rows)
        self.begun, self.done = [], []
        for (a, _), row in zip(rows, logits[len(answering) :], strict=True):
            if a.length == len(a.prompt):
                self.begun.append(a.index)
                self.run.first_tokens[a.index] = int(row.argmax())
                a.num_output = 1
        for a in self.active:
            if a.num_output == len(a.output):
                self._finish(a)
        self.active = [a for a in self.active if a.num_output < len(a.output)]
        return sum(len(part) for _, part in rows), len(answering)

    def _publish(self, rows: Sequence[tuple[Active, np.ndarray]]) -> None:
        if self.policy.finds_prefix and rows:
            for a, part in rows:
                self.cache.record_tokens(a.index, part)
            self.run.events.append(("publish", {a.index: a.length for a, _ in rows}))

    def _finish(self, a: Active) -> None:
        if self.policy.finds_prefix and a.length > len(a.prompt):
            self.cache.record_tokens(a.index, a.text[len(a.prompt) :])
        self.cache.remove_sequence(a.index)
        self.run.events.append(("finish", a.index))
        self.done.append(a.index)
        self.retry = True
