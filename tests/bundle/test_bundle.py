# SPDX-License-Identifier: Apache-2.0
"""Bundles: written, moved, loaded without a compiler from Python and C++, and refused."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

import tir_kernels
import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS
from tvm_pagedkv.bundle import writer as bundle_writer
from tvm_pagedkv.bundle.load import choose_target
from tvm_pagedkv_cli import command as cli

from .. import reference
from ..reference.rope import Rope
from ..support.cpp_build import BUILDS, ROOT, needs_cmake, run
from ..support.dict_store import DictStore
from ..support.fast_compilation import path_of_children
from ..support.foreign_code import runs_here
from ..support.permissive_steps import permissive_step

ROWS, SEQUENCE = 37, 7
SCALING = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 4096,
}
CONFIG = {
    "num_layers": 2,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "qk_head_dim": 32,
    "dtype": "float32",
    "max_total_tokens": 512,
    "rope": {"scaling": SCALING},
}
V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pni", "popcnt"}
V3 |= {"sse4_1", "sse4_2", "ssse3"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
IS_X86 = platform.machine() == "x86_64"
SECOND = ["x86-64-v3"] if runs_here("x86-64-v3") else []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A bundle written by the command, and moved since."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["bundle", "--config", str(folder / "config.json"), "--out", str(folder / "new")]
    for cpu in ["native", *SECOND]:
        arguments += ["--cpu", cpu]
    assert cli.main(arguments) == 0
    return (folder / "new").rename(folder / "moved")


def inputs() -> np.ndarray:
    """QKV as the C++ example makes it."""
    shape = ROWS, CONFIG["num_qo_heads"] + 2 * CONFIG["num_kv_heads"], CONFIG["qk_head_dim"]
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 % 1009
    return (numbers.astype("float32") / np.float32(512) - np.float32(1)).reshape(shape)


def expected() -> np.ndarray:
    cache = reference.ReferenceCache(2, np.float32, Rope(1e4, 1.0, 32, SCALING), "normal")
    cache.add_sequence(SEQUENCE)
    return cache.attention(0, [SEQUENCE], [ROWS], inputs(), 2, CONFIG["qk_head_dim"] ** -0.5)[0]


def rewrite(folder: Path, change) -> None:
    """Change the manifest as one who knows how, its digest too."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


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
    few = {name: tir_kernels.BUILDERS[name] for name in ("merge", "copy_single_page")}
    monkeypatch.setattr(tir_kernels, "BUILDERS", few)
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


def test_codecs(tmp_path):
    """The layers of a bundle keep their rows by a codec each."""
    layers = [pkv.LayerSpec(kv_dtype=codec) for codec in CODECS]
    rope = pkv.RopeConfig(mode="none")
    config = pkv.KVCacheConfig(3, 4, 2, 32, dtype="float32", layers=layers, rope=rope)
    loaded = pkv.load_bundle(pkv.write_bundle(config, tmp_path / "bundle", bare=True))
    assert [layer.kv_dtype for layer in loaded.config.resolved().layers] == list(CODECS)
    cache = loaded.create(max_total_tokens=64)
    cache.add_sequence(0)
    rng, caches = np.random.default_rng(0), []
    for codec in CODECS.values():
        caches.append(reference.ReferenceCache(1, codec))
        caches[-1].add_sequence(0)
    for num_rows in (9, 1, 5):
        with cache.forward([0], [num_rows]):
            for layer, (name, wanted) in enumerate(zip(CODECS, caches, strict=True)):
                qkv = rng.standard_normal((num_rows, 8, 32), dtype="float32")
                out = cache.attention(layer, qkv).numpy()
                o, _ = wanted.attention(0, [0], [num_rows], qkv, 2, 32**-0.5)
                # A row may be rounded to the neighbour of a code.
                np.testing.assert_allclose(out, o, atol=0.05 if name == "int4" else 0.01)
    assert cache.stats()["num_used_pages"] == 3  # one of each layer


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


# --- what is refused ----------------------------------------------------------------------------


def refused(folder: Path, text: str) -> None:
    """Both loaders, that of C++ programs and Python's, refuse the folder."""
    with pytest.raises(ValueError, match=text):
        tvm_ffi.get_global_func("pagedkv.load_bundle")(str(folder), None, None)
    with pytest.raises(ValueError, match=text):
        pkv.load_bundle(folder)


@pytest.mark.parametrize("pattern", ["kernels/{}.0.so", "lib/*/libtvm_runtime.so", "manifest.json"])
def test_damaged_files(copy, pattern):
    chosen = pkv.load_bundle(copy).target
    (file,) = copy.glob(pattern.format(chosen))
    whole = file.read_bytes()
    file.unlink()  # the process has mapped this one
    file.write_bytes(whole[:-7])
    name_in_text = re.escape(file.name)
    refused(copy, f"{name_in_text} is damaged: it .*; copy the bundle anew, or write it again")
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    file.write_bytes(changed)
    refused(copy, f"{name_in_text} is damaged: ")
    file.unlink()
    refused(copy, "is not a bundle" if file.suffix == ".json" else f"{name_in_text} is missing")
    file.write_bytes(whole)
    assert pkv.load_bundle(copy).target == chosen


def test_a_bundle_that_replaces_a_loaded_one(copy, tmp_path):
    """The dynamic loader would hand out the old code, by its path."""
    manifest = json.loads((copy / "manifest.json").read_text())
    chosen = pkv.load_bundle(copy).target
    (name,) = (
        each["kernel_sets"][0]["library"] for each in manifest["targets"] if each["name"] == chosen
    )
    content = (copy / name).read_bytes()

    def replace_library(content: bytes) -> None:
        (copy / name).unlink()
        (copy / name).write_bytes(content)
        described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite(copy, lambda manifest: manifest["files"].update({name: described}))

    replace_library(content + b"\0")  # loaders ignore what follows the sections
    with pytest.raises(RuntimeError, match=f"{re.escape(name)} has changed since .* loaded it"):
        pkv.load_bundle(copy)
    moved = copy.rename(tmp_path / "elsewhere")
    assert pkv.load_bundle(moved).target == chosen
    copy = moved.rename(copy)
    replace_library(content)
    assert pkv.load_bundle(copy).target == chosen


def test_other_versions_and_machines(copy):
    def version(package, number):
        return lambda manifest: manifest["versions"].update({package: number})

    def architecture(manifest):
        for target in manifest["targets"]:
            target["architecture"] = "riscv64"

    before = json.loads((copy / "manifest.json").read_text())
    for change, text in [
        (version("tvm-pagedkv", "9.1.0"), "by tvm-pagedkv 9.1.0 .*: install tvm-pagedkv 9.1.0"),
        (lambda m: m.update(format=2), "in format 2"),
        (version("apache-tvm-ffi", "0.2.3"), "needs apache-tvm-ffi 0.2, and this process has 0.1"),
        (version("apache-tvm", "0.29.0"), "by apache-tvm 0.29.0, .*: install apache-tvm 0.29"),
        (architecture, "is for riscv64; write a bundle with a target that it can run"),
        (lambda m: m.pop("targets"), "lacks 'targets'"),
        (lambda m: m["files"].clear(), "lacks 'lib/|lacks 'kernels/"),
    ]:
        rewrite(copy, change)
        refused(copy, text)
        rewrite(copy, lambda m: (m.clear(), m.update(before)))
    assert pkv.load_bundle(copy).target
    refused(copy / "lib", "is not a bundle: it has no manifest.json")


@pytest.mark.parametrize("name", ["absolute", "..", "kernels/../../other", "link", "folder link"])
def test_libraries_outside_of_the_folder(copy, name):
    """The manifest has the right checksum of the library, wherever it lies."""
    manifest = json.loads((copy / "manifest.json").read_text())
    chosen = pkv.load_bundle(copy).target
    target = next(each for each in manifest["targets"] if each["name"] == chosen)
    inside = target["kernel_sets"][0]["library"]
    (copy.parent / "kernels").mkdir()
    outside = (copy / inside).rename(copy.parent / inside)
    if name == "link":
        (copy / inside).symlink_to(outside)
    elif name == "folder link":
        shutil.rmtree(copy / "kernels")
        (copy / "kernels").symlink_to(copy.parent / "kernels")
    new = {
        "absolute": str(outside),
        "..": f"../{inside}",
        "kernels/../../other": f"kernels/../../{inside}",
    }.get(name, inside)

    def change(manifest):
        manifest["files"][new] = manifest["files"].pop(inside)
        for each in manifest["targets"]:
            if each["name"] == chosen:
                each["kernel_sets"][0]["library"] = new

    rewrite(copy, change)
    refused(copy, f"must name files within {copy}, and '{re.escape(new)}' is elsewhere")


def test_libraries_by_links_within_the_folder(copy):
    chosen = pkv.load_bundle(copy).target
    (file,) = copy.glob(f"kernels/{chosen}.0.so")
    file.symlink_to(file.rename(file.with_name("renamed.so")))
    link = copy.with_name("link")
    link.symlink_to(copy)
    assert pkv.load_bundle(link).target == chosen


def test_what_cannot_be_written(bundle, tmp_path, capsys):
    config = pkv.KVCacheConfig(1, 2, 2, 32, dtype="float16")
    with pytest.raises(ValueError, match="is not empty"):
        pkv.write_bundle(config, bundle)
    with pytest.raises(ValueError, match="at least one target"):
        pkv.write_bundle(config, tmp_path / "b", [])
    with pytest.raises(ValueError, match="lacks libtvm_ffi.so"):
        pkv.write_bundle(config, tmp_path / "b", libraries=[tmp_path])
    if IS_X86:
        with pytest.raises(ValueError, match="float16 needs a CPU target that converts"):
            pkv.write_bundle(config, tmp_path / "b", ["x86-64"])
    (tmp_path / "config.json").write_text('{"num_layers": 1, "heads": 2}')
    arguments = ["bundle", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "b")]
    assert cli.main(arguments) == 2
    assert "config has no field 'heads'; known: num_layers" in capsys.readouterr().err
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob(".bundle-*"))


@pytest.mark.skipif(not IS_X86, reason="needs a compiler for another architecture")
def test_other_architectures_need_a_linker(monkeypatch, tmp_path):
    few = {name: tir_kernels.BUILDERS[name] for name in ("merge", "copy_single_page")}
    monkeypatch.setattr(tir_kernels, "BUILDERS", few)
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    config = pkv.KVCacheConfig(1, 2, 2, 32, dtype="float16")
    if shutil.which("aarch64-linux-gnu-g++") is None:
        with pytest.raises(RuntimeError, match="no aarch64-linux-gnu-g.. on PATH; install it"):
            pkv.write_bundle(config, tmp_path / "b", ["aarch64-linux-gnu"])
    # One that links nothing, and keeps the first object for its output.
    linker = tmp_path / "bin" / "aarch64-linux-gnu-g++"
    linker.parent.mkdir()
    linker.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "out = sys.argv[sys.argv.index('-o') + 1]\n"
        "shutil.copy(next(a for a in sys.argv if a.endswith('.o')), out)\n"
    )
    linker.chmod(0o755)
    path = pkv.write_bundle(config, tmp_path / "b", ["aarch64-linux-gnu", "native"])
    arm, own = json.loads((path / "manifest.json").read_text())["targets"]
    assert (arm["architecture"], arm["features"]) == ("aarch64", ["asimd"])
    library = (path / arm["kernel_sets"][0]["library"]).read_bytes()
    assert library[:4] == b"\x7fELF" and library[18] == 183, "not for AArch64"
    assert pkv.load_bundle(path).target == own["name"]
    with pytest.raises(ValueError, match="aarch64-linux-gnu is for aarch64"):
        pkv.load_bundle(path, "aarch64-linux-gnu")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
