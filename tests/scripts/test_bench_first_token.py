# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the time to first token: its figures, and that it notices a wrong tier."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tvm_pagedkv_lm import DecoderModel

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
TIERS = ("pool", "host", "disk", "restart")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Prompts of 40 and 100 tokens, computed and saved."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from bench_first_token import FirstToken

    model = DecoderModel.from_pretrained()
    bench = FirstToken(model, "m", [40, 100], 32, tmp_path / "pages")
    bench.compute()
    yield bench
    bench.cache.close_prefixes()


def test_each_tier_gives_back_all_full_pages(bench):
    for tier in (*TIERS, *reversed(TIERS)):
        for length in (100, 40):
            lookup = bench.look_up(length, tier)
            # The pool also finds tokens of a last page that is not full.
            assert length // 16 * 16 <= lookup.num_reused < length
            assert lookup.add_s > 0 and lookup.step_s > 0 and lookup.is_same_token
            assert lookup.ttft_s == lookup.add_s + lookup.step_s
    assert bench.computed[100].ttft_s > bench.computed[40].ttft_s > 0
    assert bench.token_bytes == 2 * 4 * 2 * 32 * 4  # K and V, layers, heads, dimension, float32


def test_pages_from_another_tier_are_noticed(bench, monkeypatch):
    bench.look_up(100, "host")  # the pool has them now
    monkeypatch.setattr(bench, "_leave_in", lambda tier: None)
    for tier in ("host", "disk"):
        with pytest.raises(RuntimeError, match=f"{tier}: 9[69] of 9[69] tokens came from the pool"):
            bench.look_up(100, tier)
        bench.cache.remove_sequence(1)
    bench.cache.clear()
    with pytest.raises(RuntimeError, match="pool: 0 of 96 tokens came from the pool"):
        bench.look_up(100, "pool")


def test_other_rows_are_noticed(bench):
    bench.look_up(40, "disk")
    bench.computed[40] = replace(bench.computed[40], digest=bench.computed[100].digest)
    with pytest.raises(RuntimeError, match="disk: K and V are not those that were computed"):
        bench.look_up(40, "disk")


def test_the_benchmark_runs(tmp_path):
    path = tmp_path / "records.json"
    command = [sys.executable, str(SCRIPTS / "bench_first_token.py"), "--lengths", "48", "200"]
    command += ["--rounds", "3", "--threads", "1", "--chunk", "64", "--json", str(path)]
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    keys = [(record["prompt_tokens"], record["tier"]) for record in result["records"]]
    assert keys == [(length, tier) for length in (48, 200) for tier in ("computed", *TIERS)]
    for record in result["records"]:
        length = record["prompt_tokens"]
        if record["tier"] == "computed":
            computed = record["ttft_s"]
            assert record["tokens_s"] == length / computed
            continue
        assert (
            record["ttft_s"] == sorted(record["all_ttft_s"])[1] and len(record["all_ttft_s"]) == 3
        )
        assert record["gain"] == computed / record["ttft_s"]
        assert record["reused_bytes"] == record["num_reused"] * result["token_bytes"]
        assert ("gb_s" in record) == (record["tier"] != "pool")
        if "gb_s" in record:
            assert record["gb_s"] == record["reused_bytes"] / record["add_s"] / 1e9
    assert "GB/s" in done.stdout and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "16"], "from 17 to the model's context, 512"),
        (["--lengths", "100", "513"], "from 17 to the model's context, 512"),
        (["--rounds", "0"], "take positive numbers"),
    ],
)
def test_mistakes(arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_first_token

    monkeypatch.setattr(sys, "argv", ["bench_first_token.py", *arguments])
    monkeypatch.setenv("TVM_NUM_THREADS", "1")  # it sets another number
    with pytest.raises(SystemExit) as raised:
        bench_first_token.main()
    assert raised.value.code not in (None, 0)
    assert message in f"{raised.value.code} {capsys.readouterr().err}"


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
