# SPDX-License-Identifier: Apache-2.0
"""The attention that tests compare with: what it computes at once is as each row is specified."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ..reference.dense_attention import attention, softmax_sum

HOW = {"plain": {}, "soft-cap": {"softcap": 0.5}, "bias": {"bias": True}}
VALUES = {"finite": [], "not finite": [math.nan, math.inf, -math.inf]}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_each_row_is_as_specified(how, values):
    rng = np.random.default_rng(0)
    num_heads, num_rows, kv_len, group, sm_scale = 6, 20, 30, 3, 0.3
    q = rng.standard_normal((num_rows, num_heads, 8))
    k, v = (rng.standard_normal((kv_len, num_heads // group, n)) for n in (8, 24))
    mask = rng.random((num_rows, kv_len)) < 0.2
    mask[2], mask[3], mask[:, 7] = False, True, False
    k[7], v[7] = math.nan, math.inf  # which no row sees
    for i, value in enumerate(values):
        q[5 + i, i], k[10 + i, 0, 3], v[20 + i, 1, 5] = value, value, value
    if "bias" in how:
        how = {"bias": rng.standard_normal((num_heads, num_rows, kv_len))}
    with np.errstate(invalid="ignore"):
        o, lse = attention(q, k, v, mask, sm_scale, **how)
        for t in range(num_rows):
            for h in range(num_heads):
                scores = k[mask[t], h // group] @ q[t, h] * sm_scale
                if "softcap" in how:
                    scores = how["softcap"] * np.tanh(scores / how["softcap"])
                if "bias" in how:
                    scores = scores + how["bias"][h, t, mask[t]]
                wanted = softmax_sum(scores * math.log2(math.e), v[mask[t], h // group])
                for actual, expected in zip((o[t, h], lse[t, h]), wanted, strict=True):
                    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    assert np.isneginf(lse[2]).all() and not o[2].any()
    assert np.isnan(lse).any() == bool(values)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
