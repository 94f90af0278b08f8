# SPDX-License-Identifier: Apache-2.0
"""`append_prefill` against the reference: what it attends to, and what it writes to the pages."""

from __future__ import annotations

import numpy as np
import pytest

from tir_kernels import build_kernel, kernel_names
from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from .. import reference
from ..support.cases.kernels.attention_cases import PagedBatch, compiled, normal
from ..support.cases.kernels.kernel_specs import (
    BF16,
    F16,
    F32,
    YARN,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.harness.selections import few_of

SPECS = {
    "8:2x128-f32": make_spec((8, 2), 128),
    "8:2x128-f16": make_spec((8, 2), 128, (F16, F16)),
    "8:2x128-bf16": make_spec((8, 2), 128, (BF16, BF16)),
    "6:2x80-f32-bf16": make_spec((6, 2), 80, (F32, BF16), 4),
    "5:1x40-f16-f32": make_spec((5, 1), 40, (F16, F32), 1, rope=RopeSpec(5e5, 0.25, 20)),
    "4:2x96-bf16-yarn": make_spec((4, 2), 96, (BF16, BF16), 64, rope=RopeSpec(1e4, 1.0, 96, YARN)),
    "3:3x64-bf16-odd-pairs": make_spec((3, 3), 64, (BF16, BF16), rope=RopeSpec(1e4, 1.0, 22)),
    "4:2x24-f32-alibi": make_spec((4, 2), 24, alibi_slopes=tuple(np.geomspace(1e-3, 1, 4))),
}
BATCHES = {
    "alone": [(5, 5)],
    "new": [(512, 512), (33, 33)],
    "mixed": [(0, 0), (1, 1), (3, 70), (0, 33), (4, 6), (2, 2)],
    "groups": [(97, 97), (40, 41)],
    "tiles": [(150, 300), (1, 64), (65, 65), (70, 257)],
}
NO_SLOT = slice(2, None, 7)  # rows whose K and V the pages hold already


class FusedBatch(PagedBatch):
    """A batch whose rows of Q, K and V are fused, and whose K and V are not in the pages yet."""

    def __init__(self, spec, lengths, seed: int, apply_rope: bool):
        super().__init__(spec, lengths, seed)
        self.apply_rope = apply_rope
        num_qo, num_kv = spec.num_qo_heads, spec.num_kv_heads
        shape = (len(self.q), num_qo + 2 * num_kv, spec.qk_head_dim)
        self.qkv = normal(self.rng, shape, spec.dtype)
        self.q, k, v = np.split(self.qkv, [num_qo, num_qo + num_kv], axis=1)
        # A position of its own, as a sequence's window or a tree gives it.
        self.rope_positions = self.rng.integers(0, 131072, len(self.q)).astype(np.int32)
        if apply_rope:
            table = spec.rope
            rope = reference.Rope(
                table.theta, table.scale, table.rotary_dim, dict(table.scaling or ())
            )
            self.q, k = (reference.rotate(x, self.rope_positions, rope) for x in (self.q, k))
        self.slots = np.concatenate([self._slots(b, n) for b, n in enumerate(self.num_rows)])
        self.slots = self.slots.astype(np.int32)
        self.pages = reference.append(self.pages, k, v, self.slots)
        self.written = self.slots.copy()
        self.written[NO_SLOT] = -1
        page, offset = np.divmod(self.written[self.written >= 0], spec.page_size)
        self.before = self.pages.copy()
        self.before[page, :, :, offset] = np.nan

    def _slots(self, sequence: int, num_rows: int) -> np.ndarray:
        page_ids = self.page_ids[self.page_indptr[sequence] : self.page_indptr[sequence + 1]]
        page_size = self.spec.page_size
        slots = reference.sequence_slots(page_ids, self.last_page_len[sequence], page_size)
        return slots[len(slots) - num_rows :]

    def run(self, cpu: str = "native") -> np.ndarray:
        """Run the kernel and return the pages."""
        pages = self.tensor(self.before)
        compiled("append_prefill", self.spec, cpu)(
            self.tensor(self.qkv),
            *(self.tensor(x) for x in (self.query_indptr, self.rope_positions, self.written)),
            pages,
            *self._table(),
            self.o,
            self.lse,
            int(self.apply_rope),
            self.sm_scale,
            *self.last_arguments(),
        )
        return pages.numpy()


def check(spec, lengths, seed: int, apply_rope: bool, cpu: str = "native") -> None:
    case = FusedBatch(spec, lengths, seed, apply_rope)
    pages = case.run(cpu)
    reference.assert_close(
        pages, case.pages, reference.coarsest(spec.dtype, spec.kv_dtype), "pages"
    )
    reference.assert_same_bits(pages[:, 1], case.pages[:, 1], "V")
    case.is_inline = apply_rope  # Q is not rounded to its type after the rotation
    case.verify()


@pytest.mark.parametrize("spec", few_of(SPECS.values(), 5), ids=SPECS)
@pytest.mark.parametrize("apply_rope", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("batch", BATCHES)
@parametrize_seed
def test_append_prefill(spec, batch, apply_rope, seed):
    check(spec, BATCHES[batch], seed, apply_rope)


@parametrize_cpu("x86-64-v3", "x86-64")
@parametrize_seed
def test_narrow_vectors(cpu, seed):
    check(make_spec((8, 2), 64, target=vector_target(cpu)), BATCHES["tiles"], seed, True, cpu)


def test_refused_specs():
    scaling = (
        ("long_factor", (1.0,) * 32),
        ("original_max_position_embeddings", 64),
        ("rope_type", "longrope"),
        ("short_factor", (1.0,) * 32),
    )
    longrope = make_spec((4, 2), 64, rope=RopeSpec(1e4, 1.0, 64, scaling))
    sliding = make_spec((4, 2), 64, kind="mha_sliding")
    for spec in (longrope, sliding):
        assert "append_prefill" not in kernel_names(spec)
        with pytest.raises(ValueError, match="use rope_append and prefill"):
            build_kernel("append_prefill", spec)
    assert "append_prefill" in kernel_names(SPECS["8:2x128-f32"])
