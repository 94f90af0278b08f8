# SPDX-License-Identifier: Apache-2.0
"""The kernel `prefill_shared` against the reference."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from tir_kernels.layout import pages_shape
from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from .. import reference
from ..reference.shared_prefix import shared_attention, shared_latent_attention
from ..support.cases.kernels.attention_cases import (
    SPARE_PAGES,
    AttentionCase,
    compiled,
    indptr,
    normal,
    pool_of,
    random_pages,
    tensors_for,
)
from ..support.cases.kernels.kernel_specs import (
    BF16,
    F16,
    F32,
    ROPE_SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.harness.selections import few_of, latin_square

SPECS = {
    "32:8x128-f32-p16": make_spec((32, 8), 128),
    "32:8x128-bf16-p16": make_spec((32, 8), 128, (BF16, BF16)),
    "4:4x128-f16-p1": make_spec((4, 4), 128, (F16, F16), 1),
    "71:1x64-f16-f32-p256": make_spec((71, 1), 64, (F16, F32), 256),
    "5:1x80-f32-bf16-p4": make_spec((5, 1), 80, (F32, BF16), 4),
    "7:1x576-bf16-f32-p2": make_spec((7, 1), 576, (BF16, F32), 2),
    "2:2x8-f32-p8": make_spec((2, 2), 8, page=8),
    "3:1x24-bf16-p128": make_spec((3, 1), 24, (BF16, BF16), 128),
    "2:1x256-bf16-p32": make_spec((2, 1), 256, (BF16, BF16), 32),
    "16:2x96-f16-p64": make_spec((16, 2), 96, (F16, F16), 64),
}
# (pages, rows) of each segment: one of each; many pages for few rows, which are cut; many rows, in
# several tiles; several segments.
SEGMENTS = {
    "one": [(1, 1)],
    "long": [(37, 3)],
    "wide": [(3, 300)],
    "many": [(2, 5), (1, 2), (9, 40), (1, 1), (5, 17)],
}


MLA_SPECS = {
    "9x576/512-f32-p16": make_spec((9, 1), (576, 512), kind="mla"),
    "16x40/24-bf16-p4": make_spec((16, 1), (40, 24), (BF16, BF16), 4, kind="mla"),
}


class SharedBatch(AttentionCase):
    """Rows in no order, some of no segment, and a state to merge into; some rows saw nothing yet,
    and their outputs are NaN.

    Parameters
    ----------
    spec : KernelSpec
    segments : list of (number of pages, number of rows)
    seed : int
    """

    has_single_rows = False

    def __init__(self, spec: KernelSpec, segments, seed: int):
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.tensor = tensors_for(spec)
        num_pages, num_rows = (list(x) for x in zip(*segments, strict=True))
        total = sum(num_rows) + 3
        pool = sum(num_pages) + SPARE_PAGES
        self.page_indptr, self.row_indptr = indptr(num_pages), indptr(num_rows)
        self.page_ids = self.rng.permutation(pool)[: sum(num_pages)].astype(np.int32)
        self.row_ids = self.rng.permutation(total)[: sum(num_rows)].astype(np.int32)
        self.first_positions = (7 * np.arange(len(segments))).astype(np.int32)
        self.q_positions = self.rng.integers(0, 500, total).astype(np.int32)
        self.pages = random_pages(self.rng, pages_shape(pool, spec), spec)
        unused = np.setdiff1d(np.arange(pool), self.page_ids)
        self.pages[unused] = np.nan
        self.q = normal(self.rng, (total, spec.num_qo_heads, spec.qk_head_dim), spec.dtype)
        self.o = normal(self.rng, (*self.q.shape[:2], spec.v_head_dim), spec.dtype)
        self.lse = 4 + normal(self.rng, self.q.shape[:2], "float32")
        self.nothing_seen = self.rng.random(self.lse.shape) < 0.2
        self.lse[self.nothing_seen], self.o[self.nothing_seen] = -np.inf, np.nan
        self.sm_scale = spec.qk_head_dim**-0.5

    def run(self, first: int = 0, last: int | None = None, *, inline=False, cpu="native"):
        """Attend to the segments ``first .. last - 1``; keep o and lse as `merged`."""
        last, self.is_inline = len(self.row_indptr) - 1 if last is None else last, inline
        tensor = self.tensor
        o, lse = tensor(self.o), tensor(self.lse)
        pages = pool_of(self.spec, self.pages)
        table = [tensor(x) for x in (self.q, pages, self.page_indptr, self.page_ids)]
        rows = [tensor(x) for x in (self.row_indptr, self.row_ids)]
        if self.spec.kind == "mla":
            kernel = compiled("mla_prefill_shared", self.spec, cpu)
            kernel(*table, *rows, o, lse, first, last, self.sm_scale)
        else:
            rope = self.spec.rope
            rows = [tensor(self.first_positions), *rows, tensor(self.q_positions)]
            scalars = (first, last, int(inline), rope.scale, rope.theta, self.sm_scale)
            compiled("prefill_shared", self.spec, cpu)(*table, *rows, o, lse, *scalars)
        self.merged, self.attended = (o.numpy(), lse.numpy()), (first, last)

    def segments(self, first: int, last: int | None) -> list:
        """Return page ids, row ids and first position of each segment."""
        return [
            (
                self.page_ids[self.page_indptr[s] : self.page_indptr[s + 1]],
                self.row_ids[self.row_indptr[s] : self.row_indptr[s + 1]],
                self.first_positions[s],
            )
            for s in range(len(self.row_indptr) - 1)
        ][first:last]

    def rows(self, first: int, last: int | None) -> list[int]:
        """The rows of these segments."""
        return [row for _, ids, _ in self.segments(first, last) for row in ids]

    def expected(self, first: int = 0, last: int | None = None, *, inline=False):
        """Return the reference's `(o, lse)` of the rows of these segments."""
        rows, segments = self.rows(first, last), self.segments(first, last)
        o = np.where(self.nothing_seen[..., None], 0, self.o)
        arguments = (self.q, self.pages, segments, o, self.lse, self.sm_scale)
        if self.spec.kind == "mla":
            whole = shared_latent_attention(*arguments)
        else:
            rope = self.spec.rope
            scaling = dict(rope.scaling or ())
            table = reference.Rope(rope.theta, rope.scale, rope.rotary_dim, scaling)
            rotation = (table, self.q_positions) if inline else None
            cap = self.spec.logit_softcap
            alibi = self.spec.alibi_slopes and (self.spec.alibi_slopes, self.q_positions)
            logits = {"softcap": cap, "alibi": alibi}
            whole = shared_attention(*arguments, inline=rotation, **logits)
        return whole[0][rows], whole[1][rows]

    def check(self, first: int = 0, last: int | None = None, *, inline=False, cpu="native"):
        """Run and compare; rows of no segment stay as they are."""
        self.run(first, last, inline=inline, cpu=cpu)
        self.verify(first, last, inline=inline)
        others = np.setdiff1d(np.arange(len(self.q)), self.rows(first, last))
        for after, before in zip(self.merged, (self.o, self.lse), strict=True):
            assert after[others].tobytes() == before[others].tobytes()

    def state(self):
        """Return the `(o, lse)` that the kernel wrote for the rows of its segments."""
        return tuple(x[self.rows(*self.attended)] for x in self.merged)


@pytest.mark.parametrize("spec", few_of(MLA_SPECS.values(), 2), ids=MLA_SPECS)
@pytest.mark.parametrize("segments", SEGMENTS)
@parametrize_seed
def test_mla_prefill_shared(spec, segments, seed):
    SharedBatch(spec, SEGMENTS[segments], seed).check()


@pytest.mark.parametrize("spec", few_of(SPECS.values(), 2), ids=SPECS)
@pytest.mark.parametrize("segments", SEGMENTS)
@parametrize_seed
def test_prefill_shared(spec, segments, seed):
    SharedBatch(spec, SEGMENTS[segments], seed).check()


@parametrize_seed
def test_some_segments_only(seed):
    case = SharedBatch(SPECS["32:8x128-f32-p16"], SEGMENTS["many"], seed)
    for first, last in ((0, 2), (2, 5), (1, 1)):
        case.check(first, last)


@pytest.mark.parametrize("spec", few_of(ROPE_SPECS.values(), 2), ids=ROPE_SPECS)
@pytest.mark.parametrize("segments", ["long", "many"])
@parametrize_seed
def test_inline_rope(spec, segments, seed):
    SharedBatch(spec, SEGMENTS[segments], seed).check(inline=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
@parametrize_seed
def test_soft_cap(dtype, seed):
    spec = make_spec((6, 2), 64, (dtype, dtype), logit_softcap=1.5)
    SharedBatch(spec, SEGMENTS["many"], seed).check()


@latin_square(2, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", "x86-64")
@pytest.mark.parametrize("dtype", [F32, BF16])
@parametrize_seed
def test_older_cpus(cpu, dtype, seed):
    spec = make_spec((6, 2), 72, (dtype, dtype), 8, target=vector_target(cpu))
    SharedBatch(spec, SEGMENTS["many"], seed).check(cpu=cpu)


@parametrize_seed
def test_one_thread_gives_the_same(seed):
    """Cutting positions for the threads changes the rounding only."""
    if os.environ.get("PAGEDKV_TEST_CHILD"):
        pytest.skip("this is the child")
    environment = {**os.environ, "TVM_NUM_THREADS": "1", "PAGEDKV_TEST_CHILD": "1"}
    name = f"{__file__}::test_prefill_shared[seed{seed}-many-32:8x128-f32-p16]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr


def check_longrope_is_refused(spec: KernelSpec) -> None:
    """Whatever the target is."""
    half = spec.qk_head_dim // 2
    scaling = (
        ("long_factor", (2.0,) * half), ("original_max_position_embeddings", 32),
        ("rope_type", "longrope"), ("short_factor", (1.0,) * half),
    )  # fmt: skip
    spec = dataclasses.replace(spec, rope=RopeSpec(1e4, 1.0, spec.qk_head_dim, scaling))
    case = SharedBatch(spec, SEGMENTS["one"], 0)
    case.check()
    with pytest.raises(ValueError, match="longrope"):
        case.run(inline=True)


def test_longrope_inside_the_kernel_is_refused():
    check_longrope_is_refused(make_spec((2, 2), 16, page=8))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
