# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of tiers and of transfers: that they run, and notice what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
SMALL = ["--tokens", "64", "--layers", "2", "--kv-heads", "2", "--head-dim", "8"]


@pytest.fixture
def bench_tiers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_tiers

    return bench_tiers


def test_each_way_is_measured_beside_its_limit(bench_tiers, tmp_path, monkeypatch, capsys):
    path = tmp_path / "speeds.json"
    arguments = [*SMALL, "--tokens", "2048", "--layers", "8", "--rounds", "2", "--threads", "2"]
    arguments += ["--folder", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_tiers.py", *arguments])
    bench_tiers.main()
    speeds = json.loads(path.read_text())["gb_s"]
    limits = {limit for limits in bench_tiers.LIMITS.values() for limit in limits}
    assert set(speeds) == {*bench_tiers.LIMITS, *limits}
    assert all(len(figures) == 2 and min(figures) > 0 for figures in speeds.values())
    shown = capsys.readouterr().out
    for name in bench_tiers.LIMITS:
        share = bench_tiers.share_of(name, speeds)
        assert f"{share:.0%}" in next(line for line in shown.splitlines() if line.startswith(name))
    assert [child.name for child in tmp_path.iterdir()] == ["speeds.json"]


def test_other_rows_and_other_tiers_are_noticed(bench_tiers, tmp_path, monkeypatch):
    rows_of = bench_tiers.Texts.rows
    texts = bench_tiers.Texts(bench_tiers.options_of(SMALL), tmp_path / "pages")
    texts.leave()
    with pytest.raises(RuntimeError, match="0 of 64 tokens came from lower tiers"):
        texts.come_back()  # the pool has them
    texts.cache.forget_prefixes()
    assert texts.come_back() > 0
    texts.cache.forget_prefixes()
    texts.seed += 1
    with pytest.raises(RuntimeError, match="0 of 64 tokens came"):
        texts.come_back()
    texts.seed -= 1
    monkeypatch.setattr(texts, "rows", lambda: [np.zeros_like(rows) for rows in rows_of(texts)])
    with pytest.raises(RuntimeError, match="other rows came back"):
        texts.come_back()
    texts.cache.close_prefixes()


@pytest.mark.slow
def test_transfers_are_measured():
    command = [sys.executable, str(SCRIPTS / "bench_transfer.py"), *SMALL]
    command += ["--qo-heads", "2", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "within a process" in done.stdout and "shared memory" in done.stdout


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
