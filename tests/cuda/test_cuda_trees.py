# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of trees on GPUs, emulated, against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec

from .. import reference
from ..support.cases.kernels import tree_cases
from ..support.cases.kernels.attention_cases import cuda_text
from ..support.cases.kernels.cuda_cases import (
    BF16,
    F16,
    F32,
    make_spec,
    on_gpu_too,
    parametrize_seed,
)
from ..support.cases.kernels.tree_cases import PagedTrees, RaggedTrees, chain, random_parents
from ..support.emulators.cuda_emulator import Schedule, emulated, mutated, schedule
from ..support.harness.selections import latin_square

SPECS = {
    "5:1x80-bf16-p4": make_spec((5, 1), 80, (BF16, BF16), 4, rope=RopeSpec(rotary_dim=20)),
    "4:2x32-f32-p16": make_spec((4, 2), 32, (F32, F32)),
}
parametrize_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def paged_trees(seed: int) -> list:
    """(rows, columns before the tree, parents): one round and several, chains among them."""
    rng = np.random.default_rng(seed)
    return [
        (1, 0, [-1]),
        (7, 70, random_parents(rng, 7)),
        (0, 20, []),
        (5, 33, random_parents(rng, 19)),  # 14 nodes of earlier rounds
        (6, 40, []),  # plain causal
        (4, 60, chain(9)),
        (70, 17, random_parents(rng, 90)),
        (3, 0, []),
    ]


def ragged_trees(seed: int) -> list:
    """(rows, columns, parents): the columns may be the last nodes only."""
    return [(n, n if p else before + n, p) for n, before, p in paged_trees(seed)]


@latin_square(2, "spec", "inline", "window")
@parametrize_specs
@pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])
@pytest.mark.parametrize("window", [None, 7, 40, -30])
@parametrize_seed
@on_gpu_too
def test_trees(spec, inline, window, seed):
    for case in (
        PagedTrees(spec, paged_trees(seed), seed),
        RaggedTrees(spec, ragged_trees(seed), seed),
    ):
        case.run(inline=inline, window=window)
        case.verify(inline, window)


@on_gpu_too
def test_trees_beside_the_bounds_of_tiles():
    """Trees, and plain rows, begin at every place of a tile."""
    spec, roots = make_spec((1, 1), 16, (F16, F16)), [-1, -1, 0, -1]
    trees = [(len(p) or 2, n, p) for n in range(28, 68) for p in (roots, [])]
    case = PagedTrees(spec, trees, 0)
    case.run()
    case.verify()


@parametrize_seed
@on_gpu_too
def test_alibi(seed):
    slopes = tuple(reference.alibi_slopes(4))
    spec = dataclasses.replace(SPECS["4:2x32-f32-p16"], alibi_slopes=slopes)
    case = PagedTrees(spec, paged_trees(seed), seed)
    case.run()
    case.verify()


@parametrize_seed
@on_gpu_too
def test_nodes_that_nobody_sees(seed):
    case = PagedTrees(make_spec((2, 1), 32, (F16, F16)), paged_trees(seed)[1:4], seed)
    case.hide_step()
    case.run()
    case.verify()


def test_the_barrier_behind_positions_is_needed(monkeypatch):
    spec = make_spec((2, 1), 32, (F16, F16), rope=RopeSpec(rotary_dim=0))
    source, wrong = cuda_text("tree_paged_sliding", spec), []
    barrier = "  tvm_builtin_cuda_cta_sync();"
    # Q is there, a tile is, its positions are, V is finite, the end, two of care, O is.
    assert source.count(barrier) == 8
    for text in (source, mutated(source, barrier, which=2)):
        function = emulated(text).get_function("tree_paged_sliding")
        monkeypatch.setattr(tree_cases, "compiled", lambda *arguments, f=function: f)
        case = PagedTrees(spec, [(70, 17, random_parents(np.random.default_rng(0), 90))], 0)
        try:
            with schedule(Schedule("skewed")):
                case.run(window=7)
            case.verify(window=7)
            wrong.append(False)
        except (AssertionError, RuntimeError):  # or the emulator refuses matrix instructions
            wrong.append(True)
    assert wrong == [False, True]


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
