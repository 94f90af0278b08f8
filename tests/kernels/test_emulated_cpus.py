# SPDX-License-Identifier: Apache-2.0
"""Kernels of every kind, run on emulated CPUs, against the reference.

An illegal instruction ends the emulated process, and so the test. qemu-user has no AVX-512.
"""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.targets import require_runnable, resolve_target

from .. import reference
from ..support.cases.kernels import page_kernel_cases, quantized_cases
from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.kernel_specs import BATCHES, BF16, DECODE_BATCHES, F16, F32, make_spec
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.tree_cases import PagedTrees, chain, random_parents
from ..support.emulators.emulated_cpus import CPUS, kernels_on
from ..support.harness.selections import latin_square
from .test_shared_prefix_kernel import SEGMENTS, SharedBatch

DTYPES = {"f32": (F32, F32), "bf16": (BF16, BF16), "f16": (F16, F16), "f16-f32": (F16, F32)}
SEED = 0


@pytest.fixture(params=CPUS.values(), ids=CPUS)
def cpu(request):
    """An emulated CPU that runs the kernels of the test."""
    with kernels_on(request.param):
        yield request.param


parametrize_dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)


@latin_square(4, "cpu", "dtypes")
@parametrize_dtypes
def test_rows_that_move(cpu, dtypes):
    spec = make_spec((5, 1), 72, dtypes, 4, target=cpu.traits, rope=RopeSpec(rotary_dim=40))
    page_kernel_cases.check_transpose_append(spec, 37, SEED)
    rope = reference.Rope(rotary_dim=40)
    qkv, positions, _ = page_kernel_cases.fused(np.random.default_rng(SEED), spec, 37)
    page_kernel_cases.check_rope_append(spec, rope, qkv, positions, [30, 0, 7])
    page_kernel_cases.check_merge(spec, 37, SEED)
    page_kernel_cases.check_copy_single_page(spec, SEED)
    page_kernel_cases.check_copy_pages(spec, 5, SEED)
    page_kernel_cases.check_compact_copy(spec, 5, SEED)
    page_kernel_cases.check_debug_get_kv(spec, 37, SEED)


@latin_square(4, "cpu", "dtypes")
@parametrize_dtypes
def test_attention(cpu, dtypes):
    spec = make_spec((6, 2), 104, dtypes, 8, target=cpu.traits)
    for lengths in (DECODE_BATCHES["mixed"], [(1, 700)]):
        case = PagedBatch(spec, lengths, SEED)
        case.decode()
        case.verify()
    for lengths in (BATCHES["mixed"], [(65, 130), (1, 64)]):
        case = PagedBatch(spec, lengths, SEED)
        case.prefill(causal=True)
        case.verify(causal=True)


@latin_square(4, "cpu", "dtypes")
@parametrize_dtypes
def test_trees_and_windows(cpu, dtypes):
    rng = np.random.default_rng(SEED)
    spec = make_spec((4, 2), 64, dtypes, target=cpu.traits)
    trees = [(7, 70, random_parents(rng, 7)), (0, 20, []), (3, 5, chain(3))]
    case = PagedTrees(spec, trees, SEED)
    case.run(inline=True)
    case.verify(inline=True)
    sliding = make_spec((4, 2), 64, dtypes, target=cpu.traits, kind="mha_sliding")
    case = PagedBatch(sliding, DECODE_BATCHES["mixed"], SEED)
    case.decode(window=33)
    case.verify(window=33)


@latin_square(4, "cpu", "dtypes")
@parametrize_dtypes
def test_latent_rows(cpu, dtypes):
    spec = replace(make_mla_spec(5, (40, 24), dtypes, 8), target=cpu.traits)
    case = LatentBatch(spec, [(9, 70)], SEED)
    case.run(True)
    case.verify(True)


@latin_square(4, "cpu", "dtypes")
@parametrize_dtypes
def test_shared_prefixes(cpu, dtypes):
    spec = make_spec((6, 2), 72, dtypes, 8, target=cpu.traits)
    SharedBatch(spec, SEGMENTS["many"], SEED).check()


@latin_square(4, "cpu", "codec", "dtype")
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("codec", ["int8", "int4", "float8_e4m3fn", "int5"])
def test_quantized_pages(cpu, codec, dtype):
    spec = make_spec((5, 5), 96, (dtype, codec), 4, target=cpu.traits)
    quantized_cases.check_transpose_append(spec, 40, SEED)
    quantized_cases.check_rope_append(spec, 40, 1, SEED)
    quantized_cases.check_debug_get_kv(spec, 40, SEED)
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], SEED)
    case.decode()
    case.verify()
    case = PagedBatch(spec, BATCHES["mixed"], SEED)
    case.prefill()
    case.verify()


@pytest.mark.parametrize("kv_dtype", [BF16, "int8", "int4"])
def test_pairs_of_bfloat16(kv_dtype):
    """Rows of bfloat16 where the CPU multiplies pairs of them, over whole vectors of pairs."""
    cpu = CPUS["AArch64+bf16"]
    with kernels_on(cpu):
        assert cpu.traits.has_bfdot
        spec = make_spec((4, 2), 64, (BF16, kv_dtype), target=cpu.traits)
        case = PagedBatch(spec, DECODE_BATCHES["mixed"], SEED)
        case.decode()
        case.verify()
        case = PagedBatch(spec, BATCHES["mixed"], SEED)
        case.prefill()
        case.verify()


FOREIGN = [name for name, cpu in CPUS.items() if cpu.architecture != platform.machine()]


@pytest.mark.parametrize("name", FOREIGN)
def test_code_for_another_architecture_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot run here: compiled for"):
        require_runnable(resolve_target(CPUS[name].target))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
