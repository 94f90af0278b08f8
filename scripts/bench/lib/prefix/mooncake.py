# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's format: times, lengths, and ids of blocks of 512 tokens.

Each line is a JSON object with `timestamp` (milliseconds), `input_length`, `output_length` and
`hash_ids`. An id stands for 512 tokens of the prompt and all before them; the last block may be
shorter. Equal ids are equal tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lib.prefix.workloads import Request, Source, Workload

BLOCK = 512

# Of FAST25-release/traces/conversation_trace.jsonl in github.com/kvcache-ai/Mooncake, counted over
# its 12031 requests in 3537 s. Lengths and times are close to log-normal.
SPAN_S = 3537.0
CONTINUES = 0.387  # of the requests continue an earlier one beyond the block that all share
GAP_S = (123.0, 0.95)  # median and deviation of the logarithm: from a request to its continuation
INPUT = (6909, 1.2)  # input_length, of all requests
OUTPUT = (350, 0.9)  # output_length
LONGEST = 120_000
ADDED = (60, 2.5)  # what a continuation adds to the text and answer before it


def read_trace(path: str | Path) -> list[dict]:
    """Read a trace.

    Raises
    ------
    ValueError
        If a line is not a request of this format; the message has its number.
    """
    records = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            length, ids = int(record["input_length"]), list(record["hash_ids"])
            record["timestamp"], record["output_length"]  # noqa: B018
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a request: {error!r}") from None
        if length < 1 or len(ids) < -(-length // BLOCK):
            raise ValueError(
                f"{path}, line {number} has {len(ids)} hash_ids for {length} tokens; "
                f"it needs one for each {BLOCK}"
            )
        records.append(record)
    if not records:
        raise ValueError(f"{path} has no requests")
    return records


def generate_trace(seed: int, num_requests: int) -> list[dict]:
    """Generate a trace with the statistics above.

    A request continues an earlier one with probability `CONTINUES`, so that sessions have a
    geometric number of turns. All prompts begin with the same block.
    """
    rng = np.random.default_rng(seed)

    def sample(median: float, deviation: float) -> float:
        return median * float(np.exp(rng.normal() * deviation))

    records: list[dict] = []
    next_id = 1
    while len(records) < num_requests:
        time, length, answer = float(rng.uniform(0, SPAN_S)), 0, 0
        ids: list[int] = [0]
        while len(records) < num_requests:
            kept = max(1, length // BLOCK)  # the last block changes unless it was full
            added = round(sample(*ADDED)) if length else max(round(sample(*INPUT)), 2 * BLOCK)
            length = min(length + answer + added, LONGEST)
            answer = max(1, round(sample(*OUTPUT)))
            num_new = max(0, -(-length // BLOCK) - kept)
            ids = ids[:kept] + list(range(next_id, next_id + num_new))
            next_id += num_new
            records.append(
                {
                    "timestamp": round(time * 1000),
                    "input_length": length,
                    "output_length": answer,
                    "hash_ids": ids,
                }
            )
            time += sample(*GAP_S)
            if time > SPAN_S or rng.random() > CONTINUES:
                break
    return sorted(records, key=lambda record: record["timestamp"])


def select(records: list[dict], seed: int, num_requests: int) -> list[dict]:
    """Select whole sessions at random, so that the share of reused blocks stays what it is.

    A session is all requests with the same first block of those that are not in most requests.
    """
    first = [record["hash_ids"][0] for record in records]
    common = {i for i in set(first) if first.count(i) > len(records) / 2}
    sessions: dict[int, list[dict]] = {}
    for record in records:
        own = [i for i in record["hash_ids"] if i not in common]
        sessions.setdefault(own[0] if own else -1, []).append(record)
    groups = list(sessions.values())
    selected: list[dict] = []
    for index in np.random.default_rng(seed).permutation(len(groups)):
        if len(selected) >= num_requests:
            break
        selected += groups[index][: num_requests - len(selected)]
    return sorted(selected, key=lambda record: record["timestamp"])


def trace_workload(source: Source, records: list[dict], name: str, longest: int) -> Workload:
    """Turn records into requests: lengths are scaled, and an id stands for a block of that size.

    Parameters
    ----------
    source : Source
        Its scale is that of the lengths.
    records : list of dict
    name : str
    longest : int
        Prompts are cut to this many tokens after scaling.
    """
    size = max(1, round(BLOCK * source.scale))
    blocks: dict[int, np.ndarray] = {}
    requests, start = [], records[0]["timestamp"]
    for session, record in enumerate(records):
        for each in record["hash_ids"]:
            if each not in blocks:
                blocks[each] = source.exactly(size)
        length = min(max(1, round(record["input_length"] * size / BLOCK)), longest)
        prompt = np.concatenate([blocks[each] for each in record["hash_ids"]])[:length]
        output = source.tokens(max(1, int(record["output_length"])))
        requests.append(Request((record["timestamp"] - start) / 1000, session, prompt, output))
    return Workload(name, requests, f"{len(requests)} requests, a block is {size} tokens")
