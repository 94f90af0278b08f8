# SPDX-License-Identifier: Apache-2.0
"""The table of errors of narrow states, on few tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

from bench_quality_states import errors_of


@pytest.mark.parametrize("rule", ["gated_delta", "mamba2"])
def test_errors_are_those_of_the_types(rule):
    """A number of float16 has three bits more, and what is forgotten sooner errs less."""
    errors = errors_of(rule, 512)
    assert ((1e-3 < errors["bfloat16"]) & (errors["bfloat16"] < 0.05)).all()
    ratio = errors["bfloat16"] / errors["float16"]
    assert ((5 < ratio) & (ratio < 12)).all()
    assert (np.diff(errors["bfloat16"])[:3] > 0).all()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
