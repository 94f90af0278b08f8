# SPDX-License-Identifier: Apache-2.0
"""Replays of workloads over tiers: what each tier gave, beside the simulation."""

from __future__ import annotations

import sys

import pytest
import tvm

from tvm_pagedkv_lm import DecoderModel

from ..support.emulators.store_servers import valkey_server
from ..support.harness.selections import latin_square
from .test_bench_prefix import SCRIPTS, hits_of, replay, source


@pytest.fixture(autouse=True)
def scripts_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture(scope="module")
def model():
    return DecoderModel.from_pretrained()


@latin_square(2, "below", "name")
@pytest.mark.parametrize("below", ["", "disk"])
@pytest.mark.parametrize("name", ["few-shot", "shared-prefix"])
def test_tiers_have_all_that_the_pool_has_lost(model, name, below, tmp_path):
    from lib.prefix.tiers import TierRun, Tiers
    from lib.prefix.workloads import GENERATORS

    # Beginnings are whole pages, and the tiers below have full pages.
    workload = GENERATORS[name](source(scale=1 / 16), 32).lasting(1.0)
    longest = max(len(request.text) for request in workload.requests)
    num_pages = longest // 16 + 16
    page_bytes = 4 * 2 * 2 * 16 * 32 * 4  # layers, K and V, heads, slots, dimension, float32
    pool = replay(model, workload, num_pages)
    host_pages = 12 if below else 2000
    tiers = TierRun(Tiers(host_pages, below), page_bytes, 2000, tmp_path)
    run = replay(model, workload, num_pages, tiers.config)
    expected = hits_of(run, workload, 2000)
    for reused, most in zip(run.reused, expected, strict=True):
        # A page that host memory needs for another one before the disk has it is lost.
        assert (0 if below else most // 16 * 16) <= reused <= most
    assert sum(run.reused) > sum(pool.reused) and run.first_tokens == pool.first_tokens
    assert sum(run.by_tier.values()) == sum(run.reused) and run.by_tier["pool"] > 0
    assert run.by_tier["below" if below else "host"] > 0
    assert pool.by_tier == {} and (run.by_tier["below"] > 0) == bool(below)


def test_the_bytes_of_a_tier(model, tmp_path):
    from lib.prefix.tiers import TierRun, Tiers, reused_tokens
    from lib.prefix.workloads import random

    workload = random(source(scale=1 / 16), 4).lasting(1.0)
    tiers = TierRun(Tiers(100, "disk"), 32768, 100, tmp_path)
    cache = model.create_cache(1, 320, 64, prefix_cache=tiers.config)
    for seq_id, request in enumerate(workload.requests):
        assert cache.add_sequence(seq_id, request.prompt) == 0
        for begin in range(0, len(request.prompt), 64):
            model.prefill(cache, [seq_id], [request.prompt[begin : begin + 64].tolist()])
        cache.record_tokens(seq_id, request.prompt)
        cache.remove_sequence(seq_id)
    assert reused_tokens(cache) == {"pool": 0, "host": 0, "below": 0}
    figures = tiers.close(cache, {"pool": 3, "host": 5, "below": 7}, 2048.0)
    num_full = sum(len(request.prompt) // 16 for request in workload.requests)
    assert figures["pool"] == {
        "reused_tokens": 3, "reused_bytes": 3 * 2048, "held_bytes": 20 * 32768
    }  # fmt: skip
    for tier, count in (("host", 5), ("disk", 7)):
        assert figures[tier]["reused_bytes"] == count * 2048
        # A value is a page and its header, at a multiple of 4096 bytes.
        assert num_full * 32768 < figures[tier]["held_bytes"] <= num_full * (32768 + 4096)
    # Another run finds nothing, although the folder is the same.
    tiers = TierRun(Tiers(100, "disk"), 32768, 100, tmp_path)
    cache = model.create_cache(1, 320, 64, prefix_cache=tiers.config)
    assert cache.add_sequence(0, workload.requests[0].prompt) == 0
    cache.close_prefixes()


@pytest.mark.parametrize(
    "arguments", [["--tiers", "store"], ["--valkey", "valkey://127.0.0.1:1"]], ids=str
)
def test_a_store_needs_a_server(arguments, monkeypatch, capsys):
    import bench_prefix

    monkeypatch.setattr(sys, "argv", ["bench_prefix.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        bench_prefix.main()
    assert raised.value.code == 2
    assert "--tiers store and one of --valkey" in capsys.readouterr().err


def test_a_server_is_a_tier(model, tmp_path):
    from lib.prefix.tiers import TierRun, Tiers, store_opener
    from lib.prefix.workloads import few_shot

    workload = few_shot(source(scale=1 / 16), 16).lasting(1.0)
    with valkey_server(tmp_path) as server:
        opener = store_opener(f"valkey://127.0.0.1:{server.port}", None)
        tiers = TierRun(Tiers(12, "store"), 32768, 2000, tmp_path, opener)
        run = replay(model, workload, 24, tiers.config)
        assert run.by_tier["below"] > 0
        read_bytes = tiers.store.read_bytes
    assert read_bytes >= run.by_tier["below"] // 16 * 32768


if __name__ == "__main__":
    tvm.testing.main()
