#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Tries an installed wheel where there is no compiler: python try_wheel.py BUNDLE

The bundle is of `wheel_config.json`. Attention of a row to itself alone returns its V, so the
results are known.
"""

from __future__ import annotations

import shutil
import sys

import numpy as np

import tvm_pagedkv as pkv
from tvm_pagedkv_lm.cli import main


def try_attention(folder: str) -> None:
    """Make a cache from a bundle, and compare the attention of its first rows."""
    cache = pkv.load_bundle(folder).create()
    num_rows, heads = 3, 4 + 2 * 2
    qkv = np.random.default_rng(0).standard_normal((num_rows, heads, 32), "float32")
    for seq_id in range(num_rows):
        cache.add_sequence(seq_id)
    with cache.forward(range(num_rows), [1] * num_rows):
        out = cache.attention(0, qkv).numpy()
    expected = np.repeat(qkv[:, 6:], 2, axis=1)  # two query heads for each head of V
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    print(f"{cache!r}: attention is right")


if __name__ == "__main__":
    found = [
        name for name in ("cc", "gcc", "g++", "clang", "clang++", "nvcc") if shutil.which(name)
    ]
    if found:
        sys.exit(f"PATH has compilers: {', '.join(found)}")
    try_attention(sys.argv[1])
    sys.exit(main(["info"]))
