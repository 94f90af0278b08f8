# SPDX-License-Identifier: Apache-2.0
"""Sequences to a file and back: bit for bit, sharing their pages, all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.cache import checkpoint
from tvm_pagedkv.compiler.create import rope_details

from ..reference.checkpoint import page_group
from ..support.cases.caches.checkpoint_cases import LAYERS, Fed, call, export, forked
from ..support.worlds.permissive_steps import permissive_step

STEPS = ({3: 1, 4: 1, 5: 1}, {5: 6, 3: 2}, {4: 9})


def sharing(cache) -> list[tuple[int, int]]:
    return [(g["num_used_pages"], g["num_shared_pages"]) for g in cache.stats()["groups"]]


@pytest.mark.parametrize("history", [True, False], ids=["history", "no history"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_sequences_come_back_and_go_on(kind, page_size, history, tmp_path):
    fields = {"page_size": page_size}
    source, target = forked(kind, **fields), Fed(kind, 5, **fields, max_total_tokens=320)
    path = tmp_path / "a.safetensors"
    source.cache.save(path, history=history)
    assert target.cache.load(path) == [-1, 3, 4, 5, 6]
    pages = np.array(sharing(source.cache)), np.array(sharing(target.cache))
    if history:  # what a pop has left of 16 positions that can be popped becomes 16 again
        assert (pages[0] <= pages[1]).all()
    else:
        np.testing.assert_array_equal(*pages)
    for seq_id, rows in source.rows.items():
        target.rows[seq_id] = list(rows)
        target.check(seq_id)
    target.cache.save(tmp_path / "b.safetensors", history=history)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()
    for each in (source, target):
        each.pop(4, 3)
    for lengths in STEPS:
        for ours, theirs in zip(source.step(lengths), target.step(lengths), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for seq_id in (3, 4, 5):
        target.check(seq_id)


def test_only_its_owner_reads_a_file(tmp_path, monkeypatch):
    modes = []

    def blocks(*arguments):
        modes.extend(path.stat().st_mode & 0o777 for path in tmp_path.iterdir())  # unfinished
        return original(*arguments)

    original = checkpoint._blocks
    monkeypatch.setattr(checkpoint, "_blocks", blocks)
    mask = os.umask(0)
    try:
        forked("mha").cache.save(tmp_path / "x")
    finally:
        os.umask(mask)
    assert modes and set(modes) == {0o600}
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_file_does_not_depend_on_the_pages(tmp_path):
    files = []
    for seed, num_tokens in ((0, 256), (9, 512)):
        source = forked("mixed", seed, max_total_tokens=num_tokens)
        source.cache.save(tmp_path / "x", [3, 5, 4])
        files.append((tmp_path / "x").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_the_safetensors_package_reads_it(kv_dtype, tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    source = Fed("mha", kv_dtype=kv_dtype)
    source.add(0)
    with permissive_step(source.cache, [0], [10]):
        pass
    bits = np.random.default_rng(0).integers(0, 256, (2, 2, 10, 2, source.dtype.itemsize * 8))
    k, v = bits.astype("uint8").view(kv_dtype if kv_dtype != "bfloat16" else ml_dtypes.bfloat16)
    source.cache.debug_set_kv(0, 0, k, v)
    source.cache.fork_sequence(0, 1, 8)
    source.cache.save(tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as file:
        assert sorted(file.keys()) == ["layer.0", "layer.1"]
        assert json.loads(file.metadata()["seq_ids"]) == [0, 1]
        assert json.loads(file.metadata()["tables"]) == [[[0, 1, 2], [0, 1]]]
        for layer in range(2):
            expected = page_group((k[layer], v[layer]), 0, 4)[0]
            assert file.get_tensor(f"layer.{layer}").tobytes() == expected.tobytes()
    target = Fed("mha", 1, kv_dtype=kv_dtype)
    target.cache.load(tmp_path / "x")
    assert [x.numpy().tobytes() for x in target.cache.debug_get_kv(0)] == [k.tobytes(), v.tobytes()]


@pytest.mark.parametrize("block_bytes", [1, 3000])
def test_some_of_them_in_small_blocks(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", block_bytes)
    source, target = forked("mixed"), Fed("mixed", 3)
    source.cache.save(tmp_path / "x", (5, 6, 3))
    with pytest.raises(KeyError, match=r"no sequence 4 in the file, which has \[5, 6, 3\]"):
        target.cache.load(tmp_path / "x", [4])
    assert target.cache.load(tmp_path / "x", {3: 10}) == [10]
    assert target.cache.load(tmp_path / "x", [6, 3]) == [6, 3]
    assert target.cache.load(tmp_path / "x", {5: 3 - 2, 3: 11}) == [1, 11]
    assert target.cache.load(tmp_path / "x", []) == []
    for seq_id, old in ((10, 3), (6, 6), (3, 3), (1, 5), (11, 3)):
        target.rows[seq_id] = list(source.rows[old])
        target.check(seq_id)
    target.cache.remove_sequence(1)
    target.check(11)


def test_no_sequences(tmp_path):
    target = Fed("all")
    target.cache.save(tmp_path / "x")
    assert target.cache.load(tmp_path / "x") == []
    source = forked()
    source.cache.save(tmp_path / "x", [6])
    assert target.cache.load(tmp_path / "x") == [6]
    assert target.cache.sequence_length(6) == 0


# --- other processes and real kernels -----------------------------------------------------------

CHILD = """
import sys
from tests.support.cases.caches.checkpoint_cases import Fed
from tests.checkpoint.test_save_load import go_on
target = Fed("all", 7, max_total_tokens=320)
target.cache.load(sys.argv[1])
print(go_on(target))
"""


def go_on(each: Fed) -> str:
    """Checksum of the outputs of some steps; their rows depend on the ids alone."""
    other = Fed(each.kind)
    other.add(0)
    each.rows = {seq_id: list(other.rows[0]) for seq_id in each.cache.sequence_ids()}
    outputs = [x.tobytes() for lengths in STEPS for x in each.step(lengths)]
    return hashlib.sha256(b"".join(outputs)).hexdigest()


def test_another_process_goes_on(tmp_path):
    source = forked()
    source.cache.save(tmp_path / "x")
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "x")], capture_output=True, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == go_on(source)


def test_compiled_kernels_go_on(tmp_path):
    sliding = pkv.LayerSpec(kind="mha_sliding", window=20)
    config = pkv.KVCacheConfig(
        num_layers=2, num_qo_heads=4, num_kv_heads=2, qk_head_dim=32, dtype="bfloat16",
        max_num_sequences=4, max_total_tokens=512, prefill_chunk_size=64,
        layers=[sliding, pkv.LayerSpec()], rope=pkv.RopeConfig(theta=500000.0),
    )  # fmt: skip
    caches = [pkv.create(config), pkv.create(config)]
    rng = np.random.default_rng(0)

    def step(cache, lengths, qkv):
        with cache.forward(list(lengths), list(lengths.values())):
            return [cache.attention(layer, qkv).numpy() for layer in range(2)]

    def draw(n):
        return rng.standard_normal((n, 8, 32)).astype(ml_dtypes.bfloat16)

    caches[0].add_sequence(0)
    step(caches[0], {0: 60}, draw(60))
    caches[0].fork_sequence(0, 1)
    step(caches[0], {1: 5}, draw(5))
    caches[0].save(tmp_path / "x")
    caches[1].load(tmp_path / "x")
    for _ in range(20):
        qkv = draw(2)
        ours, theirs = (step(cache, {0: 1, 1: 1}, qkv) for cache in caches)
        for left, right in zip(ours, theirs, strict=True):
            assert left.tobytes() == right.tobytes()
    for seq_id in (0, 1):
        for left, right in zip(*(export(c, seq_id)[1] for c in caches), strict=True):
            assert left.numpy().tobytes() == right.numpy().tobytes()
    assert call("get_layout_hash", caches[0]) == call("get_layout_hash", caches[1])


def test_words_for_the_rotation():
    def details(head_dim=64, **fields):
        config = pkv.KVCacheConfig(1, 1, 1, head_dim, rope=pkv.RopeConfig(**fields))
        return rope_details(config.resolved().layers[0])

    assert details() == details(rotary_dim=64) == details(scaling={"rope_type": "default"}) == ""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    different = [
        details(rotary_dim=32),
        details(scaling={"rope_type": "linear", "factor": 2.0}),
        details(scaling={"rope_type": "linear", "factor": 4.0}),
        details(scaling=llama3),
        details(scaling=llama3 | {"low_freq_factor": 2.0}),
        details(scaling=llama3, rotary_dim=32),
    ]
    assert len({*different, ""}) == len(different) + 1
    factors = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    factors |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    assert "1.0, 1.0" not in details(scaling=factors)  # the cache has the factors themselves


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
