# SPDX-License-Identifier: Apache-2.0
"""The mask of docs/writing-kernels.md, which no algorithm knows, on CPUs and the emulator."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tir_kernels.catalogue import Kernel
from tir_kernels.cpu.attention.mla import mla_prefill as cpu_mla_prefill
from tir_kernels.gpu.attention.prefill import mla_prefill as cuda_mla_prefill

from .. import reference
from ..docs.documents import ROOT, blocks_of
from ..support.cases.kernels import kernel_specs, mla_cases
from ..support.cases.kernels.attention_cases import PagedBatch, altered_kernels
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.cases.kernels.mla_cases import LatentBatch

BATCH = [(1, 70), (5, 5), (3, 40), (70, 150), (2, 129)]
SPECS = {
    "cpu-float32": kernel_specs.make_spec((4, 2), 64),
    "cpu-bfloat16": kernel_specs.make_spec((4, 2), 64, ("bfloat16", "bfloat16")),
    "cuda-float16": make_spec((4, 2), 64),
    "cuda-float32": make_spec((4, 2), 64, ("float32", "float32")),
}
LATENT_SPECS = {
    "cpu-float32": mla_cases.make_spec(3, (32, 16)),
    "cpu-bfloat16": mla_cases.make_spec(3, (32, 16), ("bfloat16", "bfloat16")),
    "cuda-float16": make_spec((3, 1), (48, 32), kind="mla"),
}


@pytest.fixture(scope="module")
def page():
    """The names that the page's block about masks defines."""
    blocks = blocks_of(ROOT / "docs/writing-kernels.md")
    block = next(b for b in blocks if b.language == "python" and "CausalMask" in b.code)
    assert len([line for line in block.code.splitlines() if line.strip()]) < 30
    names: dict = {}
    exec(compile(block.code, block.where, "exec"), names)
    return names


def every_second(num_rows: int, kv_len: int, *_) -> np.ndarray:
    row, column = kv_len - num_rows + np.arange(num_rows)[:, None], np.arange(kv_len)[None, :]
    return (column <= row) & ((row - column) % 2 == 0)


def build_instead(monkeypatch, name: str, build) -> None:
    """Let `build` make the kernel `name`."""
    original = Kernel.build

    def build_one(kernel: Kernel, spec):
        return build(spec) if kernel.name == name else original(kernel, spec)

    monkeypatch.setattr(Kernel, "build", build_one)


@pytest.mark.parametrize("name", SPECS)
def test_rows_see_every_second_column(name, page, monkeypatch):
    build = functools.partial(page["prefill_of_every_second"], on_gpu=name.startswith("cuda"))
    build_instead(monkeypatch, "prefill", build)
    monkeypatch.setattr(reference.batch, "causal_mask", every_second)
    print("seed 0")
    with altered_kernels():
        case = PagedBatch(SPECS[name], BATCH, 0)
        case.prefill()
        case.verify()
        with pytest.raises(AssertionError):
            monkeypatch.undo()  # the reference without the mask
            case.verify()


@pytest.mark.parametrize("name", LATENT_SPECS)
def test_latent_rows_see_every_second_column(name, page, monkeypatch):
    build = cuda_mla_prefill if name.startswith("cuda") else cpu_mla_prefill
    build_instead(monkeypatch, "mla_prefill", functools.partial(build, mask=page["EverySecond"]))
    monkeypatch.setattr(reference.batch, "causal_mask", every_second)
    print("seed 0")
    with altered_kernels():
        case = LatentBatch(LATENT_SPECS[name], BATCH, 0)
        hide_every_second_of_one_row(case)
        case.run()
        case.verify()
        with pytest.raises(AssertionError):
            monkeypatch.undo()  # the reference without the mask
            case.verify()


def hide_every_second_of_one_row(case: LatentBatch) -> None:
    """Put NaN into the columns that the only row of the first sequence does not see."""
    slots = case.slots(0)[-2::-2]
    case.pages[slots // case.spec.page_size, slots % case.spec.page_size] = np.nan


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
