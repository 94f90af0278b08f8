# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of quantized caches: that they run, and that their figures mean what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tir_kernels.codec import CODECS

from ..reference import quantized

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def run_script(name: str, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_prefill_has_room_for_its_rows(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", ["bench_quantized.py", "--prefills", "512", "511"])
    import bench_quantized

    with pytest.raises(SystemExit):
        bench_quantized.options_of()
    assert "a context includes the 512 rows" in capsys.readouterr().err


@pytest.mark.slow
def test_quantized_pages_are_measured_beside_those_of_16_bits(tmp_path):
    path = tmp_path / "records.json"
    arguments = ["--batches", "1", "--contexts", "1024", "--prefills", "512", "--budget", "0.02"]
    arguments += ["--append-rows", "3"]
    peers = ["ours int8", "ours int4", "openvino u8", "ggml q8_0"]
    python = ["--python", "openvino u8=no/such/python", "ggml q8_0=no/such/python"]
    text = run_script(
        "bench_quantized.py", *arguments, "--peers", *peers, *python, "--json", str(path)
    )
    result = json.loads(path.read_text())
    assert list(result["missing"]) == ["openvino u8", "ggml q8_0"] and result["absent"] == []
    assert "pip install openvino" in text and "pip install llama-cpp-python" in text
    records = {(r["peer"], r["case"]): r for r in result["records"]}
    cases = ("decode 1 x 1024", "prefill 512 on 0")
    assert set(records) == {(peer, case) for peer in ("ours", *peers[:2]) for case in cases}
    pages, rows = 1024 // 16, 2 * 8 * 16
    for peer, codec in (("ours int8", "int8"), ("ours int4", "int4")):
        # K and V of the pages, and Q and O of a row in float16.
        size = pages * CODECS[codec].page_bytes(rows, 128, 128) + 2 * 32 * 128 * 2
        assert records[peer, cases[0]]["bytes"] == size
    appends = {(r["kernel"], r["kv_dtype"]): r for r in result["appends"]}
    kernels = ("rope_append", "transpose_append")
    assert set(appends) == {(k, d) for k in kernels for d in ("float16", "int8", "int4")}
    assert appends["transpose_append", "int8"]["bytes"] == 3 * 2 * 8 * (2 * 128 + 128 + 4)
    assert appends["rope_append", "int4"]["bytes"] == 3 * 2 * (
        8 * (2 * 128 + 64 + 8) + 32 * 2 * 128
    )
    assert all(0 < r["share"] and len(r["shares"]) == 3 for r in result["appends"])
    errors = {peer: records[peer, cases[0]]["error"] for peer in ("ours", *peers[:2])}
    assert errors["ours"] < 1e-3 < errors["ours int8"] < 0.03 < errors["ours int4"] < 0.3


def test_a_divergence_is_that_of_the_definition(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from bench_quality import Comparison, log_softmax

    rng = np.random.default_rng(0)
    expected, actual = (log_softmax(rng.standard_normal((50, 7))) for _ in range(2))
    targets = rng.integers(7, size=50)
    comparison = Comparison("int8")
    change = comparison.add(expected, actual, targets)
    comparison.changes.append(change / 50)
    result = comparison.result(perplexity=3.0)
    rows = range(50)
    change = np.mean([expected[i, targets[i]] - actual[i, targets[i]] for i in rows])
    np.testing.assert_allclose(result["perplexity"], 3.0 * np.exp(change))
    p, q = np.exp(expected), np.exp(actual)
    np.testing.assert_allclose(result["mean_kl"], np.mean((p * np.log(p / q)).sum(-1)))
    assert result["same_token"] == np.mean(p.argmax(-1) == q.argmax(-1))


def test_drift_is_the_error_of_the_codec_and_does_not_grow(monkeypatch, capsys):
    codec = "int4"
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from lib.quality import drift as quality_drift

    monkeypatch.setattr(quality_drift, "CONTEXTS", (64, 512))
    float32, quantized_cache = quality_drift.drift_table([codec], seed=3)
    assert codec in capsys.readouterr().out
    assert all(cell["codec"] < 1e-5 for cell in float32["errors"])
    rows = np.random.default_rng(3).standard_normal((512, 128)).astype("float32")
    lost = np.linalg.norm(quantized.keep(CODECS[codec], rows) - rows) / np.linalg.norm(rows)
    for cell in quantized_cache["errors"]:
        assert cell["arithmetic"] < 1e-4
        assert lost / 10 < cell["codec"] < 10 * lost


def test_the_quality_of_the_included_model_is_measured(tmp_path):
    path = tmp_path / "quality.json"
    arguments = ["--texts", "2", "--length", "96", "--codecs", "float16", "int4"]
    text = run_script("bench_quality.py", *arguments, "--text", "topics", "--json", str(path))
    float16, int4 = json.loads(path.read_text())
    assert (float16["codec"], int4["codec"]) == ("float16", "int4")
    assert float16["tokens"] == int4["tokens"] == 2 * 95
    assert 0 <= float16["mean_kl"] < 1e-3 < int4["mean_kl"]
    assert float16["same_token"] > 0.95 and "seed 0" in text
