# SPDX-License-Identifier: Apache-2.0
"""MLA kernels against the reference: any split of a row, any page, rows of one and many."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tir_kernels import build_kernel, kernel_names
from tir_kernels.spec import VectorTarget

from .. import reference
from ..support.cases.kernels.attention_cases import compiled, normal, tensor
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, parametrize_cpu
from ..support.cases.kernels.mla_cases import LatentBatch, make_spec
from ..support.harness.selections import latin_square, with_slow

# Between them: one head and many, counts that fill no whole register tile, every split and page
# size, every type of rows with every type of pages.
SPECS = {
    "16x512+64-f32-p16": make_spec(16, (512, 64)),
    "128x512+64-bf16-p64": make_spec(128, (512, 64), (BF16, BF16), 64),
    "16x512+64-bf16-p16": make_spec(16, (512, 64), (BF16, BF16)),
    "3x24+8-f32-p1": make_spec(3, (24, 8), page=1),
    "25x72+0-f16-f32-p4": make_spec(25, (72, 0), (F16, F32), 4),
    "1x8+8-f32-f16-p2": make_spec(1, (8, 8), (F32, F16), 2),
    "5x40+24-bf16-p8": make_spec(5, (40, 24), (BF16, BF16), 8),
    "40x96+40-bf16-f16-p256": make_spec(40, (96, 40), (BF16, F16), 256),
    "7x56+16-f32-bf16-p32": make_spec(7, (56, 16), (F32, BF16), 32),
    "200x128+32-f16-p16": make_spec(200, (128, 32), (F16, F16)),
}
BATCHES = {
    "alone": [(1, 5)],
    "one-row": [(1, 0), (1, 1), (1, 33), (1, 0), (1, 64), (1, 128), (1, 300), (1, 0)],
    "long": [(1, 1700)],
    "mixed": [(0, 0), (1, 1), (3, 70), (0, 33), (2, 0), (4, 6), (0, 0)],
    "tiles": [(40, 300), (1, 64), (65, 65), (1, 257)],
}
# The largest one takes as long as all others; the last ones have types and splits that others have.
SLOW = ("128x512+64-bf16-p64", "7x56+16-f32-bf16-p32", "200x128+32-f16-p16")
specs = with_slow(SPECS.values(), *(SPECS[name] for name in SLOW))
parametrize_specs = pytest.mark.parametrize("spec", specs, ids=SPECS)
parametrize_seed = pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")


@parametrize_specs
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("batch", BATCHES)
@parametrize_seed
def test_mla_prefill(spec, batch, causal, seed):
    case = LatentBatch(spec, BATCHES[batch], seed)
    case.run(causal)
    case.verify(causal)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_heads", [5, 32])
@pytest.mark.parametrize("kv_len", [65, 66, 67, 68])
def test_nan_behind_a_row(num_heads, dtype, kv_len):
    """Of two rows the first does not see the last position, where the latent row is NaN."""
    spec = make_spec(num_heads, (128, 32), (dtype, dtype))
    case = LatentBatch(spec, [(2, kv_len)], 0)
    slot = case.slots(0)[-1]
    case.pages[slot // spec.page_size, slot % spec.page_size] = np.nan
    case.run()
    o = case.o.numpy().astype("float32")
    assert np.isfinite(o[0]).all() and np.isnan(o[1]).all()


@latin_square(3, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", "x86-64-v4", "x86-64")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@parametrize_seed
def test_other_instruction_sets(cpu, dtype, seed):
    spec = make_spec(7, (104, 24), (F32, dtype), 8, cpu=cpu)
    for batch in ("one-row", "tiles"):
        case = LatentBatch(spec, BATCHES[batch], seed)
        case.run(True, cpu)
        case.verify()


def test_float16_needs_conversion_in_hardware():
    spec = make_spec(2, (32, 8), (F16, F16))
    spec = type(spec)(**{**vars(spec), "target": VectorTarget(4, 16, has_f16_convert=False)})
    with pytest.raises(ValueError, match="float16"):
        build_kernel("mla_prefill", spec)


@pytest.mark.skipif("PAGEDKV_TEST_THREADS" in os.environ, reason="runs inside itself")
@pytest.mark.slow  # test_attention_kernels.py has a short one
@pytest.mark.parametrize("threads", [1, 5])
def test_any_number_of_threads(threads):
    """The pool cannot be resized once it runs, so this starts another interpreter."""
    environment = dict(os.environ, TVM_NUM_THREADS=str(threads), PAGEDKV_TEST_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "128x512 or 3x24"]
    command.append(f"{__file__}::test_mla_prefill")
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.parametrize(
    "spec",
    [make_spec(6, (64, 16), (d, d), original=(40, 32)) for d in (F32, BF16)],
    ids=[F32, BF16],
)
@parametrize_seed
def test_absorbed_is_what_non_absorbed_is(spec, seed):
    """The past absorbed, this step's rows not, and their merge: the whole, either way."""
    lengths = [(3, 40), (70, 70), (1, 17)]
    rng = np.random.default_rng(seed)
    w_k = rng.standard_normal((6, 24, 64)) / 8
    w_v = rng.standard_normal((6, 32, 64)) / 8
    case = LatentBatch(spec, [(n, kv - n) for n, kv in lengths], seed)
    q = rng.standard_normal((74, 6, 40))
    step = normal(rng, (74, 80), spec.dtype)
    case.q = reference.mla_absorb(q, w_k).astype(spec.dtype)
    case.sm_scale = 40**-0.5
    case.run(causal=False)
    past_o = np.einsum("thc,hdc->thd", np.asarray(case.o.numpy(), np.float64), w_v)
    k, v = (x.astype(spec.dtype) for x in reference.mla_expand(step, w_k, w_v))
    o = tensor(np.full((74, 6, 32), np.nan, spec.dtype))
    lse = tensor(np.full((74, 6), np.nan, np.float32))
    query_indptr, zeros = tensor(case.query_indptr), np.zeros(74, np.int32)
    compiled("prefill_ragged", spec)(
        tensor(q.astype(spec.dtype)), query_indptr, tensor(k), tensor(v), query_indptr,
        tensor(zeros),
        tensor(zeros[:3]), o, lse, 1, 0, 1.0, 1e4, case.sm_scale,
    )  # fmt: skip
    compiled("merge", spec)(o, lse, tensor(past_o.astype(spec.dtype)), case.lse)
    for b, (n, kv) in enumerate(lengths):
        slots, rows = case.slots(b), slice(*case.query_indptr[b : b + 2])
        page = spec.page_size
        latent = np.concatenate([case.pages[slots // page, slots % page], step[rows]])
        k, v = reference.mla_expand(latent, w_k, w_v)
        mask = reference.causal_mask(n, kv)
        want = reference.attention(q[rows], k, v, mask, case.sm_scale)
        found = o.numpy()[rows], lse.numpy()[rows]
        reference.assert_state_close(found, want, spec.dtype, rounds_qk=True)


# --- rows ---------------------------------------------------------------------------------------


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bits = [np.ascontiguousarray(x).view(np.uint8) for x in (actual, expected)]
    np.testing.assert_array_equal(*bits)


@parametrize_specs
@pytest.mark.parametrize("num_rows", [0, 1, 37, 700])
@parametrize_seed
def test_rows_move_bit_for_bit(spec, num_rows, seed):
    """transpose_append_mla, debug_get_kv_mla, copies of pages and compact_copy."""
    rng = np.random.default_rng(seed)
    page, width = spec.page_size, spec.qk_head_dim
    num_pages = -(-num_rows // page) + 3
    rows = normal(rng, (num_rows, width), spec.dtype)
    slots = rng.permutation(num_pages * page)[:num_rows].astype(np.int32)
    slots[1::5] = -1
    expected = np.full((num_pages, page, width), np.nan, spec.kv_dtype)
    pages = tensor(expected)
    flat = expected.reshape(-1, width)
    flat[slots[slots >= 0]] = rows[slots >= 0].astype(spec.kv_dtype)
    compiled("transpose_append_mla", spec)(pages, tensor(rows), tensor(slots))
    same_bits(pages.numpy(), expected)

    want = np.full((3, num_rows, width), np.nan, spec.kv_dtype)
    actual = tensor(want)
    want[1][slots >= 0] = flat[slots[slots >= 0]]
    compiled("debug_get_kv_mla", spec)(pages, tensor(slots), actual, 1)
    same_bits(actual.numpy(), want)

    for length in sorted({0, 1, page // 2, page}):
        compiled("copy_single_page", spec)(pages, 2, 1, length)
        expected[1, :length] = expected[2, :length]
        same_bits(pages.numpy(), expected)

    compiled("copy_pages", spec)(pages, tensor(np.array([[2], [0], [page]], np.int32)))
    expected[0] = expected[2]
    same_bits(pages.numpy(), expected)

    copies = rng.integers(0, num_pages * page, (2, num_rows)).astype(np.int32)  # chains, repeats
    compiled("compact_copy", spec)(
        pages, tensor(np.array([0, num_rows], np.int32)), tensor(copies), 1
    )
    for source, destination in copies.T:
        flat[destination] = flat[source]
    same_bits(pages.numpy(), expected)


def test_kernels_of_a_kind():
    spec = make_spec(4, (32, 8))
    assert "prefill_ragged" not in kernel_names(spec)
    assert "prefill_ragged" in kernel_names(make_spec(4, (32, 8), original=(24, 16)))
    assert "decode" not in kernel_names(spec)
    assert "mla_prefill" not in kernel_names(type(spec)(4, 2, 32, 32))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
