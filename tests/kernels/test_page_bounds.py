# SPDX-License-Identifier: Apache-2.0
"""The kernels `page_bounds` and `choose_pages` against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tir_kernels import build_kernel, kernel_names

from .. import reference
from ..reference.index import assert_chosen_blocks
from ..reference.page_bounds import bound_scores, page_bounds
from ..support.cases.kernels.attention_cases import PagedBatch, compiled, normal, pool_of, tensor
from ..support.cases.kernels.kernel_specs import BF16, F16, F32, SPECS, make_spec, parametrize_seed
from ..support.harness.selections import few_of

LENGTHS = [5, 300, 64, 1, 1000]
CASES = {
    "32:8x128-bf16": SPECS["32:8x128-bf16-p16"],
    "6:2x72-f32-p8": make_spec((6, 2), 72, (F32, F32), 8),
    "8:4x32-int8": make_spec((8, 4), 32, (F32, "int8")),
    "6:3x96-f16-fp8": make_spec((6, 3), 96, (F16, "float8_e4m3fn"), 64),
    "20:1x24-f32-bf16-p1": make_spec((20, 1), 24, (F32, BF16), 1),
    "71:1x64-f16-f32-p256": SPECS["71:1x64-f16-f32-p256"],
}


class Case(PagedBatch):
    """A decode batch; bounds of pages that nobody asks for are NaN."""

    def __init__(self, spec, seed: int):
        super().__init__(spec, [(1, n) for n in LENGTHS], seed)
        shape = (len(self.pages), spec.num_kv_heads, 2 * spec.qk_head_dim)
        self.bounds = np.full(shape, np.nan, spec.dtype)

    def pages_of(self, b: int) -> np.ndarray:
        return self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]

    def expected_bounds(self, b: int) -> np.ndarray:
        """The rows of `bounds` of the pages of a sequence."""
        args = self.pages_of(b), self.last_page_len[b], self.spec.page_size
        k, _ = reference.gather_slots(self.pages, reference.sequence_slots(*args))
        both = page_bounds(k, self.spec.page_size)
        return np.concatenate(both, axis=-1).astype(self.spec.dtype)


@parametrize_seed
@pytest.mark.parametrize("name", few_of(CASES, 3))
def test_page_bounds(name, seed):
    spec = CASES[name]
    case = Case(spec, seed)
    used = np.full(len(case.page_ids), spec.page_size, np.int32)
    used[case.page_indptr[1:] - 1] = case.last_page_len
    asked = np.random.default_rng(seed).permutation(len(used))[: len(used) - 1]
    bounds = tensor(case.bounds)
    arrays = pool_of(spec, case.pages), case.page_ids[asked], used[asked]
    compiled("page_bounds", spec)(*map(tensor, arrays), bounds)
    for b in range(len(LENGTHS)):
        case.bounds[case.pages_of(b)] = case.expected_bounds(b)
    left_out = np.setdiff1d(np.arange(len(case.bounds)), case.page_ids[asked])
    case.bounds[left_out] = np.nan
    np.testing.assert_array_equal(*(x.astype("float32") for x in (bounds.numpy(), case.bounds)))


@parametrize_seed
@pytest.mark.parametrize("k", [2, 9])
@pytest.mark.parametrize("name", few_of(CASES, 3))
def test_choose_pages(name, k, seed):
    spec = CASES[name]
    case = Case(spec, seed)
    for b in range(len(LENGTHS)):
        case.bounds[case.pages_of(b)] = case.expected_bounds(b)
    blocks = tensor(np.full((len(LENGTHS), spec.num_kv_heads, k), 77, np.int32))
    arrays = case.q, case.bounds, case.page_indptr, case.page_ids
    compiled("choose_pages", spec)(*map(tensor, arrays), blocks)
    for b, chosen in enumerate(blocks.numpy()):
        bounds = np.split(case.bounds[case.pages_of(b)], 2, axis=-1)
        scores = bound_scores(case.q[b], *bounds)
        assert_chosen_blocks(chosen, scores, (1, 1), F32)


def test_bounds_hold():
    """No product of a page exceeds its bound."""
    rng = np.random.default_rng(0)
    k, q = normal(rng, (50, 2, 16), F32), normal(rng, (6, 16), F32)
    scores = bound_scores(q, *page_bounds(k, 4))
    products = np.einsum("kgd,skd->kgs", q.reshape(2, 3, 16), k).max(axis=1)
    for page in range(scores.shape[1]):
        assert (products[:, page * 4 : page * 4 + 4] <= scores[:, page, None] + 1e-5).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alibi_slopes": (1.0, 0.5)}, "not possible with ALiBi"),
        ({"kv_dtype": "int4"}, "codecs that rotate K"),
        ({"v_head_dim": 32}, "K and V of one width"),
        ({"kind": "mha_sliding"}, "K and V of one width"),
    ],
)
def test_specs_without_bounds(fields, message):
    with pytest.raises(ValueError, match=message):
        build_kernel("page_bounds", replace(make_spec((2, 1), 64), **fields))


def test_kernels_of_layers_with_bounds():
    plain, bounded = (set(kernel_names(make_spec((4, 2), 64, page_bounds=x))) for x in (0, 1))
    assert bounded - plain == {"attend_blocks", "page_bounds", "choose_pages"}
