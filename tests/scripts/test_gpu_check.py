# SPDX-License-Identifier: Apache-2.0
"""The program that checks a GPU: its checks on an emulated one, and all of it on the CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tir_kernels.codec import CODECS
from tvm_pagedkv.bundle import cuda as bundle_cuda
from tvm_pagedkv.bundle.load import read_config
from tvm_pagedkv.compiler.cuda.library import DeviceCode

from ..cuda.test_cuda_build import needs_nvcc
from ..reference import quantized
from ..support.emulators.cuda_emulator.device import plugged_in
from ..support.harness.selections import with_slow
from ..support.worlds.recurrent_world import world_config

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"
SIZE = 16
CODED = ("float16-int8", "bfloat16-float8_e4m3fn", "bfloat16-int4")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def written(path: Path, name: str, **options) -> Path:
    from gpu_check_configs import RECURRENT, RECURRENT_OPTIONS, config_of

    if name == RECURRENT:
        config = world_config(**RECURRENT_OPTIONS)
    else:
        config = read_config(config_of(name, True))
    return pkv.write_bundle(config, path, bare=True, **options)


def check(folder: Path, device) -> None:
    import gpu_check_caches as caches

    kernels = caches.load(folder, device)
    if any("recurrent_scan" in each for each in kernels.bundle.kernel_sets):
        caches.check_recurrent(kernels, 0.0, 100, is_tiny=True)
        return
    caches.check_forwards(kernels, SIZE)
    caches.check_parts(kernels, SIZE)
    caches.check_shared_prefix(kernels, SIZE)
    caches.check_random(kernels, SIZE, 0.0, 10)
    caches.check_the_rest(kernels)


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", *CODED, "recurrent"])
def test_caches_on_this_gpu(tmp_path, name):
    arch = tvm.cuda(0).compute_version.replace(".", "")
    check(written(tmp_path / "b", name, targets=["cuda"], archs=[arch]), tvm.cuda(0))


@pytest.mark.skipif(bool(tvm.cuda(0).exist), reason="this machine has the device that is emulated")
@pytest.mark.parametrize(
    "name",
    with_slow(["bfloat16", "bfloat16-int4", "recurrent"], "bfloat16", "recurrent"),
)
def test_caches_on_an_emulated_device(monkeypatch, tmp_path, name):
    held = {DeviceCode("sass", 80)}
    monkeypatch.setattr(bundle_cuda, "device_code", lambda path: held)
    monkeypatch.setattr(bundle_cuda, "cuda_version", lambda path: 13000)
    with plugged_in(monkeypatch) as device:
        folder = written(tmp_path / "b", name, targets=["cuda"], archs=["80"])
        check(folder, device.device)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODED)
def test_caches_with_a_codec(tmp_path, name):
    check(written(tmp_path / "b", name), tvm.cpu())


@pytest.mark.parametrize("name", CODED)
def test_pages_that_are_timed(name):
    """The numbers that errors are computed from are those of the reference."""
    torch = pytest.importorskip("torch")
    from gpu_check_codes import numbers, random_pages

    codec, rows = CODECS[name.partition("-")[2]], (3, 2, 2, 4)
    pages = random_pages(codec.name, rows, 64, torch.device("cpu"))
    codes, scales = quantized.page_parts(codec, pages.numpy(), rows[1:], 64, 64)
    codes = quantized.codes_of(codec, codes)
    expected = quantized.dequantize(codec, codes, scales.astype(np.float32), 64)
    np.testing.assert_allclose(numbers(codec.name, pages, rows, 64), expected, atol=1e-5)


def test_wrong_kernels_are_found(monkeypatch, tmp_path):
    """A kernel that leaves its output as it was, and one that nothing calls."""
    import gpu_check_caches as caches

    kernels = caches.load(written(tmp_path / "b", "float16"), tvm.cpu())
    caches.check_forwards(kernels, SIZE)
    assert (0, "prefill_ragged") in kernels.never_called()
    with pytest.raises(AssertionError, match="called by nothing: .*prefill_ragged of set 0"):
        caches.check_the_rest(kernels)
    counted = kernels._counted
    for name in ("decode", "prefill", "tree_paged", "rope_append", "copy_pages", "compact_copy"):

        def count(index, each, function, broken=name):
            return counted(index, each, (lambda *_: None) if each == broken else function)

        monkeypatch.setattr(kernels, "_counted", count)
        with pytest.raises(AssertionError):
            caches.check_forwards(kernels, SIZE)


@pytest.mark.slow
def test_a_folder_is_packed_and_run(tmp_path):
    """The program also runs on the CPU; its timed sections need torch."""
    python = "{}.{}".format(*sys.version_info)
    pack = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--pack", str(tmp_path / "folder")]
    pack += ["--device", "cpu", "--tiny", "--python", python]
    done = subprocess.run(pack, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, result = tmp_path / "folder", tmp_path / "result.json"
    command = [sys.executable, str(folder / "gpu_check.py"), "--json", str(result)]
    options = ["--device", "cpu", "--tiny", "--only", "limits", "caches float32", "recurrent"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    found = json.loads(result.read_text())
    assert done.returncode == 0 and not found["failures"], done.stdout + done.stderr
    assert found["limits"]["copy"] > 0
    assert "no failures" in done.stdout
    check_timings(folder, found["limits"])
    if not tvm.cuda(0).exist:
        done = subprocess.run([*command, "--only", "limits"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "there is none: libcuda.so.1" in json.loads(result.read_text())["failures"][0]


def check_timings(folder: Path, limits: dict) -> None:
    """Every section gives records, and right results; what is wrong would be told."""
    import torch
    from gpu_check import NAMES, TIMINGS
    from gpu_check_clock import Clock
    from gpu_check_report import draw, print_table
    from gpu_check_speed import TINY, Speed

    bundles = {name: pkv.load_bundle(folder / "bundles" / name) for name in NAMES}
    absent = []
    speed = Speed(bundles, folder / "stock", Clock(torch.device("cpu")), TINY, absent.append)
    found = {name: list(getattr(speed, name)()) for name in TIMINGS}
    assert all(found.values()) and all("was not packed" in line for line in absent)
    records = [dataclasses.asdict(r) for each in found.values() for r in each]
    assert all(r["seconds"] > 0 for r in records)
    errors = [r["error"] for r in records if r["error"] is not None]
    assert len(errors) == 16 + 9 and max(errors) <= 1  # the last ones are of codecs
    print_table(records, limits)
    draw(records, limits, "title", folder / "plot.svg")
    speed._kernel = lambda *_: lambda *arguments: None
    assert [r.error for r in speed.prefill()] == [float("inf")] * 6


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
