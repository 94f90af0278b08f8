# SPDX-License-Identifier: Apache-2.0
"""prefill_spans and prefill_spans_sliding against the reference: rows see to the end of spans."""

from __future__ import annotations

import pytest

from ..support.cases.kernels.attention_cases import PagedBatch, random_reach
from ..support.cases.kernels.kernel_specs import BATCHES, SOME_SPECS, parametrize_seed
from ..support.harness.selections import few_of

parametrize_specs = pytest.mark.parametrize("spec", few_of(SOME_SPECS.values(), 2), ids=SOME_SPECS)


@parametrize_specs
@pytest.mark.parametrize("window", [None, 37, -32])
@pytest.mark.parametrize("batch", ["mixed", "tiles"])
@parametrize_seed
def test_spans(spec, batch, window, seed):
    case = PagedBatch(spec, BATCHES[batch], seed)
    reach = random_reach(case.rng, case.num_rows)
    case.prefill(window=window, reach=reach)
    case.verify(window=window, reach=reach)
    with pytest.raises(AssertionError):
        case.verify(window=window)


@parametrize_seed
def test_rows_see_no_other_sequence(seed):
    """However far they reach."""
    case = PagedBatch(SOME_SPECS[next(iter(SOME_SPECS))], [(5, 9), (33, 70), (1, 4)], seed)
    reach = case.q_positions * 0 + 1000
    case.prefill(reach=reach)
    case.verify(reach=reach)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
