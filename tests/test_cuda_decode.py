# SPDX-License-Identifier: Apache-2.0
"""Attention of one row per sequence on GPUs, emulated, against the reference."""

from __future__ import annotations

import dataclasses

import pytest

from . import reference
from .attention_cases import PagedBatch
from .cuda_cases import BF16, F16, F32, make_spec, parametrize_seed
from .test_window_kernels import WindowBatch

SPECS = {
    "8:2x128-f16-p16": make_spec((8, 2), 128),
    "71:1x80-bf16-p4": make_spec((71, 1), 80, (BF16, BF16), 4),
    "2:2x24-f32-f16-p1": make_spec((2, 2), 24, (F32, F16), 1),
    "1:1x512-f16-p256": make_spec((1, 1), 512, (F16, F16), 256),
}
LENGTHS = [(1, n) for n in (0, 1, 33, 0, 64, 131, 0)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@parametrize_seed
def test_decode(spec, seed):
    case = PagedBatch(spec, LENGTHS, seed)
    case.decode()
    case.verify()


@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
@parametrize_seed
def test_windows(inline, seed):
    spec = dataclasses.replace(
        SPECS["8:2x128-f16-p16"],
        logit_softcap=1.5,
        alibi_slopes=tuple(reference.alibi_slopes(8)),
    )
    case = PagedBatch(spec, LENGTHS, seed)
    case.decode(inline=inline, window=40)
    case.verify(inline=inline, window=40)
    gapped = [(1, 9, 2, 6, 6), (1, 1, 0, 0, 4), (1, 40, 0, 0, None), (1, 99, 5, 28, 9)]
    case = WindowBatch(spec, gapped, seed)
    case.run("decode", case.length_rows(4).reshape(-1), inline)
    case.verify_window(4, inline)
    case = WindowBatch(spec, gapped, seed)
    case.run("decode_windowed", case.length_rows(3), inline)
    case.verify_window(3, inline)
