# SPDX-License-Identifier: Apache-2.0
"""Pages whose rows of K and of V have codecs of their own: all kernels that move or read them."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv.compiler.build import vector_target
from tvm_pagedkv.compiler.cuda import cuda_spec

from ..support.cases.kernels.attention_cases import PagedBatch
from ..support.cases.kernels.kernel_specs import BATCHES, BF16, DECODE_BATCHES, F16, F32, make_spec
from ..support.cases.kernels.quantized_cases import (
    check_copies,
    check_debug_get_kv,
    check_rope_append,
    check_transpose_append,
)
from ..support.cases.kernels.tree_cases import PagedTrees
from ..support.harness.selections import every_nth
from .test_shared_prefix_kernel import SEGMENTS, SharedBatch
from .test_tree_kernels import paged_trees
from .test_window_kernels import DECODES, WindowBatch

# Integers for both, which decode multiplies; and a codec of other numbers, where it does not.
SPECS = {
    "int8,int4": make_spec((32, 8), 128, (F16, "int8,int4"), 16),
    "int4,int8": make_spec((4, 2), 64, (BF16, "int4,int8"), 8),
    "int4,float8": make_spec((5, 5), 96, (F32, "int4,float8_e4m3fn"), 2),
    "float8,int8": make_spec((6, 2), 256, (BF16, "float8_e4m3fn,int8"), 4),
    "int5,int4": make_spec((6, 2), 64, (F16, "int5,int4"), 16),
    "int8,int5": make_spec((5, 5), 96, (F32, "int8,int5"), 4),
}
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@parametrize_specs
def test_rows_are_quantized_moved_and_read(spec):
    check_transpose_append(spec, 150, 0)
    check_rope_append(spec, 150, 1, 0)
    check_copies(spec, 0)
    check_debug_get_kv(spec, 150, 0)


@parametrize_specs
@pytest.mark.parametrize("batch", ["mixed", "cuts"])
def test_decode(spec, batch):
    case = PagedBatch(spec, DECODE_BATCHES[batch], 0)
    case.decode()
    case.verify()


@parametrize_specs
def test_prefill(spec):
    case = PagedBatch(spec, BATCHES["mixed"], 0)
    case.prefill()
    case.verify()


@pytest.mark.parametrize("spec", every_nth(SPECS.values(), 2), ids=SPECS)
def test_windows_trees_and_shared_prefixes(spec):
    case = WindowBatch(spec, next(iter(DECODES.values())), 0)
    case.run("decode_windowed", case.length_rows(3), False, None)
    case.verify(3, False)
    case = PagedTrees(spec, paged_trees(np.random.default_rng(0)), 0)
    case.run()
    case.verify()
    SharedBatch(spec, SEGMENTS["many"], 0).check()


@pytest.mark.parametrize("codec", ["int8,int4", "int5,int4"])
def test_other_cpus(codec):
    spec = make_spec((4, 2), 64, (F32, codec), 8, target=vector_target("x86-64-v3"))
    check_transpose_append(spec, 40, 0, "x86-64-v3")
    check_debug_get_kv(spec, 40, 0, "x86-64-v3")
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], 0)
    case.decode()
    case.verify()


def test_gpus_have_no_kernels_for_pairs_and_bit_planes():
    with pytest.raises(ValueError, match="'int8,int4': kernels for GPUs know one codec for both"):
        cuda_spec(SPECS["int8,int4"])
    with pytest.raises(ValueError, match="'int5' has kernels for CPUs only; choose another codec"):
        cuda_spec(make_spec((4, 2), 64, (F16, "int5")))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
