# SPDX-License-Identifier: Apache-2.0
"""Kernels with a mistake in what emits them fail the comparisons of their tests.

`test_faults` asks the same of the comparisons alone; here the kernels are built with the mistake.
"""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T

from tir_kernels.cpu import worker as cpu_rows
from tir_kernels.cpu.isa.simd import broadcast, load, temp
from tir_kernels.cpu.tiles import tree_mask
from tir_kernels.gpu.rows import rows as cuda_rows
from tir_kernels.gpu.scores import tree as columns

from ..support.cases.kernels import kernel_specs
from ..support.cases.kernels.attention_cases import altered_kernels
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.cases.kernels.page_kernel_cases import check_copy_single_page
from ..support.cases.kernels.tree_cases import PagedTrees, random_parents

SPECS = {"cpu": kernel_specs.make_spec((4, 2), 32), "cuda": make_spec((4, 2), 32)}
parametrize_specs = pytest.mark.parametrize("target", SPECS)

_visible, _is_visible = tree_mask.TreeMask.visible, columns.TreeMask.is_visible


def blind_to_itself(self, first, start, lanes, row):
    """A node does not see itself: the first comparison of its number is strict."""
    number = temp(broadcast(row[0], lanes), lanes, "int32")
    before = load(self.low, (start,), lanes, "int32") < number
    return T.And(before, number < load(self.high, (start,), lanes, "int32"))


def sees_a_node_behind(self, first, start, lanes, row):
    """A subtree ends a node too late: the second comparison of a number is not strict."""
    number = temp(broadcast(row[0], lanes), lanes, "int32")
    low = load(self.low, (start,), lanes, "int32") <= number
    return T.And(low, number <= load(self.high, (start,), lanes, "int32"))


def blind_to_a_column(self, first, start, lanes, row):
    """A column of each tile is skipped."""
    column = T.Ramp(start, 1, lanes) if lanes > 1 else start
    is_other = column != broadcast(T.int32(5), lanes)
    return T.And(_visible(self, first, start, lanes, row), is_other)


def blind_to_the_first_node(self, first, column, h):
    """A CUDA mask skips the first node of a tree."""
    is_other = first + column != self.start
    return T.And(_is_visible(self, first, column, h), is_other)


def sees_the_second_node(self, first, column, h):
    """A CUDA mask shows the second node of a tree to all rows behind it."""
    is_second = first + column == self.start + 1
    return T.Or(_is_visible(self, first, column, h), is_second)


MASKS = [
    ("cpu", blind_to_itself),
    ("cpu", sees_a_node_behind),
    ("cpu", blind_to_a_column),
    ("cuda", blind_to_the_first_node),
    ("cuda", sees_the_second_node),
]


@pytest.fixture
def fresh_kernels():
    """A function that forgets the kernels that were built; what a test built is forgotten, too."""
    with altered_kernels() as forget:
        yield forget


def check_trees(spec) -> None:
    rng = np.random.default_rng(0)
    trees = [(7, 70, random_parents(rng, 7)), (0, 20, []), (5, 33, random_parents(rng, 19))]
    case = PagedTrees(spec, trees, 0)
    case.run()
    case.verify()


@parametrize_specs
def test_trees_without_a_mistake(target):
    check_trees(SPECS[target])


@pytest.mark.parametrize("target, mistake", MASKS, ids=lambda x: getattr(x, "__name__", x))
def test_masks_of_trees(target, mistake, monkeypatch, fresh_kernels):
    owner, name = {
        "cpu": (tree_mask.TreeMask, "visible"),
        "cuda": (columns.TreeMask, "is_visible"),
    }[target]
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError):
        check_trees(SPECS[target])


@parametrize_specs
@pytest.mark.parametrize("change", [-1, 1], ids=["a slot is left out", "a slot more is copied"])
def test_slots_of_a_page(target, change, monkeypatch, fresh_kernels):
    copies = {"cpu": cpu_rows, "cuda": cuda_rows}[target].RowCopy
    rows = copies.rows
    check_copy_single_page(SPECS[target], 0)
    fresh_kernels()
    monkeypatch.setattr(copies, "rows", lambda self, count: rows(self, count + change))
    with pytest.raises(AssertionError):
        check_copy_single_page(SPECS[target], 0)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
