# SPDX-License-Identifier: Apache-2.0
"""Attention to quantized pages on GPUs, emulated, against the reference of what the pages hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tir_kernels import build_kernel
from tir_kernels.spec import RopeSpec

from .. import reference
from ..kernels.test_shared_prefix_kernel import SharedBatch
from ..kernels.test_window_kernels import WindowBatch
from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.quantized_attention_cases import quantized_case
from ..support.cases.kernels.tree_cases import LatentTrees, PagedTrees
from ..support.emulators.cuda_emulator import multiprocessors
from ..support.harness.selections import latin_square, with_slow
from .test_cuda_trees import paged_trees

INT8, FP8, INT4 = "int8", "float8_e4m3fn", "int4"
FEW = 3  # multiprocessors: six blocks, each with several sequences
NONE = RopeSpec(rotary_dim=0)
# Between them: every codec with every type of Q; rows of codes that are no multiple of 16 bytes;
# odd numbers of scales, which begin in the middle of a word; slices of V.
SPECS = {
    "8:2x128-f16-int8-p16": make_spec((8, 2), 128, (F16, INT8)),
    "71:1x80-bf16-fp8-p4": make_spec((71, 1), 80, (BF16, FP8), 4),
    "8:2x128-bf16-int4-p8": make_spec((8, 2), 128, (BF16, INT4), 8),
    "4:2x32-f16-int4-p1": make_spec((4, 2), 32, (F16, INT4), 1),
    "6:2x96-f32-int4-p64": make_spec((6, 2), 96, (F32, INT4), 64),
    "3:1x24-bf16-int8-p2": make_spec((3, 1), 24, (BF16, INT8), 2),
    "2:2x40-f32-fp8-p256": make_spec((2, 2), 40, (F32, FP8), 256),
    "2:1x256-bf16-int4-p16": make_spec((2, 1), 256, (BF16, INT4)),
    "3:1x264-f16-fp8-p32": make_spec((3, 1), 264, (F16, FP8), 32),
    "1:1x512-f16-int8-p16": make_spec((1, 1), 512, (F16, INT8)),
}
SOME_SPECS = {
    name: SPECS[name]
    for name in ("8:2x128-f16-int8-p16", "71:1x80-bf16-fp8-p4", "8:2x128-bf16-int4-p8")
}
MLA = {
    "16x512+64-bf16-int8-p16": make_spec((16, 1), (576, 512), (BF16, INT8), kind="mla", rope=NONE),
    "5x64+16-f16-fp8-p4": make_spec((5, 1), (80, 64), (F16, FP8), 4, kind="mla", rope=NONE),
    "3x40+24-f32-int8-p1": make_spec((3, 1), (64, 40), (F32, INT8), 1, kind="mla", rope=NONE),
    "5x64+32-f16-int4-p4": make_spec((5, 1), (96, 64), (F16, INT4), 4, kind="mla", rope=NONE),
}
DECODES = [(1, n) for n in (0, 1, 33, 0, 64, 131, 0, 500, 0)]
PREFILLS = [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (4, 6), (65, 65), (0, 0)]


# Other heads with codecs and types that the rest has.
REPEATED = (
    "8:2x128-bf16-int4-p8",
    "4:2x32-f16-int4-p1",
    "3:1x24-bf16-int8-p2",
    "2:2x40-f32-fp8-p256",
    "3:1x264-f16-fp8-p32",
    "1:1x512-f16-int8-p16",
)


def parametrize(specs: dict, repeated: tuple[str, ...] = REPEATED):
    slow = [specs[name] for name in repeated if name in specs]
    return pytest.mark.parametrize("spec", with_slow(specs.values(), *slow), ids=specs)


def modes(spec) -> tuple[bool, ...]:
    """Whether K may be rotated inside the kernel: not where it is kept multiplied by a matrix."""
    return (False,) if spec.codec.has_hadamard else (False, True)


@parametrize(SPECS)
@parametrize_seed
@on_gpu_too
def test_decode(spec, seed):
    for inline in modes(spec):
        case = quantized_case(PagedBatch)(spec, DECODES, seed)
        with multiprocessors(FEW):
            case.decode(inline=inline)
        case.verify(inline=inline)


@parametrize(SPECS)
@parametrize_seed
@on_gpu_too
def test_prefill(spec, seed):
    for causal in (True, False):
        case = quantized_case(PagedBatch)(spec, PREFILLS, seed)
        case.prefill(causal)
        case.verify(causal)
    case = quantized_case(PagedBatch)(spec, [(20, 700)], seed)  # split among blocks
    inline = modes(spec)[-1]
    case.prefill(inline=inline)
    case.verify(inline=inline)


@parametrize(SOME_SPECS, ("8:2x128-f16-int8-p16", "71:1x80-bf16-fp8-p4"))
@parametrize_seed
@on_gpu_too
@pytest.mark.slow
def test_windows_and_logits(spec, seed):
    """Sliding layers, windows of sequences with sinks, a soft-cap and ALiBi."""
    slopes = tuple(reference.alibi_slopes(spec.num_qo_heads))
    spec = dataclasses.replace(spec, logit_softcap=1.5, alibi_slopes=slopes)
    inline = modes(spec)[-1]
    case = quantized_case(PagedBatch)(spec, DECODES, seed)
    case.decode(inline=inline, window=40)
    case.verify(inline=inline, window=40)
    case = quantized_case(PagedBatch)(spec, PREFILLS, seed)
    case.prefill(inline=inline, window=7)
    case.verify(inline=inline, window=7)
    gapped = [(1, 9, 2, 6, 6), (1, 1, 0, 0, 4), (1, 40, 0, 0, None), (1, 99, 5, 28, 9)]
    case = quantized_case(WindowBatch)(spec, gapped, seed)
    case.run("decode", case.length_rows(4).reshape(-1), inline)
    case.verify(4, inline)
    case = quantized_case(WindowBatch)(spec, gapped, seed)
    case.run("decode_windowed", case.length_rows(3), inline)
    case.verify(3, inline)
    chunks = [(3, 9, 2, 5, 2), (4, 4, 1, 1, 1), (70, 130, 4, 13, 40), (2, 50, 3, 4, None)]
    for name, num_rows in (("prefill", 4), ("prefill_windowed", 3)):
        case = quantized_case(WindowBatch)(spec, chunks, seed)
        lengths = case.length_rows(num_rows)
        case.run(name, lengths.reshape(-1) if num_rows == 4 else lengths, inline, causal=True)
        case.verify(num_rows, inline)


@latin_square(3, "spec", "window")
@parametrize(SOME_SPECS)
@pytest.mark.parametrize("window", [None, 7])
@parametrize_seed
@on_gpu_too
def test_trees(spec, window, seed):
    inline = modes(spec)[-1]
    case = quantized_case(PagedTrees)(spec, paged_trees(seed), seed)
    case.run(inline=inline, window=window)
    case.verify(inline, window)


@parametrize(
    SOME_SPECS | MLA, ("8:2x128-f16-int8-p16", "71:1x80-bf16-fp8-p4", "5x64+16-f16-fp8-p4")
)
@parametrize_seed
@on_gpu_too
def test_shared_prefix(spec, seed):
    segments = [(-(-n // spec.page_size), rows) for n, rows in ((64, 5), (300, 40), (96, 2))]
    case = quantized_case(SharedBatch)(spec, segments, seed)
    with multiprocessors(FEW):
        case.check()


@parametrize(MLA)
@parametrize_seed
@on_gpu_too
def test_mla(spec, seed):
    lengths = [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (20, 41), (1, 99)]
    case = quantized_case(LatentBatch)(spec, lengths, seed)
    with multiprocessors(2):
        case.run(True)
    case.verify(True)
    case = quantized_case(LatentTrees)(spec, paged_trees(seed), seed)
    case.run()
    case.verify()


@parametrize(SOME_SPECS)
@on_gpu_too
def test_rows_that_are_not_finite(spec):
    """Rows of Q that see them are NaN, and the others are as if they were not there."""
    for plane in (0, 1):
        case = quantized_case(PagedBatch)(spec, [(40, 90), (1, 33)], 0)
        slot = case.page_ids[70 // spec.page_size], 70 % spec.page_size
        case.pages[slot[0], plane, 0, slot[1], 3] = np.nan
        case.quantize()
        case.prefill()
        case.verify()
        is_nan = np.isnan(case.o.numpy().astype(np.float32)).any((1, 2))
        # Row r of the first sequence sees positions up to 50 + r.
        np.testing.assert_array_equal(is_nan, [50 + r >= 70 for r in range(40)] + [False])


def test_what_a_codec_cannot_do():
    case = quantized_case(PagedBatch)(SPECS["8:2x128-bf16-int4-p8"], [(1, 9)], 0)
    with pytest.raises(ValueError, match="Hadamard matrix.*choose 'int8'"):
        case.decode(inline=True)
    with pytest.raises(ValueError, match="needs all columns of V.*choose 'int8'"):
        build_kernel("prefill", make_spec((1, 1), 512, (F16, INT4)))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
