# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels of causal convolutions, for specs of any target."""

from __future__ import annotations

import numpy as np

from tir_kernels.conv_spec import ConvSpec

from .... import reference
from ....reference.recurrent import causal_conv
from .attention_cases import compiled, normal, tensors_for

SHAPES = {  # channels, width, activation, has a bias
    "256x4-silu": (256, 4, "silu", False),  # Qwen3.5 has 8192 channels
    "1040x3-bias": (1040, 3, None, True),  # more than a block, LFM2's width
    "140x2-silu-bias": (140, 2, "silu", True),
    "7x8": (7, 8, None, False),
    "72x5-silu": (72, 5, "silu", False),
}


def check_conv(spec: ConvSpec, num_tokens: int, seed: int, cpu: str = "native") -> None:
    """Append rows of a token tree, and compare what is computed of them.

    Some tokens lack their first taps, a few all of them, and the unused slots hold NaN.
    """
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    num_pages = -(-num_tokens // spec.page_size) + 3
    slots = rng.permutation(num_pages * spec.page_size)[:num_tokens].astype(np.int32)
    x = normal(rng, (num_tokens, spec.channels), spec.dtype)
    weight = normal(rng, (spec.channels, spec.width), spec.dtype)
    bias = normal(rng, (spec.channels,), spec.dtype) if spec.has_bias else None
    # The tokens before each one, the next one last: mostly its predecessor in the step.
    before = np.full((num_tokens, spec.width - 1), -1)
    for token in range(1, num_tokens):
        parent = token - 1 if rng.random() < 0.7 else int(rng.integers(-1, token))
        if parent >= 0:
            before[token] = [*before[parent, 1:], parent]
    tap_slots = np.where(before >= 0, slots[before], -1).astype(np.int32)
    taps = np.where(before[..., None] >= 0, x[before], 0)

    pages = place(np.full((num_pages, spec.page_size, spec.channels), np.nan, spec.dtype))
    compiled("row_append", spec, cpu)(pages, place(x), place(slots))
    kept = np.full((num_pages * spec.page_size, spec.channels), np.nan, spec.dtype)
    kept[slots] = x
    reference.assert_same_bits(pages.numpy(), kept.reshape(pages.shape))
    out = place(np.full(x.shape, np.nan, spec.dtype))
    biases = [place(bias)] if spec.has_bias else []
    arguments = (place(x), pages, place(tap_slots), place(weight), *biases, out)
    compiled("causal_conv", spec, cpu)(*arguments)
    expected = causal_conv(x, taps, weight, bias, spec.activation)
    assert_conv_close(out.numpy(), expected, (x, taps, weight, bias))


def assert_conv_close(actual, expected, inputs) -> None:
    """Compare with errors relative to the sum of the products' magnitudes.

    An output is rounded to its type, and the sums are float32.
    """
    x, taps, weight, bias = (None if v is None else np.abs(v.astype(np.float64)) for v in inputs)
    size = causal_conv(x, taps, weight, bias, None)
    rounding = {4: 2.0**-23, 2: 2.0**-10}[actual.itemsize]
    if str(actual.dtype) == "bfloat16":
        rounding = 2.0**-8
    errors = np.abs(actual.astype(np.float64) - expected)
    assert (errors <= rounding * np.abs(expected) + 4e-6 * size).all()
