# SPDX-License-Identifier: Apache-2.0
"""The benchmark of hints: its traces come from a seed, and hints save what agents come back to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .test_bench_prefix import SCRIPTS


@pytest.fixture(autouse=True)
def scripts_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_a_trace_is_that_of_its_seed():
    from bench_hints import Sizes, generate

    sizes = Sizes(agents=2, users=5).scaled(1 / 16)
    one, same, other = (generate(seed, sizes, 100) for seed in (1, 1, 2))
    texts = [[request.text.tolist() for request in trace.requests] for trace in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    times = [request.time for request in one.requests]
    assert times == sorted(times)
    assert {request.kind for request in one.requests} == {"agent", "subagent", "user"}
    for request in one.requests:
        is_users = request.kind == "user"
        assert (request.prompt[: len(one.system)].tolist() == one.system.tolist()) != is_users
    assert one.num_pages > 0


def test_hints_save_what_agents_come_back_to(tmp_path):
    arguments = ["--agents", "2", "--users", "24", "--scale", "0.125", "--pools", "0.3", "2"]
    command = [sys.executable, str(SCRIPTS / "bench_hints.py"), *arguments]
    command += ["--json", str(tmp_path / "rows.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    plain, hints, roomy, roomy_hints = json.loads((tmp_path / "rows.json").read_text())
    assert not plain["hints"] and hints["hints"]
    assert hints["reused_agents"] > plain["reused_agents"]
    # Where there is room for all, hints change nothing.
    assert roomy["reused"] == roomy_hints["reused"] > hints["reused"]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
