# SPDX-License-Identifier: Apache-2.0
"""Bundles: written, moved, and loaded without a compiler from Python and C++."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

import tir_kernels
import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS
from tvm_pagedkv.bundle import writer as bundle_writer
from tvm_pagedkv.bundle.load import choose_target

from .. import reference
from ..support.cases.caches.bundle_cases import (
    CONFIG,
    IS_X86,
    ROWS,
    SCALING,
    SECOND,
    SEQUENCE,
    expected,
    inputs,
    refused,
    rewrite,
)
from ..support.emulators.dict_store import DictStore
from ..support.harness.cpp_build import BUILDS, ROOT, needs_cmake, run
from ..support.harness.fast_compilation import path_of_children
from ..support.worlds.permissive_steps import permissive_step

V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pni", "popcnt"}
V3 |= {"sse4_1", "sse4_2", "ssse3"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


# --- use ----------------------------------------------------------------------------------------


@needs_cmake
@pytest.mark.parametrize("target", [None, *SECOND])
def test_cpp_program(bundle, target):
    folder = BUILDS / f"example-{target}"
    source = ROOT / "runtime_ext" / "example"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", str(source), "-B", str(folder), f"-DBUNDLE={bundle}", python)
    run("cmake", "--build", str(folder), "--target", "run_bundle")
    command = [str(folder / "run_bundle"), str(bundle), *([target] if target else [])]
    lines = run(*command, env={"TVM_NUM_THREADS": "2"}).splitlines()
    assert lines[0] == f"target {target or pkv.load_bundle(bundle).target}"
    rows = [line.split() for line in lines[1:] if not line.startswith("library")]
    actual = np.array(rows, "float32").reshape(ROWS, 4, 32)
    reference.assert_close(actual, expected(), "float32")
    libraries = {line.removeprefix("library ") for line in lines if line.startswith("library")}
    names = {Path(library).name for library in libraries}
    assert names == set(bundle_writer.LIBRARIES)
    assert all(Path(library).is_relative_to(bundle) for library in libraries)


@pytest.mark.skipif(not SECOND, reason="hides features of x86-64")
def test_a_cpu_without_what_the_kernels_need(bundle, copy, monkeypatch):
    monkeypatch.setenv("TVM_PAGEDKV_CPU_FEATURES", " ".join(V3 | {"sse2"}))
    assert pkv.load_bundle(bundle).target == "x86-64-v3"
    monkeypatch.setenv("TVM_PAGEDKV_CPU_FEATURES", " ".join(V3 - {"f16c"}))
    refused(bundle, r"this machine \(cpu, x86_64\) cannot run .*x86-64-v3 needs f16c")
    monkeypatch.delenv("TVM_PAGEDKV_CPU_FEATURES")
    rewrite(copy, lambda m: [t["features"].append("no_such_feature") for t in m["targets"]])
    refused(copy, "x86-64-v3 needs no_such_feature")


def test_python_without_compiler(bundle, tmp_path):
    """An apache-tvm whose compiler is not there: links to all of it but that."""
    package = Path(tvm.__file__).parent
    (tmp_path / "tvm" / "lib").mkdir(parents=True)
    for source in [*package.iterdir(), *(package / "lib").iterdir()]:
        if source.name not in ("lib", "libtvm_compiler.so"):
            (tmp_path / source.relative_to(package.parent)).symlink_to(source)
    np.save(tmp_path / "qkv.npy", inputs())
    program = f"""
import numpy as np, tvm, tvm_pagedkv as pkv
assert tvm.__file__.startswith({str(tmp_path)!r})
cache = pkv.load_bundle({str(bundle)!r}).create(max_total_tokens=64)
cache.add_sequence({SEQUENCE})
cache.begin_forward([{SEQUENCE}], [{ROWS}])
out = cache.attention(0, np.load("qkv.npy"))
cache.end_forward()
np.save("out.npy", out.numpy())
assert "libtvm_runtime" in (maps := open("/proc/self/maps").read())
assert "libtvm_compiler" not in maps and "libLLVM" not in maps
assert cache.num_available_pages() == 4 - 3
try:
    pkv.create
except ImportError as error:
    print(error)
"""
    package = Path(pkv.__file__).parents[1]  # the one under test, whatever else is installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "libtvm_compiler.so" in done.stdout and "load_bundle" in done.stdout
    reference.assert_close(np.load(tmp_path / "out.npy"), expected(), "float32")


def test_a_second_load_leaves_the_first_usable(bundle, tmp_path):
    """Both use one library, even by a link, and the second bundle is freed first.

    malloc overwrites what is freed, so that a use of it crashes at once.
    """
    (tmp_path / "link").symlink_to(bundle)
    np.save(tmp_path / "qkv.npy", inputs())
    program = f"""
import gc, os, numpy as np, tvm_pagedkv as pkv
first = pkv.load_bundle({str(bundle)!r})
for path in ({str(bundle)!r}, {str(tmp_path / "link")!r}):
    pkv.load_bundle(path)
    gc.collect()
for _ in range(4):
    cache = first.create(max_total_tokens=64)
    cache.add_sequence({SEQUENCE})
    with cache.forward([{SEQUENCE}], [{ROWS}]):
        for layer in (1, 0):
            out = cache.attention(layer, np.load({str(tmp_path / "qkv.npy")!r}))
np.save({str(tmp_path / "out.npy")!r}, out.numpy())
"""
    environment = os.environ | {"PYTHONPATH": path_of_children(), "MALLOC_PERTURB_": "165"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reference.assert_close(np.load(tmp_path / "out.npy"), expected(), "float32")


def test_python_chooses_and_creates(bundle):
    config = pkv.KVCacheConfig(**CONFIG | {"rope": pkv.RopeConfig(scaling=SCALING)})
    loaded = pkv.load_bundle(bundle, config=replace(config, max_num_sequences=3))
    assert loaded.config == config
    for name in [loaded.target, *SECOND]:
        cache = pkv.load_bundle(bundle, name).create(max_num_sequences=1)
        cache.add_sequence(SEQUENCE)
        cache.add_sequence(1)
        with pytest.raises(ValueError, match="max_num_sequences"):
            cache.begin_forward([SEQUENCE, 1], [1, 1])
        with permissive_step(cache, [SEQUENCE], [ROWS]):
            reference.assert_close(cache.attention(0, inputs()).numpy(), expected(), "float32")
    with pytest.raises(ValueError, match="only capacities can change .*; page_size is compiled in"):
        loaded.create(page_size=32)
    with pytest.raises(ValueError, match="caches with page_size=16, not 32"):
        pkv.load_bundle(bundle, config=replace(config, page_size=32))
    with pytest.raises(ValueError, match="no target 'x86-64-v9'; it has: "):
        pkv.load_bundle(bundle, "x86-64-v9")


def test_every_layer_has_its_kernels(monkeypatch, tmp_path):
    """Layers that differ have kernel sets of their own."""
    few = {name: tir_kernels.catalogue.KERNELS[name] for name in ("merge", "copy_single_page")}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
    layers = [pkv.LayerSpec(), pkv.LayerSpec(num_qo_heads=6), pkv.LayerSpec()]
    config = pkv.KVCacheConfig(3, 4, 2, 32, dtype="bfloat16", layers=layers, layer_indptr=[0, 2, 3])
    path = pkv.write_bundle(config, tmp_path / "b")
    loaded = pkv.load_bundle(path)
    assert loaded.config == config
    assert [len(s["kernels"]) for s in loaded.manifest["targets"][0]["kernel_sets"]] == [2, 2]
    assert [layer["kernel_set"] for layer in loaded.manifest["cache"]["layers"]] == [0, 1, 0]


def test_tiers_round_trip_and_are_opened(tmp_path, monkeypatch):
    tiers = pkv.PrefixCacheConfig(disk_path=tmp_path / "pages", disk_bytes=1 << 26, model_id="m")
    rope = pkv.RopeConfig(mode="none")
    config = pkv.KVCacheConfig(1, 4, 2, 32, dtype="float32", rope=rope, prefix_cache=tiers)
    other = pkv.PrefixCacheConfig(store=DictStore(), model_id="m")
    with monkeypatch.context() as patch:
        patch.setattr(bundle_writer, "build_libraries", None)  # it is refused before that
        with pytest.raises(ValueError, match="prefix_cache.store is an object"):
            pkv.write_bundle(replace(config, prefix_cache=other), tmp_path / "b", bare=True)
    path = pkv.write_bundle(config, tmp_path / "b", bare=True)
    loaded = pkv.load_bundle(path, config=replace(config, prefix_cache=None))  # tiers are free
    as_text = replace(tiers, disk_path=str(tmp_path / "pages"))
    assert loaded.config == replace(config, prefix_cache=as_text)
    prompt, reused = list(range(40)), []
    for _ in range(2):
        cache = loaded.create(max_total_tokens=64)
        reused.append(cache.add_sequence(0, prompt, lookup_timeout=60))
        rest = prompt[reused[-1] :]
        with cache.forward([0], [len(rest)], tokens=rest):
            cache.attention(0, np.ones((len(rest), 8, 32), "float32"))
        assert cache.close_prefixes(60)
    assert reused == [0, 32]
    host = loaded.create(prefix_cache=pkv.PrefixCacheConfig(host_bytes=1 << 20))
    assert host.stats()["prefix_tiers"]["host_capacity_bytes"] <= 1 << 20


@pytest.mark.slow
def test_codecs(tmp_path):
    """The layers of a bundle keep their rows by a codec each, those of 8 bits by given scales."""
    scales = {name: (0.02, (0.03, 0.01)) for name in ("int8", "float8_e4m3fn")}
    layers = [pkv.LayerSpec(kv_dtype=codec, kv_scales=scales.get(codec)) for codec in CODECS]
    rope = pkv.RopeConfig(mode="none")
    config = pkv.KVCacheConfig(len(layers), 4, 2, 32, dtype="float32", layers=layers, rope=rope)
    folder = pkv.write_bundle(config, tmp_path / "bundle", bare=True)
    loaded = pkv.load_bundle(folder)
    assert [layer.kv_dtype for layer in loaded.config.resolved().layers] == list(CODECS)
    cache = loaded.create(max_total_tokens=64)
    cache.add_sequence(0)
    rng, caches = np.random.default_rng(0), []
    for name, codec in CODECS.items():
        caches.append(reference.ReferenceCache(1, codec))
        if name in scales:
            caches[-1].static_scales = [np.array([[0.02, 0.02], [0.03, 0.01]], "f4")]
        caches[-1].add_sequence(0)
    for num_rows in (9, 1, 5):
        with cache.forward([0], [num_rows]):
            for layer, (name, wanted) in enumerate(zip(CODECS, caches, strict=True)):
                qkv = rng.standard_normal((num_rows, 8, 32), dtype="float32")
                out = cache.attention(layer, qkv).numpy()
                o, _ = wanted.attention(0, [0], [num_rows], qkv, 2, 32**-0.5)
                # A row may be rounded to the neighbour of a code.
                np.testing.assert_allclose(out, o, atol=0.05 if name in ("int5", "int4") else 0.01)
    assert cache.stats()["num_used_pages"] == len(layers)  # one of each layer
    manifest = json.loads((folder / "manifest.json").read_text())
    layer = next(x for x in manifest["cache"]["layers"] if "kv_scales" in x)
    layer["kv_scales"] = [[0.02, 0.02, 0.03], [0.01]]
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    with pytest.raises(ValueError, match="must be two lists, a scale for each head"):
        pkv.load_bundle(folder).create()


# --- the choice ---------------------------------------------------------------------------------


def manifest_of(*targets) -> dict:
    described = []
    for target in map(bundle_writer.bundle_target, targets):
        described.append(
            {
                "name": bundle_writer._name_of(target),
                "device": "cpu",
                "architecture": bundle_writer.architecture(target),
                "features": bundle_writer.required_features(target),
            }
        )
    return {"targets": described}


@pytest.mark.skipif(not IS_X86, reason="names x86 CPUs")
def test_choice_by_features():
    manifest = manifest_of(
        "x86-64-v3", "x86-64-v4", "znver4", "aarch64-linux-gnu", "aarch64-linux-gnu:neoverse-v1"
    )
    v3, v4, zen4, arm, neoverse = manifest["targets"]
    assert set(v3["features"]) == V3 and set(v4["features"]) == V4
    assert {"avx512_bf16", "avx512_vnni"} <= set(zen4["features"])
    assert arm["features"] == ["asimd"] and {"sve", "bf16", "asimddp"} <= set(neoverse["features"])
    assert choose_target(manifest, V3 | {"sse2"}) == "x86-64-v3"
    assert choose_target(manifest, V4 | {"avx512_bf16"}) == "x86-64-v4"
    assert choose_target(manifest, zen4["features"]) == "znver4"
    assert choose_target(manifest, zen4["features"], name="x86-64-v3") == "x86-64-v3"
    assert choose_target(manifest, ["asimd", "sve"], "aarch64") == "aarch64-linux-gnu"
    assert choose_target(manifest, neoverse["features"], "aarch64").endswith("neoverse-v1")
    with pytest.raises(ValueError, match="x86-64-v3 needs f16c; x86-64-v4 needs avx512bw"):
        choose_target(manifest, V3 - {"f16c"})
    with pytest.raises(ValueError, match="cannot run .* x86-64-v4 needs avx512bw"):
        choose_target(manifest, V3, name="x86-64-v4")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
