# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention: that it runs, and that it tells a wrong result from a right one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tvm_pagedkv.compiler import class_of

from .. import reference

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
PEERS = ["ours", "torch folded"] if importlib.util.find_spec("torch") else ["ours"]


@pytest.mark.slow
def test_each_case_has_a_record_of_each_peer_that_is_here(tmp_path):
    path = tmp_path / "records.json"
    arguments = ["--groups", "4", "--dtypes", "float32", "--cases", "8 x 1024", "7 x 256"]
    arguments += ["--budget", "0.02", "--begin-forward", "python", "--balance", "--json", str(path)]
    arguments += ["--peers", *PEERS[1:], "onnxruntime", "--python", "onnxruntime=no/such/python"]
    command = [sys.executable, str(SCRIPTS / "bench_cpu.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["absent"] == [] and list(result["missing"]) == ["onnxruntime"]
    assert "pip install onnxruntime" in done.stdout
    assert f"CPU class {result['cpu_class']}" in done.stdout
    assert result["cpu_class"].startswith(class_of().name)
    times = {(r["peer"], r["case"]): (r["min_s"], r["median_s"]) for r in result["records"]}
    cases = ("decode 8 x 1024", "decode 1 x 8192 + 7 x 256")
    expected = {(peer, case) for peer in PEERS for case in cases}
    expected |= {("ours", f"begin_forward B={batch}") for batch in (1, 8, 64, 256, 1024)}
    assert set(times) == expected
    assert all(0 < least <= median for least, median in times.values())
    assert all(r["error"] < 1e-4 for r in result["records"] if r["kind"] == "decode")
    ours = [r for r in result["records"] if r["kind"] == "decode" and r["peer"] == "ours"]
    assert all(0 <= r["apart"] < 1 for r in ours)
    assert all(rate > 0 for rate in result["limits"].values())
    assert all(case in done.stdout for case in cases)
    assert all(r["read"] > 0 and len(r["rounds"]) >= 1 for r in result["records"] if "rounds" in r)


class ScriptedPeers:
    """Replies of peers on a machine whose read bandwidth is one of `reads` after the other."""

    def __init__(self, reads: list[float]):
        self.reads, self.runs = iter(reads), []

    def ask(self, do: str, **arguments) -> dict:
        if do == "read":
            return {"read": next(self.reads)}
        if do == "run":
            self.runs.append(0.01 - 0.001 * len(self.runs))
            return {"times_s": [1.0, self.runs[-1]]}
        limits = {"read": 60e9, "float32": 1e15, "bfloat16": 1e15}
        return {"first_s": 0.01, "calls": 1, "note": "", "error": 0.0, **limits}


SLOW, FAST = 30e9, 60e9


@pytest.mark.parametrize(
    ("reads", "told", "unsteady"),
    [
        ([SLOW] * 6, [0, 1, 2], 0),
        ([SLOW, SLOW, SLOW, FAST, FAST, FAST, FAST, FAST], [0, 2, 3], 1),
        ([SLOW, FAST] * 6, [0, 1, 2, 3, 4, 5], 6),
    ],
    ids=["steady", "one change", "never steady"],
)
def test_shares_are_of_what_was_read_beside_each_turn(reads, told, unsteady, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from lib import measure as bench_measure
    from lib.cases import Case, Heads
    from lib.shares import reads_text, share_of

    monkeypatch.setattr(bench_measure, "SETTLE_S", 0)
    monkeypatch.setattr(bench_measure, "SLOW_S", 100)
    peers = ScriptedPeers(reads)
    measurement = bench_measure.Measurement({"ours": peers}, 0.1, 5.0, lambda _: None)
    measurement.measure(Case("decode", 2, 1, 300), "float32", Heads(4, 2, 16))
    assert next(peers.reads, None) is None and len(peers.runs) == len(reads) // 2
    record = measurement.records[0]
    beside = [max(pair) for pair in zip(reads[::2], reads[1::2], strict=True)]
    share = np.median([record["bytes"] / peers.runs[i] / beside[i] for i in told])
    assert share_of(record, measurement.best_limits) == (pytest.approx(share), True)
    assert record["read"] == np.median([beside[i] for i in told])
    assert record["unsteady"] == unsteady and record["min_s"] == min(peers.runs)
    assert reads_text(record) == {0: "30.0", 1: "30-60", 6: "60.0"}[unsteady]
    multiplying = measurement.best_limits | {"float32": 1e3}
    assert share_of(record, multiplying) == (
        pytest.approx(record["flops"] / 1e3 / record["min_s"]),
        False,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_of_a_right_and_of_a_wrong_output(dtype, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from lib.cases import Case, Heads, Inputs

    inputs = Inputs(Case("prefill", 1, 5, 9, ((2, 1, 40),)), dtype, Heads(4, 2, 16))
    rows = []
    for q, k, v in inputs.parts():
        mask = reference.causal_mask(q.shape[1], k.shape[1])
        rows += [reference.attention(*x, mask, 0.25)[0] for x in zip(q, k, v, strict=True)]
    output = np.concatenate(rows)
    assert inputs.error(output) < 1e-6
    for i in (0, 4, 5, 6):
        wrong = output.copy()
        wrong[i] = output[i - 1]
        assert inputs.error(wrong) > 0.1, i


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
