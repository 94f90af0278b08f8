# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against the reference: odd shapes, mixed types, garbage where nothing lies."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tvm

from tir_kernels import build_kernel
from tir_kernels.spec import RopeSpec, VectorTarget
from tvm_pagedkv.compiler.build import resolve_target, vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    DECODE_BATCHES,
    F16,
    F32,
    REPEATED,
    ROPE_SPECS,
    SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.harness.selections import few_of, latin_square, with_slow

specs = with_slow(SPECS.values(), *REPEATED)
parametrize_specs = pytest.mark.parametrize("spec", specs, ids=SPECS)


@parametrize_specs
@pytest.mark.parametrize("batch", DECODE_BATCHES)
@parametrize_seed
def test_decode(spec, batch, seed):
    case = PagedBatch(spec, DECODE_BATCHES[batch], seed)
    case.decode()
    case.verify()


@pytest.mark.parametrize(
    "spec",
    [
        make_spec((18, 6), 40, page=4),
        make_spec((70, 70), 128, (F32, F16), page=8),
        make_spec((22, 2), 64, (BF16, BF16), alibi_slopes=tuple(np.geomspace(1e-3, 1, 22))),
    ],
    ids=["18:6x40-f32", "70:70x128-f16", "22:2x64-bf16-alibi"],
)
@pytest.mark.parametrize("window", few_of([None, 100], 1))
@parametrize_seed
def test_decode_of_many_pages(spec, window, seed):
    """So many that a task has several KV heads of a sequence, which take turns."""
    case = PagedBatch(spec, [(1, 1500), (1, 3), (1, 64), (1, 330)], seed)
    case.decode(window=window)
    case.verify(window=window)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec((6, 2), 80, (BF16, BF16), page=4),
        make_spec((11, 1), 96, (BF16, BF16), page=2, alibi_slopes=tuple(np.geomspace(1e-3, 1, 11))),
        make_spec((4, 2), 64, (BF16, BF16), page=1, logit_softcap=30.0),
        make_spec((4, 2), 48, (BF16, BF16), page=32),
        make_spec((4, 2), 72, (BF16, BF16)),
    ],
    ids=["80-page4", "96-page2-alibi", "64-page1-cap", "48-page32", "72-page16"],
)
@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
@parametrize_seed
def test_decode_of_bfloat16_pairs(spec, inline, seed):
    """Odd numbers of positions, and rows that end in half a vector of pairs, or in less."""
    case = PagedBatch(spec, [(1, n) for n in (1, 2, 3, 15, 17, 63, 65, 129, 1001)], seed)
    case.decode(inline=inline)
    case.verify(inline=inline)


@parametrize_specs
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("batch", BATCHES)
@parametrize_seed
def test_prefill(spec, batch, causal, seed):
    case = PagedBatch(spec, BATCHES[batch], seed)
    case.prefill(causal)
    case.verify(causal)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec((8, 2), (192, 128)),
        make_spec((4, 4), (64, 80), (F16, F16)),
        make_spec((6, 2), (24, 104), (BF16, BF16)),
        make_spec((71, 1), (576, 512), (BF16, BF16)),
    ],
    ids=["8:2x192/128-f32", "4:4x64/80-f16", "6:2x24/104-bf16", "71:1x576/512-bf16"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("batch", BATCHES)
@parametrize_seed
def test_prefill_ragged(spec, batch, causal, seed):
    case = RaggedBatch(spec, BATCHES[batch], seed)
    case.prefill(causal)
    case.verify(causal)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=["f32", "bf16"])
@parametrize_seed
def test_rows_that_see_nothing(dtypes, seed):
    """Most rows of a tile see no column, those of whole groups of register tiles among them."""
    case = RaggedBatch(make_spec((8, 2), 64, dtypes), [(100, 40), (150, 10), (40, 0)], seed)
    case.prefill()
    case.verify()
    assert np.isneginf(case.lse.numpy()).any()


@pytest.mark.parametrize("spec", ROPE_SPECS.values(), ids=ROPE_SPECS)
@parametrize_seed
def test_inline_rope(spec, seed):
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(inline=True)
    case.verify(inline=True)
    for kind in (PagedBatch, RaggedBatch):
        case = kind(spec, [(3, 70), (2, 2), (65, 90)], seed)
        case.prefill(inline=True)
        case.verify(inline=True)


@parametrize_seed
def test_inline_longrope_chooses_factors_by_sequence(seed):
    scaling = (
        ("long_factor", tuple(1.0 + i for i in range(16))),
        ("original_max_position_embeddings", 64),
        ("max_position_embeddings", 256),
        ("rope_type", "longrope"),
        ("short_factor", tuple(1.0 + 0.1 * i for i in range(16))),
    )
    spec = make_spec((4, 2), 32, rope=RopeSpec(1e4, 1.0, 32, scaling))
    case = PagedBatch(spec, [(1, 9), (1, 64), (1, 31)], seed)  # the second is at 7 + 64 > 64
    case.decode(inline=True)
    case.verify(inline=True)
    case = PagedBatch(spec, [(64, 64), (3, 70), (2, 2)], seed)
    case.prefill(inline=True)
    case.verify(inline=True)


@pytest.mark.parametrize("name", few_of(["decode", "prefill", "prefill_ragged"], 1))
def test_another_rotation_than_the_baked_one_is_refused(name):
    spec = make_spec((2, 1), 32)
    case = (RaggedBatch if name == "prefill_ragged" else PagedBatch)(spec, [(1, 4)], 0)
    mode, scale, theta, sm_scale = case.scalars(causal=None, inline=True)
    case.scalars = lambda causal, inline: (
        ([] if causal is None else [1]) + [mode, scale, 2 * theta, sm_scale]
    )
    with pytest.raises(ValueError, match="rope_theta"):
        case.decode() if name == "decode" else case.prefill()


@latin_square(3, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", "x86-64-v4", "x86-64")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@parametrize_seed
def test_other_instruction_sets(cpu, dtype, seed):
    target = vector_target(cpu)
    spec = make_spec((7, 1), 104, (F32, dtype), 8, target=target)
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(cpu)
    case.verify()
    case = PagedBatch(spec, BATCHES["tiles"], seed)
    case.prefill(True, cpu)
    case.verify()


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
def test_narrow_vectors_with_any_group(group_size):
    """Four lanes are fewer than the sums that wider vectors gather at once."""
    spec = make_spec((group_size, 1), 32, (F32, F32), 4, target=vector_target("x86-64"))
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], 5)
    case.decode("x86-64")
    case.verify()


@pytest.mark.parametrize("name", ["decode", "prefill", "prefill_ragged"])
def test_float16_needs_conversion_in_hardware(name):
    spec = make_spec((2, 1), 32, (F16, F16), target=VectorTarget(4, 16, has_f16_convert=False))
    with pytest.raises(ValueError, match="float16"):
        build_kernel(name, spec)


def test_a_wrong_shape_is_told_by_the_name_of_its_argument():
    case = PagedBatch(make_spec((4, 2), 32), [(1, 5)], 0)
    case.q = case.q[:, :3]
    with pytest.raises(ValueError, match=r"q\.shape\[1\]"):
        case.prefill()


@parametrize_seed
def test_self_and_cross_merge_to_the_whole(seed):
    """The flow of the stock runtime: this step's rows, the past, and their merge."""
    spec = make_spec((8, 2), 64, (F16, F16))
    whole = PagedBatch(spec, [(3, 40), (70, 70), (1, 17)], seed)
    past_lens = [kv - n for n, kv in zip(whole.num_rows, whole.kv_lens, strict=True)]
    past = PagedBatch(spec, list(zip(whole.num_rows, past_lens, strict=True)), seed)
    now = RaggedBatch(spec, [(n, n) for n in whole.num_rows], seed)
    now.q = past.q = whole.q
    past.pages = whole.pages
    for b, length in enumerate(past_lens):
        first, end = whole.page_indptr[b : b + 2]
        page_ids = whole.page_ids[first:end]
        slots = reference.sequence_slots(page_ids, whole.last_page_len[b], spec.page_size)
        k, v = reference.gather_slots(whole.pages, slots)
        rows = slice(now.kv_indptr[b], now.kv_indptr[b + 1])
        now.k[rows], now.v[rows] = k[length:], v[length:]
        first, end = past.page_indptr[b : b + 2]
        past.page_ids[first:end] = page_ids[: end - first]
    past.prefill(causal=False)
    now.prefill(causal=True)
    states = [x.numpy() for x in (now.o, now.lse, past.o, past.lse)]
    merged = reference.merge(*states)
    whole.prefill()
    whole.verify()
    whole.compare(merged, F16)


@parametrize_seed
def test_kernels_share_a_module_and_a_library(seed, tmp_path):
    """Their LLVM helpers have the same names; a library holds compiled code only."""
    specs = [make_spec((2, 1), 32, (BF16, BF16), page) for page in (4, 16)]
    functions = {f"prefill_{spec.page_size}": build_kernel("prefill", spec) for spec in specs}
    module = tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})
    path = tmp_path / "kernels.so"
    tvm.tirx.build(module, target=resolve_target("native")).export_library(str(path))
    library = tvm.runtime.load_module(str(path))
    for spec in specs:
        case = PagedBatch(spec, [(3, 20), (1, 1)], seed)
        arrays = (case.page_indptr, case.page_ids, case.last_page_len, case.k_offsets)
        library[f"prefill_{spec.page_size}"](
            *(tvm.runtime.tensor(x) for x in (case.q, case.query_indptr, case.pages, *arrays)),
            tvm.runtime.tensor(case.q_positions),
            case.o,
            case.lse,
            *case.scalars(causal=True, inline=False),
        )
        case.verify()


@parametrize_seed
def test_a_sequence_does_not_depend_on_its_batch(seed):
    spec = SPECS["32:8x128-f32-p16"]
    batch = PagedBatch(spec, DECODE_BATCHES["cuts"], seed)
    batch.decode()
    for b in (0, 2):
        alone = PagedBatch(spec, [(1, batch.kv_lens[b])], seed)
        alone.q, alone.pages = batch.q[b : b + 1], batch.pages
        first, end = batch.page_indptr[b : b + 2]
        alone.page_ids = batch.page_ids[first:end]
        alone.decode()
        np.testing.assert_allclose(alone.o.numpy()[0], batch.o.numpy()[b], atol=2e-6)


@parametrize_seed
def test_scores_of_any_size(seed):
    """Large scores neither overflow nor vanish, whatever the order in which they come."""
    spec = make_spec((4, 2), 64)
    for scale in (30.0, 1e-3):
        case = PagedBatch(spec, [(1, 300), (1, 70)], seed)
        case.q = case.q * np.float32(scale)
        case.decode()
        # exp2 is good to 3e-6 of a weight, its argument to an ulp of a score of some hundreds.
        case.compare(_expected(case), F32 if scale < 1 else F16)


@pytest.mark.parametrize("dtypes", [(F32, F16), (BF16, BF16)], ids="-".join)
@parametrize_seed
def test_logit_softcap(dtypes, seed):
    """Logits well below the cap, around it and far beyond."""
    spec = make_spec((6, 2), 64, dtypes, logit_softcap=2.5)
    for scale in (0.2, 3.0, 40.0):
        case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
        case.q = (case.q * np.float32(scale)).astype(spec.dtype)
        case.decode()
        case.verify()
        for kind in (PagedBatch, RaggedBatch):
            case = kind(spec, [(3, 70), (2, 2), (65, 90)], seed)
            case.q = (case.q * np.float32(scale)).astype(spec.dtype)
            case.prefill()
            case.verify()


def test_softcap_is_accurate_for_every_size_of_logits():
    """The lse of a row that sees one column is its logit."""
    cap, logits = 50.0, np.geomspace(1e-3, 2e3, 200)
    logits = np.concatenate([-logits, [0.0], logits]).astype(np.float32)
    case = PagedBatch(make_spec((1, 1), 8, logit_softcap=cap), [(1, 1)] * len(logits), 0)
    case.q[...], case.sm_scale = 0, 1.0
    case.q[:, 0, 0], case.pages[:, 0, :, 0] = logits, 1
    case.decode()
    expected = cap * np.tanh(logits.astype(np.float64) / cap) * np.log2(np.e)
    np.testing.assert_allclose(case.lse.numpy()[:, 0], expected, rtol=1e-6)


def _expected(case):
    table = (case.page_indptr, case.page_ids, case.last_page_len)
    return reference.paged_attention(case.q, case.query_indptr, case.pages, *table, case.sm_scale)


@pytest.mark.skipif("PAGEDKV_TEST_THREADS" in os.environ, reason="runs inside itself")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_any_number_of_threads(threads):
    """The pool cannot be resized once it runs, so this starts another interpreter."""
    environment = dict(os.environ, TVM_NUM_THREADS=str(threads), PAGEDKV_TEST_THREADS="1")
    names = "test_decode", "test_decode_of_many_pages", "test_prefill"
    selected = [f"{__file__}::{name}" for name in names]
    some = "5:1x80 or 2:2x8 or 18:6x40"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", some, *selected]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
