# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs that begin before those before them have ended, emulated."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tir_kernels import build_kernel
from tvm_pagedkv.compiler.cuda.source import cuda_source

from .. import reference
from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.emulators.cuda_emulator import (
    SCHEDULES,
    emulated,
    launches,
    mutated,
    overlapping,
    ptx_version,
    schedule,
)

SPEC = make_spec((4, 2), 32)
LENGTHS = [(1, n) for n in (200, 0, 33, 64)]
NAMES = ("transpose_append", "decode")
WAIT = " pagedkv_wait_for_before();"  # of decode, of its merge, and of the append


@functools.cache
def source() -> str:
    return cuda_source({name: build_kernel(name, SPEC) for name in NAMES})


def run(text: str) -> list:
    """Append, decode and append other rows, and return the launches.

    Raises AssertionError where one did not wait for what the one before was to write, or to read.
    """
    append, decode = (emulated(text).get_function(name) for name in NAMES)
    case = PagedBatch(SPEC, LENGTHS, 0)
    page, offset = np.nonzero(~np.isnan(case.pages[:, 0, 0, :, 0]))
    slots = case.tensor((page * SPEC.page_size + offset).astype(np.int32))
    k, v = (case.pages[page, plane, :, offset] for plane in range(2))
    rows = [[case.tensor(sign * x) for x in (k, v)] for sign in (1, -1)]
    pages = case.tensor(np.full_like(case.pages, np.nan))
    arrays = (case.tensor(case.q), pages, *case._table(), case.o, case.lse)
    with launches() as made, overlapping():
        append(pages, *rows[0], slots)
        decode(*arrays, *case.scalars(causal=None, inline=False))
        append(pages, *rows[1], slots)
    case.verify()
    reference.assert_same_bits(pages.numpy()[page, 0, :, offset], -k)
    return made


@pytest.mark.parametrize("chosen", SCHEDULES, ids=str)
def test_kernels_wait_for_those_before_them(chosen):
    with schedule(chosen):
        made = run(source())
    assert [launch.begins_early for launch in made] == [True] * 4


@pytest.mark.parametrize("which", range(3))
def test_no_wait_can_be_left_out(which):
    text = source()
    assert text.count(WAIT) == 3
    with pytest.raises(AssertionError):
        run(mutated(text, WAIT, which=which))


def test_code_for_chips_that_cannot_does_not():
    """Nothing in it waits, so each kernel begins when the one before has ended."""
    with ptx_version(80):
        made = run(mutated(source(), WAIT))
    assert [launch.begins_early for launch in made] == [False] * 4


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
