# SPDX-License-Identifier: Apache-2.0
"""Tree attention against the reference: several rounds, large trees, chains among them."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from ..support.cases.kernels.kernel_specs import (
    BF16,
    F16,
    F32,
    ROPE_SPECS,
    SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.cases.kernels.mla_cases import make_spec as make_mla_spec
from ..support.cases.kernels.tree_cases import (
    LatentTrees,
    PagedTrees,
    RaggedTrees,
    chain,
    random_parents,
)
from ..support.harness.selections import few_of, latin_square

PAGED_SPECS = {
    "4:2x64-f16-p1": make_spec((4, 2), 64, (F16, F16), 1),
    **{
        label: SPECS[label]
        for label in (
            "32:8x128-f32-p16",
            "5:1x80-f32-bf16-p4",
            "3:1x24-bf16-p128",
            "2:1x256-bf16-p8",
        )
    },
}


def paged_trees(rng) -> list:
    """(rows, columns before the tree, parents): one round and several, small and large, none."""
    large = random_parents(rng, 300)
    return [
        (1, 0, [-1]),
        (7, 70, random_parents(rng, 7)),
        (0, 20, []),
        (5, 33, random_parents(rng, 19)),  # 14 nodes of earlier rounds
        (6, 40, []),  # plain causal
        (4, 60, chain(9)),
        (3, 0, [-1, -1, -1]),
        (130, 17, large),
        (0, 12, random_parents(rng, 5)),  # nothing new
        (2, 64, random_parents(rng, 64, 64)),
        (3, 0, []),
    ]


@pytest.mark.parametrize("spec", few_of(PAGED_SPECS.values(), 3), ids=PAGED_SPECS)
@parametrize_seed
def test_tree_paged(spec, seed):
    case = PagedTrees(spec, paged_trees(np.random.default_rng(seed)), seed)
    case.run()
    case.verify()


@latin_square(3, "window", "spec")
@pytest.mark.parametrize("window", [1, 2, 7, 40, 500, -9, -64])
@pytest.mark.parametrize("spec", few_of(PAGED_SPECS.values(), 3), ids=PAGED_SPECS)
@parametrize_seed
def test_tree_paged_sliding(spec, seed, window):
    rng = np.random.default_rng(seed)
    case = PagedTrees(spec, paged_trees(rng), seed)
    case.run(window=window)
    case.verify(window=window)
    # Trees deeper than a tile, so that whole tiles of ancestors are out of sight.
    trees = [(200, 70, random_parents(rng, 300, 2)), (3, 300, random_parents(rng, 9, 2))]
    case = PagedTrees(spec, trees, seed)
    case.run(window=window)
    case.verify(window=window)


@pytest.mark.parametrize("window", [None, 3, 50, -20])
@parametrize_seed
def test_the_nodes_of_a_step_can_be_hidden(seed, window):
    """Then the rows see what was before them: of trees their ancestors, else everything."""
    for inline in (False, True):
        case = PagedTrees(ROPE_SPECS["yarn-bf16"], paged_trees(np.random.default_rng(seed)), seed)
        case.hide_step()
        case.run(inline=inline, window=window)
        case.verify(inline=inline, window=window)


MLA_SPECS = {
    "5x512+64-f32": make_mla_spec(5, (512, 64)),
    "16x64+16-bf16-p4": make_mla_spec(16, (64, 16), (BF16, BF16), page=4),
    "3x128+32-f16-p64": make_mla_spec(3, (128, 32), (F16, F16), page=64),
}


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("spec", few_of(MLA_SPECS.values(), 2), ids=MLA_SPECS)
@parametrize_seed
def test_mla_tree(spec, seed, is_hidden):
    rng = np.random.default_rng(seed)
    # With few rows over many positions, tiles are cut and their parts merged.
    long = [(3, 2000, random_parents(rng, 5)), (1, 700, [-1, -1])]
    for trees in (paged_trees(rng), long):
        case = LatentTrees(spec, trees, seed)
        if is_hidden:
            case.hide_step()
        case.run()
        case.verify()


RAGGED_SPECS = {
    "8:2x192/128-f32": make_spec((8, 2), (192, 128)),
    "4:4x64/80-f16": make_spec((4, 4), (64, 80), (F16, F16)),
    "6:2x24/104-bf16": make_spec((6, 2), (24, 104), (BF16, BF16)),
}


def ragged_trees(rng) -> list:
    """(rows, columns, parents): all columns are nodes, or some are not, or the reverse."""
    return [
        (1, 1, [-1]),
        (9, 9, random_parents(rng, 9)),
        (0, 0, []),
        (270, 270, random_parents(rng, 270)),
        (5, 5, []),
        (4, 4, chain(4)),
        (6, 90, random_parents(rng, 11)),
        (6, 6, random_parents(rng, 20)),  # earlier rounds lie elsewhere
        (2, 50, []),
    ]


@pytest.mark.parametrize("spec", few_of(RAGGED_SPECS.values(), 2), ids=RAGGED_SPECS)
@parametrize_seed
def test_tree(spec, seed):
    case = RaggedTrees(spec, ragged_trees(np.random.default_rng(seed)), seed)
    for window in (None, 1, 7):
        case.run(window=window)
        case.verify(window=window)


@pytest.mark.parametrize("rope", few_of(["yarn-bf16", "partial-scaled", "odd-pairs-bf16"], 1))
@parametrize_seed
def test_inline_rope_follows_the_depth_of_nodes(rope, seed):
    spec, rng = ROPE_SPECS[rope], np.random.default_rng(seed)
    for case in (
        PagedTrees(spec, paged_trees(rng), seed),
        RaggedTrees(spec, ragged_trees(rng), seed),
    ):
        case.run(inline=True)
        case.verify(inline=True)
        case.run(inline=True, window=9)
        case.verify(inline=True, window=9)


@parametrize_cpu("x86-64-v3", "x86-64")
@parametrize_seed
def test_other_instruction_sets(cpu, seed):
    target = vector_target(cpu)
    spec = make_spec((7, 1), 104, (F32, BF16), 8, target=target, rope=RopeSpec(rotary_dim=104))
    case = PagedTrees(spec, paged_trees(np.random.default_rng(seed)), seed)
    case.run(cpu, inline=True)
    case.verify(inline=True)


@parametrize_seed
def test_chains_are_causal(seed):
    """A batch of chains, written as trees or not, is what `prefill` makes of it."""
    spec = SPECS["32:8x128-f32-p16"]
    shapes = [(5, 40), (70, 70), (3, 200)]
    for as_tree in (False, True):
        trees = [(n, kv - n * as_tree, chain(n * as_tree)) for n, kv in shapes]
        case = PagedTrees(spec, trees, seed)
        case.run()
        o, lse = case.o.numpy(), case.lse.numpy()
        case.prefill()
        np.testing.assert_array_equal(o, case.o.numpy())
        np.testing.assert_array_equal(lse, case.lse.numpy())


@parametrize_seed
def test_logit_softcap(seed):
    spec = make_spec((4, 2), 64, (F32, F32), logit_softcap=2.5)
    rng = np.random.default_rng(seed)
    for case in (
        PagedTrees(spec, paged_trees(rng), seed),
        RaggedTrees(spec, ragged_trees(rng), seed),
    ):
        case.q = case.q * np.float32(4)
        case.run()
        case.verify()


def test_a_tree_smaller_than_the_step_is_refused():
    case = PagedTrees(make_spec((2, 1), 32), [(3, 5, chain(3))], 0)
    case.order_indptr[1] = 2
    with pytest.raises(ValueError, match="tree_order must cover all rows"):
        case.run()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
