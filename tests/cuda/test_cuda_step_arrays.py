# SPDX-License-Identifier: Apache-2.0
"""The kernel that makes the arrays of a decode step of those of the step before."""

from __future__ import annotations

import numpy as np
import pytest

from ..support.cases.kernels import step_array_cases
from ..support.cases.kernels.attention_cases import compiled, tensors_for
from ..support.cases.kernels.cuda_cases import make_spec, on_gpu_too


def check(page_size: int, *sizes: int, seed: int) -> int:
    """Compare with NumPy; how many sequences begin a page."""
    print("seed", seed)
    spec = make_spec((2, 1), 16, page=page_size)
    kernel = compiled("advance_arrays", spec)
    return step_array_cases.check(kernel, tensors_for(spec), page_size, *sizes, seed)


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
@on_gpu_too
def test_arrays_are_those_of_a_new_plan(seed):
    """Also where a block has a part of an array, and several new pages."""
    sizes = (1, 1, 256), (7, 3, 4), (70, 9, 100)
    num_new = [check(4, *each, seed=seed) for each in sizes]
    assert num_new[-1] > 0


@on_gpu_too
def test_no_sequence_begins_a_page_and_all_do():
    for page_size, expected in ((1, 9), (64, 0)):
        seed = next(s for s in range(400) if _num_new(s, page_size) == expected)
        assert check(page_size, 9, 5, 16, seed=seed) == expected


def _num_new(seed: int, page_size: int) -> int:
    rng = np.random.default_rng(seed)
    return len(step_array_cases.random_steps(rng, 9, page_size, 5)[2])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
