# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the prefix cache: its workloads, its simulation, and that both agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from tvm_pagedkv_lm import DecoderModel

from ..support.harness.selections import few_of

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def scripts_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def source(seed=0, scale=0.05):
    from lib.prefix.workloads import Source

    return Source(seed, 256, scale)


def num_common(a, b):
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


# --- workloads ------------------------------------------------------------------------------------


def test_a_seed_decides_a_workload():
    from lib.prefix.workloads import GENERATORS

    for name, generate in GENERATORS.items():
        one, same, other = (generate(source(seed), 24) for seed in (1, 1, 2))
        arrivals = [request.arrival for request in one.requests]
        assert arrivals == sorted(arrivals), name

        assert all(len(request.output) >= 1 for request in one.requests)
        for a, b in zip(one.requests, same.requests, strict=True):
            np.testing.assert_array_equal(a.text, b.text)
        assert any(
            not np.array_equal(a.prompt, b.prompt)
            for a, b in zip(one.requests, other.requests, strict=True)
        )


def test_a_turn_begins_with_the_conversation_before_it():
    from lib.prefix.workloads import chat

    requests = chat(source(), 24, num_turns=4).requests
    turns = [request for request in requests if request.previous is not None]
    assert len(requests) == 24 and len(turns) == 18
    for request in turns:
        before = requests[request.previous]
        assert before.session == request.session and before.arrival < request.arrival
        text = np.concatenate([before.prompt, before.output])
        np.testing.assert_array_equal(request.prompt[: len(text)], text)
        assert len(request.prompt) > len(text)


def test_groups_share_their_system_prompt_only():
    from lib.prefix.workloads import generated_shared_prefix

    requests = generated_shared_prefix(source(scale=0.25), 3, 4).requests
    assert sorted(request.session for request in requests) == [0] * 4 + [1] * 4 + [2] * 4
    assert {len(request.prompt) for request in requests} == {(2048 + 128) // 4}
    assert {len(request.output) for request in requests} == {256 // 4}
    for i, a in enumerate(requests):
        for b in requests[:i]:
            common = num_common(a.prompt, b.prompt)
            assert (common >= 512) if a.session == b.session else (common < 8)


def test_samples_of_a_prompt_arrive_at_once_and_differ():
    from lib.prefix.workloads import self_consistency

    requests = self_consistency(source(), 32).requests
    for begin in (0, 16):
        group = requests[begin : begin + 16]
        assert len({(request.arrival, request.prompt.tobytes()) for request in group}) == 1
        assert len({request.output.tobytes() for request in group}) == 16


def test_equal_blocks_of_a_trace_are_equal_tokens(tmp_path):
    from lib.prefix.mooncake import read_trace, trace_workload

    path = tmp_path / "trace.jsonl"
    lines = [(0, 1000, 7, [0, 1]), (500, 1300, 0, [0, 1, 2]), (2000, 600, 3, [0, 4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, x, strict=True))) for x in lines) + "\n\n")
    workload = trace_workload(source(scale=1 / 8), read_trace(path), "trace", longest=160)
    a, b, c = workload.requests
    assert [len(r.prompt) for r in (a, b, c)] == [125, 160, 75]
    assert [r.arrival for r in (a, b, c)] == [0, 0.5, 2] and len(b.output) == 1
    assert num_common(a.prompt, b.prompt) == 125
    assert 64 <= num_common(a.prompt, c.prompt) < 75


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"input_length": 3}', '{"timestamp": 0, "input_length": 513, '
             '"output_length": 1, "hash_ids": [1]}'],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    from lib.prefix.mooncake import read_trace

    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_a_generated_trace_has_the_statistics_it_names():
    from lib.prefix.mooncake import BLOCK, INPUT, OUTPUT, SPAN_S, generate_trace

    records = generate_trace(0, 4000)
    lengths = [record["input_length"] for record in records]
    assert 0.7 * INPUT[0] < np.median(lengths) < 1.4 * INPUT[0]
    assert 0.9 * OUTPUT[0] < np.median([r["output_length"] for r in records]) < 1.1 * OUTPUT[0]
    assert 0.8 * SPAN_S < records[-1]["timestamp"] / 1000 < 1.5 * SPAN_S
    seen, reused = set(), 0
    for record in records:
        ids = record["hash_ids"]
        assert len(ids) == len(set(ids)) == -(-record["input_length"] // BLOCK)
        known = next((i for i, each in enumerate(ids) if each not in seen), len(ids))
        reused += min(known * BLOCK, record["input_length"])
        seen.update(ids)
    assert 0.3 < reused / sum(lengths) < 0.5  # 0.37 in the trace that was published


def test_selected_sessions_are_whole():
    from lib.prefix.mooncake import generate_trace, select

    records = generate_trace(0, 400)
    chosen = select(records, 0, 100)
    assert 95 <= len(chosen) <= 100
    firsts = {record["hash_ids"][1] for record in chosen[:50]}
    kept = [record for record in records if record["hash_ids"][1] in firsts]
    # The last session may be cut off.
    assert sum(record not in chosen for record in kept) <= 5
    times = [record["timestamp"] for record in chosen]
    assert times == sorted(times)


# --- the simulation -------------------------------------------------------------------------------


def serve(oracle, key, prompt, answer=()):
    """Run a request alone, to its end."""
    text = [*prompt, *answer]
    reused = oracle.add(key, prompt, text)
    oracle.step({key: len(text)})
    oracle.finish(key)
    return reused


def pages_of(begin, count):
    return list(range(begin, begin + 4 * count))


def test_the_simulation_reuses_all_but_the_last_token():
    from lib.prefix.oracle import LruOracle

    oracle = LruOracle(16, 4)
    prompt = pages_of(0, 3)
    assert serve(oracle, 0, prompt, [90, 91]) == 0
    assert serve(oracle, 1, prompt) == 11
    assert serve(oracle, 2, [*prompt, 90, 91, 92]) == 14  # in the page that a text ends in
    assert serve(oracle, 3, [*prompt[:5], 77, 78, 79]) == 5
    assert serve(oracle, 4, [50, *prompt]) == 0


def test_the_simulation_evicts_the_end_of_the_text_used_longest_ago():
    from lib.prefix.oracle import LruOracle

    oracle = LruOracle(6, 4)
    a, b, c = pages_of(0, 3), pages_of(100, 3), pages_of(200, 2)
    assert serve(oracle, 0, a) == serve(oracle, 1, b) == 0  # the pool is full
    assert serve(oracle, 2, a) == 11  # its copy of the last page takes one of b
    assert oracle.add(3, [*b, 1], b) == 8
    oracle.finish(3, is_complete=False)
    assert serve(oracle, 4, c) == 0  # takes two of a
    assert serve(oracle, 5, [*b, 1]) == 8
    assert oracle.num_missing == 0


def test_the_simulation_holds_the_pages_of_running_requests():
    from lib.prefix.oracle import LruOracle

    oracle = LruOracle(5, 4)
    a, b = pages_of(0, 2), pages_of(100, 2)
    assert oracle.add(0, a, [*a, 1]) == 0
    oracle.step({0: 8})
    assert oracle.add(1, [*a, 9], a) == 0  # nothing has been published
    oracle.finish(1, is_complete=False)
    oracle.publish(0, 8)
    assert serve(oracle, 2, b) == 0
    assert serve(oracle, 3, b) == 7
    assert oracle.add(4, [*a, 9], [*a, 9]) == 8
    oracle.step({0: 9, 4: 9})
    assert (oracle.num_held, len(oracle.cached), oracle.num_missing) == (4, 1, 0)
    oracle.finish(0)
    oracle.finish(4)
    assert oracle.num_held == 0 and len(oracle.cached) == 5 and serve(oracle, 5, a) == 7


def test_the_simulation_keeps_what_was_computed_twice_once():
    from lib.prefix.oracle import LruOracle

    oracle = LruOracle(8, 4)
    a = pages_of(0, 3)
    for key in (0, 1):
        assert oracle.add(key, a, a) == 0
    oracle.step({0: 12, 1: 12})
    assert oracle.num_held == 6
    for key in (0, 1):
        oracle.publish(key, 12)
    assert oracle.num_held == 3


# --- replays --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return DecoderModel.from_pretrained()


def replay(model, workload, num_pages, tiers=None, **policy):
    from lib.prefix.replay import Policy, Replay

    cache = model.create_cache(16, num_pages * 16, 64, prefix_cache=tiers)
    settings = {"finds_prefix": True, "chunk": 64, "max_running": 8}
    settings["step_s"] = lambda rows, answers: rows * 1e-3 + answers * 1e-3
    run = Replay(model, cache, workload, Policy(**settings | policy))()
    cache.check_integrity()
    assert cache.sequence_ids() == []
    return run


def hits_of(run, workload, num_pages=None):
    from lib.prefix.oracle import oracle_hits

    num_pages = num_pages or run.num_pages
    prompts = [request.prompt for request in workload.requests]
    texts = [request.text for request in workload.requests]
    hits, missing = oracle_hits(run.events, prompts, texts, (num_pages, run.page_size))
    assert missing == 0
    return [hits[i] for i in range(len(prompts))]


@pytest.mark.parametrize("name", few_of(["chat", "shared-prefix", "system-prompt", "few-shot"], 2))
def test_the_cache_reuses_what_the_simulation_says(model, name):
    from lib.prefix.workloads import GENERATORS

    # Beginnings are whole pages. Where texts part within one, the cache finds the page that has
    # most tokens in common, though it may be gone while another one with fewer is there.
    workload = GENERATORS[name](source(scale=1 / 16), 32).lasting(1.0)
    longest = max(len(request.text) for request in workload.requests)
    run = replay(model, workload, longest // 16 + 16)
    assert sum(run.reused) > 0
    assert run.reused == hits_of(run, workload)
    off = replay(model, workload, longest // 16 + 16, finds_prefix=False)
    assert off.first_tokens == run.first_tokens and sum(off.reused) == 0
    assert min(off.ttft_s) > 0 and np.mean(off.ttft_s) > np.mean(run.ttft_s)


def test_random_texts_over_few_tokens_are_found_as_the_simulation_says(model):
    from lib.prefix.workloads import Request, Workload

    seed = int(np.random.default_rng().integers(2**32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    stems = [rng.integers(3, size=100, dtype="int32") for _ in range(4)]
    requests = []
    for i in range(60):
        stem = stems[rng.integers(4)][: rng.integers(1, 100)]
        prompt = np.concatenate([stem, rng.integers(3, size=rng.integers(1, 40), dtype="int32")])
        output = rng.integers(3, size=rng.integers(1, 24), dtype="int32")
        requests.append(Request(i * 0.02, i, prompt, output))
    workload = Workload("random", requests, "")
    run = replay(model, workload, 24)
    expected = hits_of(run, workload)
    prompt_tokens = workload.prompt_tokens
    # Pages that several texts end in may be reclaimed in another order.
    assert sum(run.reused) / prompt_tokens > 0.99 * sum(expected) / prompt_tokens - 0.01
    assert sum(run.reused) > 0


def test_requests_wait_for_a_beginning_that_is_being_computed(model):
    from lib.prefix.workloads import self_consistency

    workload = self_consistency(source(scale=0.06), 16).lasting(1.0)
    waits = replay(model, workload, 256)
    first = replay(model, workload, 256, admission="fcfs")
    prompt = len(workload.requests[0].prompt)
    assert sorted(waits.reused)[0] == 0 and sorted(waits.reused)[1] >= prompt // 16 * 16 - 1
    assert sum(first.reused) < sum(waits.reused)
    assert np.mean(waits.ttft_s) < np.mean(first.ttft_s)


def test_a_request_that_no_pool_could_hold_is_refused(model):
    from lib.prefix.workloads import random

    with pytest.raises(ValueError, match="a request needs 10 pages, the cache has 8"):
        replay(model, random(source(scale=0.06), 2).lasting(1.0), 8)


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    records, plot = tmp_path / "records.json", tmp_path / "plot.png"
    command = [sys.executable, str(SCRIPTS / "bench_prefix.py"), "--requests", "8"]
    command += ["--scale", "0.04", "--pools", "0", "1", "--steady", "--rounds", "2"]
    command += ["--workloads", "chat", "self-consistency", "mooncake"]
    command += ["--json", str(records), "--plot", str(plot), "--threads", "1"]
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(records.read_text())["records"]
    setups = ("off", "pool + 0%", "pool + 100%", "+ host", "+ disk")
    workloads = ("chat", "self-consistency", "mooncake shape")
    keys = [(record["workload"], record["setup"]) for record in result]
    assert keys == [(workload, setup) for workload in workloads for setup in setups]
    for record in result:
        assert record["num_requests"] == (16 if record["workload"] == workloads[1] else 8)
        assert 0 < record["ttft_median_s"] <= record["ttft_p90_s"] and record["tokens_s"] > 0
        assert ("hit_rate" in record) == (record["setup"] != "off")
        if "hit_rate" in record:
            assert record["same_first_tokens"] == 1
            assert record["hit_rate"] <= record["oracle_hit_rate"]
        if "tiers" in record:
            names = ["pool", "host", *(["disk"] if record["setup"] == "+ disk" else [])]
            assert list(record["tiers"]) == names
            num_reused = sum(tier["reused_tokens"] for tier in record["tiers"].values())
            assert num_reused / record["prompt_tokens"] == record["hit_rate"]
            assert record["tiers"]["pool"]["held_bytes"] > 0
        elif "hit_rate" in record:
            assert record["hit_rate"] == record["oracle_hit_rate"]
    assert plot.stat().st_size > 0 and "seed 0" in done.stdout
    assert done.stdout.count("    from pool ") == 6
    assert sorted(tmp_path.iterdir()) == [plot, records]


if __name__ == "__main__":
    tvm.testing.main()
