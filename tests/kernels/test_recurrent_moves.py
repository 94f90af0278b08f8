# SPDX-License-Identifier: Apache-2.0
"""Kernels that move what recurrent layers keep: rows of ingredients and states, bit for bit."""

from __future__ import annotations

import pytest
import tvm.testing

from tir_kernels import build_kernel, kernel_names
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tvm_pagedkv.compiler.build import vector_target

from ..support.cases.kernels.kernel_specs import BF16, F16, F32, parametrize_cpu, parametrize_seed
from ..support.cases.kernels.recurrent_cases import SHAPES
from ..support.cases.kernels.recurrent_moves import (
    check_append,
    check_compact_copy,
    check_copy_pages,
    check_copy_single_page,
    check_debug_get_rows,
)

SPECS = {
    "gated_delta-bf16": ("gated_delta", "4-of-2-heads-128", BF16, 16),
    "kda-f16": ("kda", "6-of-1-head-7x20", F16, 1),
    "kda-f32": ("kda", "3-heads-24x8", F32, 5),
    "mamba2-bf16": ("mamba2", "6-of-1-head-7x20", BF16, 4),
    "lightning-f32": ("lightning", "2-heads-64x256", F32, 8),
}
# Rows of 49 KiB, as Kimi Linear has them: longer than a vector copy that is unrolled.
WIDE = RecurrentSpec("kda", 32, 32, 128, 128, BF16, 2, vector_target("native"))


def make_spec(rule: str, shape: str, dtype: str, page: int, cpu: str = "native") -> RecurrentSpec:
    return RecurrentSpec(rule, *SHAPES[shape], dtype, page, vector_target(cpu))


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request) -> RecurrentSpec:
    return make_spec(*request.param)


@parametrize_seed
def test_append(spec, seed):
    for num_tokens in (0, 1, 37):
        check_append(spec, num_tokens, seed)


@parametrize_seed
def test_copies_of_rows(spec, seed):
    check_copy_single_page(spec, seed)
    check_copy_pages(spec, 5, seed)
    check_compact_copy(spec, 30, seed)
    check_debug_get_rows(spec, 17, seed)


def test_rows_of_thousands_of_elements():
    """Enough bytes for several threads, too."""
    check_append(WIDE, 60, 0)
    check_copy_pages(WIDE, 9, 0)
    check_compact_copy(WIDE, 12, 0)
    check_debug_get_rows(WIDE, 7, 0)


@parametrize_cpu("x86-64-v2", "haswell", "x86-64-v4")
def test_other_cpus(cpu):
    spec = make_spec("kda", "3-heads-24x8", BF16, 4, cpu)
    check_append(spec, 9, 0, cpu)
    check_copy_pages(spec, 3, 0, cpu)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_ingredients(rule):
    """Sections begin at multiples of 16 bytes, one behind the other; rows end at one."""
    spec = RecurrentSpec(rule, 6, 1, 7, 20, BF16)
    num_decays = 6 * 7 if rule == "kda" else 6
    ends = [(0, 14), (16, 240), (256, 4 * num_decays)]
    if spec.is_delta:
        ends.append((-(-(256 + 4 * num_decays) // 16) * 16, 24))
    sections = list(spec.sections.values())
    assert [(s.begin, s.end - s.begin) for s in sections] == ends
    assert spec.row_width * 2 == -(-sections[-1].end // 16) * 16


def test_a_set_has_all_kernels():
    spec = RecurrentSpec("gated_delta", 2, 1, 8, 8)
    names = ["recurrent_append", "recurrent_scan", "copy_single_page", "copy_pages"]
    assert kernel_names(spec) == [*names, "compact_copy", "debug_get_kv_mla"]
    with pytest.raises(ValueError, match="no kernel 'decode'; there are recurrent_append, "):
        build_kernel("decode", spec)


if __name__ == "__main__":
    tvm.testing.main()
