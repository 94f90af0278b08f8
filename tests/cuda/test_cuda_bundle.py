# SPDX-License-Identifier: Apache-2.0
"""Bundles with kernels for GPUs: written, loaded on an emulated device, and refused elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
import tvm_ffi

import tir_kernels
import tvm_pagedkv as pkv
from tvm_pagedkv.bundle import cuda as bundle_cuda
from tvm_pagedkv.compiler.cuda import library as cuda_library
from tvm_pagedkv.compiler.cuda.library import DeviceCode
from tvm_pagedkv_lm.cli import command as cli

from .. import reference
from ..support.cases.caches.bundle_cases import (
    CONFIG,
    ROWS,
    SCALING,
    SEQUENCE,
    expected,
    inputs,
    rewrite,
)
from ..support.emulators.cuda_emulator.device import plugged_in
from ..support.harness.cpp_build import BUILDS, ROOT, needs_cmake, run
from ..support.worlds.permissive_steps import permissive_step
from .test_cuda_build import needs_nvcc

needs_no_device = pytest.mark.skipif(
    bool(tvm.cuda(0).exist), reason="this machine has the device that is emulated"
)
choose = tvm_ffi.get_global_func("pagedkv.choose_bundle_target")
NO_DRIVER = "need the driver of NVIDIA, and there is none: libcuda.so.1"
DRIVER = """
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int NO_DEVICE(void) { return 100; }
"""
# What TVM's runtime for GPUs needs of a driver.
DRIVER_NAMES = (
    "cuDeviceGetName cuFuncSetAttribute cuGetErrorName cuGetErrorString cuLaunchKernelEx "
    "cuModuleGetFunction cuModuleLoadData cuModuleUnload cuTensorMapEncodeTiled"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """For the CPU and for GPUs; in the place of machine code is what the emulator runs."""
    folder = tmp_path_factory.mktemp("bundle")
    held = {DeviceCode("sass", 80), DeviceCode("sass", 90), DeviceCode("ptx", 80)}
    config = pkv.KVCacheConfig(**CONFIG | {"rope": pkv.RopeConfig(scaling=SCALING)})
    with pytest.MonkeyPatch.context() as patches, plugged_in(patches):
        patches.setattr(bundle_cuda, "device_code", lambda path: held)
        patches.setattr(bundle_cuda, "cuda_version", lambda path: 13020)
        pkv.write_bundle(config, folder / "new", ["native", "cuda"], archs=("80", "90"))
    return (folder / "new").rename(folder / "moved")


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


@pytest.fixture
def device(monkeypatch):
    with plugged_in(monkeypatch) as emulated:
        yield emulated


def only_for_gpus(folder: Path) -> None:
    rewrite(folder, lambda m: m["targets"].pop(0))


# --- use ----------------------------------------------------------------------------------------


@needs_no_device
def test_a_bundle_runs_on_a_device(bundle, copy, device):
    """The one that is asked for, or the only one for which there are kernels."""
    qkv = tvm.runtime.tensor(inputs(), device.device)
    loaded = pkv.load_bundle(bundle)
    only_for_gpus(copy)
    other = pkv.load_bundle(copy)
    assert loaded.device == tvm.cpu() and other.device == device.device
    assert loaded.target != other.target == pkv.load_bundle(bundle, "cuda").target == "cuda"
    for cache in (loaded.create(device=device.device), other.create(max_total_tokens=64)):
        cache.add_sequence(SEQUENCE)
        with permissive_step(cache, [SEQUENCE], [ROWS]):
            out = cache.attention(0, qkv)
        assert out.device == device.device
        reference.assert_close(out.numpy(), expected(), "float32")
    with pytest.raises(ValueError, match="cuda is for device cuda"):
        other.create(device=tvm.cpu())
    with pytest.raises(ValueError, match="cuda is for device cuda"):
        pkv.load_bundle(bundle, "cuda").create(device=tvm.cpu())
    with pytest.raises(RuntimeError, match="no device cuda:1: the driver does not have it"):
        loaded.create(device=tvm.cuda(1))
    with pytest.raises(ValueError, match="not for devices of type"):
        loaded.create(device=tvm.device("opencl", 0))


@needs_no_device
def test_code_for_other_devices(copy, device):
    def code(*names):
        rewrite(copy, lambda m: m["targets"][1].update(device_code=names))

    for names, refusal in (
        (("sm_90", "compute_90"), "cuda, x86_64, sm_80. .* cuda has code for sm_90, compute_90"),
        (("sm_86",), "cuda has code for sm_86; write a bundle with a target"),
        (("compute_80",), None),
        (("sm_80",), None),
    ):
        code(*names)
        if refusal is None:
            assert pkv.load_bundle(copy, "cuda").target == "cuda"
            continue
        with pytest.raises(ValueError, match=refusal):
            pkv.load_bundle(copy, device=device.device)


@pytest.mark.slow
@needs_nvcc
def test_the_command(monkeypatch, tmp_path):
    """The command writes machine code from nvcc."""
    monkeypatch.setattr(tir_kernels, "kernel_names", lambda spec: ("merge", "copy_single_page"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = "bundle --target cuda --target cpu --arch 80 --arch 90 --config config.json --out b"
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 0
    manifest = json.loads(Path("b/manifest.json").read_text())
    cpu, gpu = manifest["targets"]
    assert (cpu["device"], gpu["device"], gpu["name"]) == ("cpu", "cuda", "cuda")
    assert gpu["device_code"] == ["compute_80", "sm_80", "sm_90"]
    assert gpu["driver"] >= 12000 and gpu["driver_for_ptx"] >= gpu["driver"]
    names = {Path(name).name for (files,) in [manifest["libraries"].values()] for name in files}
    assert {"libtvm_runtime.so", "libtvm_runtime_cuda.so", "libtvm_pagedkv.so"} < names
    assert not any("compiler" in name for name in names)
    (library,) = (each["library"] for each in gpu["kernel_sets"])
    assert b"__launch_bounds__" not in Path("b", library).read_bytes()
    assert pkv.load_bundle("b").target == cpu["name"]


# --- the choice ---------------------------------------------------------------------------------

TARGET = {
    "name": "gpus", "device": "cuda", "architecture": "x86_64", "features": [],
    "device_code": ["sm_80", "sm_86", "sm_90a", "compute_80"],
    "driver": 13000, "driver_for_ptx": 13020,
}  # fmt: skip


@pytest.mark.parametrize(
    "capability, driver, refusal",
    [
        (75, 13020, "sm_75.*has code for sm_80, sm_86, sm_90a, compute_80"),
        (80, 13000, None),
        (80, 12080, r"needs a driver for CUDA 13\.0 or later, and this one is for CUDA 12\.8"),
        (89, 13000, None),
        (90, 13000, None),
        (100, 13000, r"needs a driver for CUDA 13\.2 or later, and this one is for CUDA 13\.0"),
        (100, 13020, None),
        (0, 12080, r"needs a driver for CUDA 13\.0"),
        (80, 0, None),
    ],
)
def test_choice_by_capability_and_driver(capability, driver, refusal):
    machine = {"device": "cuda", "architecture": "x86_64", "features": []}
    machine |= {"compute_capability": capability, "driver": driver}
    if refusal is None:
        assert choose([TARGET], machine, None) == 0
        return
    with pytest.raises(ValueError, match=refusal):
        choose([TARGET], machine, None)


# --- what is refused ----------------------------------------------------------------------------


def loading(folder: Path, **environment: str) -> str:
    """Return the output of a process that loads a bundle for GPUs."""
    program = f"import tvm_pagedkv as pkv; pkv.load_bundle({str(folder)!r}, 'cuda')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


@needs_no_device
def test_a_machine_without_a_driver(bundle):
    assert NO_DRIVER in loading(bundle)
    assert "RuntimeError" in loading(bundle)


@needs_no_device
def test_drivers_that_are_too_old_or_without_a_device(bundle, tmp_path):
    """A driver that tells a version, and has nothing else."""
    source = DRIVER + "".join(
        f'int {name}(void) __attribute__((alias("NO_DEVICE")));\n' for name in DRIVER_NAMES.split()
    )
    (tmp_path / "driver.c").write_text(source)
    for version, text in (
        (
            12040,
            "ValueError: .*needs a driver for CUDA 13.0 or later, and this one is for CUDA 12.4",
        ),
        (13020, "RuntimeError: there is no device cuda:0: the driver does not have it"),
    ):
        folder = tmp_path / str(version)
        folder.mkdir()
        library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
        run("gcc", f"-DVERSION={version}", tmp_path / "driver.c", *library)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
        said = loading(bundle, LD_LIBRARY_PATH=path)
        assert re.search(text, said), said


@pytest.mark.slow
@needs_cmake
@needs_no_device
def test_the_cpp_program_without_a_driver(bundle):
    source, folder = ROOT / "runtime_ext" / "example", BUILDS / "cuda_example"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", str(source), "-B", str(folder), f"-DBUNDLE={bundle}", python)
    run("cmake", "--build", str(folder))
    command = [str(folder / "run_bundle"), str(bundle), "cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and NO_DRIVER in done.stderr


def test_what_cannot_be_written(monkeypatch, tmp_path, capsys):
    config = pkv.KVCacheConfig(1, 2, 2, 32, dtype="float16")
    path = tmp_path / "b"
    for targets, archs, text in (
        (["cuda"], (), "at least one architecture"),
        (["cuda"], ("80", "75"), "need compute capability 8.0; got '75'"),
        (["cuda"], ("sm_90",), "got 'sm_90'"),
        (["native"], ("90",), "archs are for target .cuda."),
    ):
        with pytest.raises(ValueError, match=text):
            pkv.write_bundle(config, path, targets, archs=archs)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["bundle", "--config", str(tmp_path / "config.json"), "--out", str(path)]
    for arguments, text in (
        ("--target cuda", "--target cuda needs architectures, such as --arch 80"),
        ("--target cuda --arch 70", "need compute capability 8.0; got '70'"),
        ("--arch 80", "--arch needs --target cuda"),
    ):
        assert cli.main([*command, *arguments.split()]) == 2
        assert text in capsys.readouterr().err
    monkeypatch.setattr(tir_kernels, "kernel_names", lambda spec: ("merge", "copy_single_page"))
    monkeypatch.setattr(cuda_library.os, "access", lambda *_: False)  # nothing can be run
    monkeypatch.setenv("TVM_PAGEDKV_CACHE", str(tmp_path / "cache"))
    assert cli.main([*command, "--target", "cuda", "--arch", "90"]) == 2
    assert "needs nvcc" in capsys.readouterr().err
    assert not path.exists() and not list(tmp_path.glob(".bundle-*"))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
