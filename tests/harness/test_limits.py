# SPDX-License-Identifier: Apache-2.0
"""The peak of the tiles of AMX, measured on their model: that it runs and counts, not its speed."""

from __future__ import annotations

import pytest

from tir_kernels.cpu.isa.matrices import amx
from tvm_pagedkv.compiler import cpu_classes
from tvm_pagedkv.measure import limits
from tvm_pagedkv.threads import num_threads

from ..support.emulators import tile_model


@pytest.mark.skipif(not tile_model.runs_here(), reason="no AVX-512 with bfloat16")
def test_peak_of_tiles(monkeypatch):
    traits = cpu_classes._traits
    monkeypatch.setattr(cpu_classes, "_traits", lambda f: traits(f) | {"has_amx": True})
    monkeypatch.setattr(limits, "TILE_STEPS", 10)
    monkeypatch.setattr(limits, "READ_BYTES", 2**20)
    with tile_model.tile_model():
        measured = limits.Limits()
        assert measured.peak("bfloat16") > 0
        done = tile_model.counts()
        assert done.dots == 5 * num_threads() * 10 * amx.SUMS
        assert measured.tile_flops == num_threads() * 10 * amx.SUMS * 2 * 16 * 16 * 32
        measured.peak("float32")
        assert tile_model.counts().dots == done.dots


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
