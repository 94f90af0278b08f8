# SPDX-License-Identifier: Apache-2.0
"""Requests that share beginnings in the ways in which those of a server do, from a seed.

The tokens are random, and the answers as well: a request says which tokens its answer has, so that
runs with and without a cache compute the same rows, and the prompt of a later turn is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class Request:
    """One request.

    Parameters
    ----------
    arrival : float
        Time since the beginning of the workload.
    session : int
        Requests of a session belong to one conversation or one group.
    prompt, output : int32 ``[n]``
        Token ids; `output` is what the model is taken to answer, at least one token.
    previous : int, optional
        Index of the request whose answer the prompt contains: this one arrives after it has
        finished.
    """

    arrival: float
    session: int
    prompt: np.ndarray
    output: np.ndarray
    previous: int | None = None

    @property
    def text(self) -> np.ndarray:
        """The tokens that get rows in the cache: all but the last one of the answer."""
        return np.concatenate([self.prompt, self.output[:-1]])


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrivals.

    Parameters
    ----------
    name : str
    requests : sequence of Request
    about : str
        What the requests are, with their lengths.
    """

    name: str
    requests: Sequence[Request]
    about: str

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(request.output) for request in self.requests)

    def lasting(self, seconds: float) -> Workload:
        """Return the workload with its arrivals stretched over this time."""
        factor = seconds / max(max(request.arrival for request in self.requests), 1e-9)
        requests = [replace(r, arrival=r.arrival * factor) for r in self.requests]
        return replace(self, requests=requests)


class Source:
    """Random tokens and arrivals.

    Parameters
    ----------
    seed : int
    vocab_size : int
    scale : float
        Lengths are multiplied with it.
    """

    def __init__(self, seed: int, vocab_size: int, scale: float):
        self.rng = np.random.default_rng(seed)
        self.vocab_size, self.scale = vocab_size, scale

    def length(self, length: float) -> int:
        """Return a length, scaled."""
        return max(1, round(length * self.scale))

    def tokens(self, length: float) -> np.ndarray:
        """Return random tokens; the length is scaled."""
        return self.exactly(self.length(length))

    def exactly(self, length: int) -> np.ndarray:
        """Return this many random tokens."""
        return self.rng.integers(self.vocab_size, size=length, dtype="int32")

    def arrivals(self, count: int) -> np.ndarray:
        """Return the arrivals of a Poisson process of rate 1."""
        return np.cumsum(self.rng.exponential(size=count))


def in_order(requests: Sequence[Request]) -> list[Request]:
    """Sort requests by arrival, each after its previous one, and correct `previous`."""
    places: dict[int, int] = {}
    followers: dict[int | None, list[int]] = {}
    for index, request in enumerate(requests):
        followers.setdefault(request.previous, []).append(index)
    ready = [(requests[i].arrival, i) for i in followers.get(None, [])]
    heapq.heapify(ready)
    ordered: list[Request] = []
    while ready:
        _, index = heapq.heappop(ready)
        request, previous = requests[index], requests[index].previous
        places[index] = len(ordered)
        ordered.append(replace(request, previous=None if previous is None else places[previous]))
        for follower in followers.get(index, []):
            heapq.heappush(ready, (requests[follower].arrival, follower))
    return ordered


def system_prompt(source: Source, count: int) -> Workload:
    """One system prompt and a question of its own for each request."""
    system = source.tokens(2048)
    requests = [
        Request(arrival, i, np.concatenate([system, source.tokens(128)]), source.tokens(128))
        for i, arrival in enumerate(source.arrivals(count))
    ]
    about = f"{count} requests; a system prompt of {len(system)}"
    return Workload("system prompt", requests, about)


def chat(source: Source, count: int, num_turns: int = 8) -> Workload:
    """Conversations of several turns; each prompt is the conversation so far."""
    system, requests = source.tokens(512), []
    num_sessions = -(-count // num_turns)
    for session, start in enumerate(source.arrivals(num_sessions)):
        text, arrival = system, float(start)
        for turn in range(min(num_turns, count - len(requests))):
            question, answer = source.tokens(128), source.tokens(256)
            prompt = np.concatenate([text, question])
            previous = len(requests) - 1 if turn else None
            requests.append(Request(arrival, session, prompt, answer, previous))
            text = np.concatenate([prompt, answer])
            arrival += float(source.rng.exponential()) * num_sessions / num_turns
    about = f"{num_sessions} conversations of {num_turns} turns; a system prompt of {len(system)}"
    return Workload("chat", in_order(requests), about)


def few_shot(source: Source, count: int, num_tasks: int = 4, num_sets: int = 4) -> Workload:
    """A tree of two levels: instructions of tasks, and sets of examples for each task."""
    tasks = [source.tokens(1024) for _ in range(num_tasks)]
    sets = [[source.tokens(768) for _ in range(num_sets)] for _ in tasks]
    requests = []
    for arrival in source.arrivals(count):
        task, examples = source.rng.integers(num_tasks), source.rng.integers(num_sets)
        prompt = np.concatenate([tasks[task], sets[task][examples], source.tokens(192)])
        group = int(task * num_sets + examples)
        requests.append(Request(arrival, group, prompt, source.tokens(64)))
    about = f"{num_tasks} tasks of {len(tasks[0])}, {num_sets} sets of {len(sets[0][0])} for each"
    return Workload("few-shot", requests, about)


def self_consistency(source: Source, count: int, num_samples: int = 16) -> Workload:
    """Every prompt comes several times at once, with an answer of its own each time."""
    num_prompts, requests = -(-count // num_samples), []
    for group, arrival in enumerate(source.arrivals(num_prompts)):
        prompt = source.tokens(2048)
        for _ in range(num_samples):
            requests.append(Request(arrival, group, prompt, source.tokens(128)))
    about = f"{num_prompts} prompts of {len(requests[0].prompt)}, {num_samples} times each"
    return Workload("self-consistency", requests, about)


def random(source: Source, count: int) -> Workload:
    """Prompts that share nothing."""
    requests = [
        Request(arrival, i, source.tokens(2048), source.tokens(128))
        for i, arrival in enumerate(source.arrivals(count))
    ]
    return Workload("random", requests, f"{count} prompts of {len(requests[0].prompt)}")


def generated_shared_prefix(
    source: Source,
    num_groups: int,
    num_prompts: int,
    *,
    system_length: int = 2048,
    question_length: int = 128,
    output_length: int = 256,
) -> Workload:
    """SGLang's data set of this name: groups with a system prompt each, in random order.

    The lengths are its defaults, and so are 64 groups of 16 prompts.
    """
    systems = [source.tokens(system_length) for _ in range(num_groups)]
    groups = source.rng.permutation(np.repeat(np.arange(num_groups), num_prompts))
    requests = []
    for group, arrival in zip(groups, source.arrivals(len(groups)), strict=True):
        prompt = np.concatenate([systems[group], source.tokens(question_length)])
        requests.append(Request(arrival, int(group), prompt, source.tokens(output_length)))
    about = f"{num_groups} groups of {num_prompts} prompts; system prompts of {len(systems[0])}"
    return Workload("shared prefix (SGLang)", requests, about)


GENERATORS: dict[str, Callable[[Source, int], Workload]] = {
    "system-prompt": system_prompt,
    "chat": chat,
    "few-shot": few_shot,
    "self-consistency": self_consistency,
    "shared-prefix": lambda source, count: generated_shared_prefix(
        source, max(1, round(64 * (count / 1024) ** 0.5)), max(1, round(16 * (count / 1024) ** 0.5))
    ),
    "random": random,
}
