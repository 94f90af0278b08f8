# SPDX-License-Identifier: Apache-2.0
"""ALiBi in every attention kernel against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm.testing

from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler.build import vector_target
from tvm_pagedkv.config import standard_slopes

from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    DECODE_BATCHES,
    F16,
    F32,
    ROPE_SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.cases.kernels.tree_cases import PagedTrees, RaggedTrees
from ..support.harness.selections import latin_square
from .test_shared_prefix_kernel import SEGMENTS, SharedBatch
from .test_tree_kernels import paged_trees, ragged_trees


def with_slopes(spec: KernelSpec) -> KernelSpec:
    return replace(spec, alibi_slopes=standard_slopes(spec.num_qo_heads))


# Between them: every type, one head and many, groups of one, of some and of all heads.
SPECS = {
    "8:2x64-f32": with_slopes(make_spec((8, 2), 64)),
    "12:4x40-bf16-p4": with_slopes(make_spec((12, 4), 40, (BF16, BF16), 4)),
    "71:1x64-f16-p1": with_slopes(make_spec((71, 1), 64, (F16, F16), 1)),
    "5:5x24-f32-bf16-p64": with_slopes(make_spec((5, 5), 24, (F32, BF16), 64)),
    # Any slopes, of either sign, beyond a soft-cap.
    "3:1x128-bf16-cap": replace(
        make_spec((3, 1), 128, (BF16, BF16)), logit_softcap=2.5, alibi_slopes=(0.0, -0.01, 0.7)
    ),
}
spec = tvm.testing.parameter(by_dict=SPECS)


@latin_square(2, "spec")
@pytest.mark.parametrize("window", [None, 20], ids=["all", "window"])
@parametrize_seed
def test_decode(spec, window, seed):
    for batch in ("mixed", "cuts"):
        case = PagedBatch(spec, DECODE_BATCHES[batch], seed)
        case.decode(window=window)
        case.verify(window=window)


@latin_square(2, "spec")
@pytest.mark.parametrize("window", [None, 20], ids=["all", "window"])
@parametrize_seed
def test_prefill(spec, window, seed):
    for batch in ("mixed", "tiles"):
        case = PagedBatch(spec, BATCHES[batch], seed)
        case.prefill(window=window)
        case.verify(window=window)


@latin_square(2, "spec")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@parametrize_seed
def test_prefill_ragged(spec, causal, seed):
    case = RaggedBatch(spec, BATCHES["tiles"], seed)
    case.prefill(causal)
    case.verify(causal)


@latin_square(2, "spec")
@parametrize_seed
def test_trees_count_depth(spec, seed):
    rng = np.random.default_rng(seed)
    for case in (
        PagedTrees(spec, paged_trees(rng), seed),
        RaggedTrees(spec, ragged_trees(rng), seed),
    ):
        case.run()
        case.verify()


@latin_square(2, "spec")
@parametrize_seed
def test_prefill_shared(spec, seed):
    SharedBatch(spec, SEGMENTS["many"], seed).check()


@parametrize_seed
def test_beside_a_rotation(seed):
    spec = with_slopes(ROPE_SPECS["odd-pairs-bf16"])
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(inline=True)
    case.verify(inline=True)
    case = PagedTrees(spec, paged_trees(np.random.default_rng(seed)), seed)
    case.run(inline=True)
    case.verify(inline=True)


@parametrize_cpu("x86-64-v3", slow=("x86-64",))
@parametrize_seed
def test_other_instruction_sets(cpu, seed):
    target = vector_target(cpu)
    spec = with_slopes(make_spec((7, 1), 104, (F32, BF16), 8, target=target))
    case = PagedBatch(spec, DECODE_BATCHES["mixed"], seed)
    case.decode(cpu)
    case.verify()
    case = PagedBatch(spec, BATCHES["tiles"], seed)
    case.prefill(True, cpu)
    case.verify()


if __name__ == "__main__":
    tvm.testing.main()
