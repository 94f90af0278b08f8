# SPDX-License-Identifier: Apache-2.0
"""Kernels that classes of CPUs other than this one get, on this CPU: attention, odd widths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..support.cases.kernels.attention_cases import PagedBatch, RaggedBatch
from ..support.cases.kernels.kernel_specs import (
    BATCHES,
    BF16,
    F32,
    NATIVE,
    make_spec,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import LatentBatch
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.tree_cases import PagedTrees, random_parents
from ..support.harness.selections import latin_square

# Where this CPU has pairs of bfloat16, decode and single rows have them, and tiles do not.
INTEL = replace(NATIVE, tile=(6, 4), slow_bf16_dot=True)
# A tile may leave one vector of 64 positions: of 4 and of 16 vectors if it has 3, of 8 if it has 7.
LEAVES_ONE = replace(INTEL, tile=(4, 7 if NATIVE.lanes == 8 else 3))
LENGTHS = [*BATCHES["mixed"], *BATCHES["tiles"]]


@latin_square(2, "spec")
@pytest.mark.parametrize(
    "spec",
    [
        make_spec((8, 2), 128, (BF16, BF16), target=INTEL),
        make_spec((5, 1), 104, (F32, BF16), 4, target=INTEL),  # 64 + 2 x 16 + 8 columns
        make_spec((2, 2), 80, (BF16, F32), target=INTEL),
        make_spec((4, 4), 24, target=LEAVES_ONE),
        make_spec((4, 2), 64, (BF16, "int8"), target=INTEL),
    ],
    ids=["128-bf16", "104", "80", "24-leaves-one", "int8"],
)
@parametrize_seed
def test_attention(spec, seed):
    case = PagedBatch(spec, LENGTHS, seed)
    case.prefill()
    case.verify()


@parametrize_seed
def test_ragged(seed):
    case = RaggedBatch(make_spec((6, 2), (48, 96), (BF16, BF16), target=INTEL), LENGTHS, seed)
    case.prefill()
    case.verify()


@parametrize_seed
def test_decode(seed):
    case = PagedBatch(
        make_spec((6, 2), 80, (BF16, BF16), target=INTEL), [(1, n) for n in (1, 64, 333)], seed
    )
    case.decode()
    case.verify()


@parametrize_seed
def test_trees(seed):
    spec = make_spec((4, 2), 64, (BF16, BF16), target=INTEL)
    parents = random_parents(np.random.default_rng(seed), 9)
    case = PagedTrees(spec, [(9, 70, parents), (0, 20, [])], seed)
    case.run(inline=True)
    case.verify(inline=True)


@parametrize_seed
def test_latent_rows(seed):
    spec = replace(make_mla_spec(5, (64, 32), (BF16, BF16), 8), target=INTEL)
    case = LatentBatch(spec, [(9, 70), (1, 300)], seed)
    case.run(True)
    case.verify(True)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
