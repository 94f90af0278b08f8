# SPDX-License-Identifier: Apache-2.0
"""Attention to quantized pages, against the reference over what the codes stand for.

The numbers that codes stand for are exact, so errors are those of the arithmetic, as for pages that
are not quantized. Slots that nobody has written hold random codes and scales, NaN among these.
"""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    DECODE_BATCHES,
    F16,
    F32,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.quantized_cases import CODECS
from ..support.cases.kernels.tree_cases import LatentTrees, PagedTrees
from ..support.harness.selections import latin_square, with_slow
from .test_shared_prefix_kernel import SEGMENTS, SharedBatch
from .test_tree_kernels import paged_trees
from .test_window_kernels import DECODES, PREFILLS, WindowBatch

ALIBI = tuple(np.geomspace(1e-3, 0.25, 6))
# Heads, head dims, page sizes; groups of one, of many and of odd numbers of heads.
SHAPES = {
    "32:8x128-p16": ((32, 8), 128, 16, {}),
    "71:1x64-p256": ((71, 1), 64, 256, {}),
    "5:5x96-p1": ((5, 5), 96, 1, {}),
    "7:1x576-p2": ((7, 1), 576, 2, {}),
    "6:2x256-p4-alibi": ((6, 2), 256, 4, {"alibi_slopes": ALIBI}),
    "4:2x64-p8-cap": ((4, 2), 64, 8, {"logit_softcap": 30.0}),
}
ODD_SHAPES = {"5:1x80-p4": ((5, 1), 80, 4, {}), "2:2x8-p8": ((2, 2), 8, 8, {})}
# A byte of "int4" has a column of either half of a row, and a group has both, or ends in between.
HALVED_SHAPES = {"6:1x32-p4": ((6, 1), 32, 4, {}), "2:2x160-p16": ((2, 2), 160, 16, {})}
parametrize_codecs = pytest.mark.parametrize("codec", CODECS)
parametrize_dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16])


def parametrize_shapes(*slow: str):
    """All shapes; those are slow whose kernels other tests run, with gaps or for other CPUs."""
    values = with_slow(SHAPES.values(), *(SHAPES[name] for name in slow))
    return pytest.mark.parametrize("shape", values, ids=SHAPES)


def spec_of(shape, dtype: str, codec: str, **fields):
    heads, dim, page, more = shape
    return make_spec(heads, dim, (dtype, codec), page, **more, **fields)


@latin_square(8, "shape", "dtype", "codec")
@parametrize_shapes("5:5x96-p1")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("batch", DECODE_BATCHES)
@parametrize_seed
def test_decode(shape, dtype, codec, batch, seed):
    case = PagedBatch(spec_of(shape, dtype, codec), DECODE_BATCHES[batch], seed)
    case.decode()
    case.verify()


@latin_square(8, "shape", "dtype", "codec")
@parametrize_shapes("5:5x96-p1", "4:2x64-p8-cap")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("batch", ["mixed", "tiles"])
@parametrize_seed
def test_prefill(shape, dtype, codec, batch, seed):
    case = PagedBatch(spec_of(shape, dtype, codec), BATCHES[batch], seed)
    case.prefill()
    case.verify()


@latin_square(3, "shape", "codec", "dtype")
@pytest.mark.parametrize("shape", ODD_SHAPES.values(), ids=ODD_SHAPES)
@parametrize_dtypes
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3fn"])
@parametrize_seed
def test_rows_of_any_width(shape, dtype, codec, seed):
    spec = spec_of(shape, dtype, codec)
    case = PagedBatch(spec, DECODE_BATCHES["cuts"], seed)
    case.decode()
    case.verify()
    case = PagedBatch(spec, BATCHES["mixed"], seed)
    case.prefill(causal=False)
    case.verify(causal=False)


@pytest.mark.parametrize("shape", HALVED_SHAPES.values(), ids=HALVED_SHAPES)
@parametrize_seed
def test_groups_of_both_halves(shape, seed):
    spec = spec_of(shape, F32, "int4")
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode()
    case.verify()


@latin_square(6, "cpu", "dtype", "codec")
@parametrize_dtypes
@parametrize_codecs
@parametrize_cpu("x86-64-v4", "x86-64-v3", "x86-64")
@parametrize_seed
def test_other_cpus(dtype, codec, cpu, seed):
    spec = spec_of(SHAPES["5:5x96-p1"], dtype, codec, target=vector_target(cpu))
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(cpu)
    case.verify()
    case = PagedBatch(spec, BATCHES["mixed"], seed)
    case.prefill(cpu=cpu)
    case.verify()


@latin_square(8, "codec", "dtype", "window")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("window", [1, 33, 100])
@parametrize_seed
def test_windows_of_layers(dtype, codec, window, seed):
    spec = spec_of(SHAPES["6:2x256-p4-alibi"], dtype, codec, kind="mha_sliding")
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(window=window)
    case.verify(window=window)
    case = PagedBatch(spec, BATCHES["mixed"], seed)
    case.prefill(window=window)
    case.verify(window=window)


@latin_square(5, "codec", "dtype")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("batch", DECODES)
@parametrize_seed
def test_decode_of_sequences_with_gaps(dtype, codec, batch, seed):
    case = WindowBatch(spec_of(SHAPES["5:5x96-p1"], dtype, codec), DECODES[batch], seed)
    case.run("decode", case.length_rows(4).reshape(-1), False)
    case.verify(4, False)


@latin_square(5, "codec", "dtype")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("batch", PREFILLS)
@parametrize_seed
def test_prefill_of_sequences_with_gaps(dtype, codec, batch, seed):
    case = WindowBatch(spec_of(SHAPES["32:8x128-p16"], dtype, codec), PREFILLS[batch], seed)
    case.run("prefill", case.length_rows(4).reshape(-1), False, causal=True)
    case.verify(4, False)


@latin_square(5, "codec", "dtype")
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("name", ["decode", "prefill"])
@parametrize_seed
def test_windows_as_the_stock_cache_passes_them(dtype, codec, name, seed):
    """`decode_windowed` and `prefill_windowed`: three lengths of each sequence as a matrix."""
    spec = spec_of(SHAPES["4:2x64-p8-cap"], dtype, codec)
    inline = not spec.codec.has_hadamard
    for batch in (DECODES if name == "decode" else PREFILLS).values():
        case = WindowBatch(spec, batch, seed)
        causal = None if name == "decode" else True
        case.run(f"{name}_windowed", case.length_rows(3), inline, causal)
        case.verify(3, inline)


@latin_square(5, "codec", "dtype")
@parametrize_dtypes
@parametrize_codecs
@parametrize_seed
def test_trees(dtype, codec, seed):
    trees = paged_trees(np.random.default_rng(seed))
    case = PagedTrees(spec_of(SHAPES["5:5x96-p1"], dtype, codec), trees, seed)
    case.run()
    case.verify()


@latin_square(6, "shape", "dtype", "codec")
@pytest.mark.parametrize("shape", ["32:8x128-p16", "6:2x256-p4-alibi", "4:2x64-p8-cap"])
@parametrize_dtypes
@parametrize_codecs
@pytest.mark.parametrize("segments", SEGMENTS)
@parametrize_seed
def test_shared_prefixes(shape, dtype, codec, segments, seed):
    SharedBatch(spec_of(SHAPES[shape], dtype, codec), SEGMENTS[segments], seed).check()


@latin_square(6, "dims", "dtype", "codec")
@pytest.mark.parametrize("dims", [(512, 64), (64, 32)], ids=lambda dims: f"{dims[0]}+{dims[1]}")
@parametrize_dtypes
@parametrize_codecs
@parametrize_seed
def test_latent_rows(dims, dtype, codec, seed):
    spec = make_mla_spec(5, dims, (dtype, codec), 4)
    for batch in ("mixed", "tiles"):
        case = LatentBatch(spec, BATCHES[batch], seed)
        case.run()
        case.verify()
    case = LatentTrees(spec, paged_trees(np.random.default_rng(seed)), seed)
    case.run()
    case.verify()
    SharedBatch(spec, SEGMENTS["many"], seed).check()


@latin_square(3, "codec", "dtype")
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3fn"])
@parametrize_dtypes
@parametrize_seed
def test_scales_of_latent_rows_change_within_a_vector(dtype, codec, seed):
    case = LatentBatch(make_mla_spec(3, (40, 24), (dtype, codec), 4), BATCHES["mixed"], seed)
    case.run()
    case.verify()


@latin_square(4, "rotary_dim", "codec", "dtype")
@pytest.mark.parametrize("rotary_dim", [128, 20])
@pytest.mark.parametrize("codec", ["int8", "float8_e4m3fn"])
@parametrize_dtypes
@parametrize_seed
def test_inline_rope(rotary_dim, codec, dtype, seed):
    rope = RopeSpec(rotary_dim=rotary_dim)
    spec = spec_of(SHAPES["32:8x128-p16"], dtype, codec, rope=rope)
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(inline=True)
    case.verify(inline=True)
    case = PagedBatch(spec, BATCHES["mixed"], seed)
    case.prefill(inline=True)
    case.verify(inline=True)
    SharedBatch(spec, SEGMENTS["many"], seed).check(inline=True)


def test_int4_refuses_inline_rope():
    spec = spec_of(SHAPES["32:8x128-p16"], F32, "int4")
    with pytest.raises(ValueError, match="kv_dtype 'int4' keeps K multiplied with a Hadamard"):
        PagedBatch(spec, BATCHES["alone"], 0).prefill(inline=True)
    with pytest.raises(ValueError, match="kv_dtype 'int4' keeps K multiplied with a Hadamard"):
        PagedBatch(spec, DECODE_BATCHES["alone"], 0).decode(inline=True)


@parametrize_codecs
@pytest.mark.parametrize("size", [1e-30, 1e-33, 1e-36])
@parametrize_seed
def test_decode_of_tiny_values(codec, size, seed):
    """Weights times scales of V below 2**-126 * 32639 count as zeros where bytes are multiplied."""
    case = PagedBatch(spec_of(SHAPES["32:8x128-p16"], F32, codec), DECODE_BATCHES["cuts"], seed)
    case.pages[:, 1] *= size
    case.decode()
    o, lse = case.expected()
    # Times the largest code, and summed by a Hadamard matrix.
    left_out = 2.0**-126 * 32639 * 127 * np.sqrt(128)
    np.testing.assert_allclose(case.lse.numpy(), lse, atol=1e-3)
    np.testing.assert_allclose(case.o.numpy(), o, rtol=0, atol=left_out + 1e-3 * np.abs(o).max())


@latin_square(5, "codec", "dtype")
@parametrize_codecs
@parametrize_dtypes
@parametrize_seed
def test_rows_that_are_no_numbers_reach_only_those_that_see_them(codec, dtype, seed):
    """A row of NaN in K or V has the scale NaN: it spoils what sees it, and nothing else."""
    spec = spec_of(SHAPES["32:8x128-p16"], dtype, codec)
    whole = PagedBatch(spec, [(30, 50)], seed)
    whole.prefill()
    for plane in range(2):
        case = PagedBatch(spec, [(30, 50)], seed)
        page = case.page_ids[case.page_indptr[0] + 40 // spec.page_size]
        case.pages[page, plane, :, 40 % spec.page_size] = np.nan
        case.prefill()
        o = case.o.numpy().astype(np.float32)
        assert np.isnan(o[20:]).all()
        np.testing.assert_array_equal(o[:20], whole.o.numpy()[:20].astype(np.float32))


@latin_square(3, "codec", "dtype")
@parametrize_codecs
@parametrize_dtypes
@parametrize_seed
def test_decode_of_rows_that_are_no_numbers(codec, dtype, seed):
    """As above, for a head of one sequence; and a query that is no number spoils its head."""
    spec, lengths = spec_of(SHAPES["32:8x128-p16"], dtype, codec), [(1, 70), (1, 200)]
    whole = PagedBatch(spec, lengths, seed)
    whole.decode()
    for plane in range(2):
        case = PagedBatch(spec, lengths, seed)
        case.pages[case.page_ids[2], plane, 3, 5] = np.nan  # of the first sequence
        case.q[1, 9, 11] = np.nan
        case.decode()
        o, expected = (x.o.numpy().astype(np.float32) for x in (case, whole))
        is_spoilt = np.zeros(o.shape, bool)
        is_spoilt[0, 12:16] = is_spoilt[1, 9] = True
        assert np.isnan(o[is_spoilt]).all()
        np.testing.assert_array_equal(o[~is_spoilt], expected[~is_spoilt])
