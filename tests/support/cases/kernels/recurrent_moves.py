# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernels that move what recurrent layers keep, for specs of any target.

Contents are random bits, of which some are NaN in every type: what is copied stays as it is.
"""

from __future__ import annotations

import numpy as np

from tir_kernels.conv_spec import ConvSpec
from tir_kernels.recurrent_spec import RecurrentSpec

from .... import reference
from .attention_cases import compiled, tensors_for
from .recurrent_cases import Tokens, empty_pages, page_shift, random_slots


def random_pages(spec: RecurrentSpec | ConvSpec, num_pages: int, rng) -> np.ndarray:
    """Return pages of random bits."""
    width = spec.rows.qk_head_dim
    shape = (num_pages, spec.page_size, width * np.dtype(spec.dtype).itemsize)
    return rng.integers(0, 256, shape, np.uint8).view(spec.dtype)


def check_append(spec: RecurrentSpec, num_tokens: int, seed: int, cpu: str = "native") -> None:
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    tokens = Tokens.random(spec, num_tokens, rng)
    slots, num_pages = random_slots(spec, num_tokens, rng)
    slots[1::5] = -1
    pages = place(empty_pages(spec, num_pages), *page_shift(spec))
    arrays = [place(x) for x in tokens.ingredients]
    compiled("recurrent_append", spec, cpu)(*arrays, place(slots), pages)
    reference.assert_same_bits(pages.numpy(), tokens.pages(slots, num_pages))


def check_copy_single_page(spec: RecurrentSpec | ConvSpec, seed: int) -> None:
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    for length in sorted({0, 1, spec.page_size - 1, spec.page_size}):
        pages = random_pages(spec, 5, rng)
        actual = place(pages)
        compiled("copy_single_page", spec)(actual, 3, 1, length)
        pages[1, :length] = pages[3, :length]
        reference.assert_same_bits(actual.numpy(), pages)


def check_copy_pages(
    spec: RecurrentSpec | ConvSpec, num_copies: int, seed: int, cpu: str = "native"
) -> None:
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    pages = random_pages(spec, 2 * num_copies + 3, rng)
    some = rng.permutation(len(pages))[: 2 * num_copies]
    lengths = rng.integers(0, spec.page_size + 1, num_copies)
    lengths[0] = spec.page_size
    copies = np.stack([*some.reshape(2, -1), lengths]).astype(np.int32)
    actual = place(pages)
    compiled("copy_pages", spec, cpu)(actual, place(copies))
    for source, destination, length in copies.T:
        pages[destination, :length] = pages[source, :length]
    reference.assert_same_bits(actual.numpy(), pages)


def check_compact_copy(spec: RecurrentSpec | ConvSpec, num_copies: int, seed: int) -> None:
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    pages = random_pages(spec, 6, rng)
    slots = rng.integers(0, 6 * spec.page_size, (2, num_copies)).astype(np.int32)
    starts = np.array([0, 0, num_copies // 3, num_copies], np.int32)
    actual = place(pages)
    compiled("compact_copy", spec)(actual, place(starts), place(slots), len(starts) - 1)
    rows = pages.reshape(-1, pages.shape[-1])
    for source, destination in slots.T:
        rows[destination] = rows[source]
    reference.assert_same_bits(actual.numpy(), pages)


def check_debug_get_rows(spec: RecurrentSpec | ConvSpec, num_rows: int, seed: int) -> None:
    place, rng = tensors_for(spec), np.random.default_rng(seed)
    slots, num_pages = random_slots(spec, num_rows, rng)
    pages = random_pages(spec, num_pages, rng)
    expected = np.full((2, num_rows, pages.shape[-1]), np.nan, spec.dtype)
    found = place(expected)
    compiled("debug_get_kv_mla", spec)(place(pages), place(slots), found, 1)
    expected[1] = pages.reshape(-1, pages.shape[-1])[slots]
    reference.assert_same_bits(found.numpy(), expected)
