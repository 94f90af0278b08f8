# SPDX-License-Identifier: Apache-2.0
"""Bundles that are refused: damaged, of other versions and machines, or not possible to write."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys

import pytest

import tir_kernels
import tvm_pagedkv as pkv
from tvm_pagedkv_lm.cli import command as cli

from ..support.cases.caches.bundle_cases import IS_X86, refused, rewrite


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
    few = {name: tir_kernels.catalogue.KERNELS[name] for name in ("merge", "copy_single_page")}
    monkeypatch.setattr(tir_kernels.catalogue, "KERNELS", few)
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
