# SPDX-License-Identifier: Apache-2.0
"""The path that `pytest -m gpu` takes, on an emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.emulators import gpu
from ..support.emulators.cuda_emulator import library
from ..support.emulators.cuda_emulator.translate import translate

SPEC = make_spec((4, 2), 32)


@pytest.fixture
def compiles_for_emulated_device(monkeypatch):
    def compile_library(source: str, path: Path, archs) -> None:
        library.build(translate(source, on_device=True), path)

    monkeypatch.setattr(gpu, "compile_library", compile_library)
    monkeypatch.setattr(gpu, "compiler_version", lambda: ("emulator", library.runtime_path().stem))


@pytest.mark.slow
def test_cases_run_on_a_device(device, compiles_for_emulated_device):
    """Kernels get copies on the device, and the case gets the results."""
    case = PagedBatch(SPEC, [(3, 70), (0, 33), (4, 6)], 0)
    with gpu.kernels_on_gpu(), device.counted() as calls:
        case.prefill()
    print(dict(calls))
    assert sum(calls.values()) > 0
    case.verify()


@pytest.mark.slow
def test_results_come_from_the_device(device, compiles_for_emulated_device, monkeypatch):
    """A kernel that is not launched leaves the outputs as they were, and the case fails."""
    monkeypatch.setattr(gpu.KernelsOnGpu, "get_function", lambda self, name: lambda *_: None)
    case = PagedBatch(SPEC, [(3, 70)], 0)
    with gpu.kernels_on_gpu():
        case.prefill()
    with pytest.raises(AssertionError):
        case.verify()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
