# SPDX-License-Identifier: Apache-2.0
"""decode and prefill with windows of sequences, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tir_kernels.spec import RopeSpec
from tvm_pagedkv.compiler.build import vector_target
from tvm_pagedkv.config import standard_slopes

from .. import reference
from ..reference import window as reference_window
from ..support.cases.kernels.attention_cases import PagedBatch, compiled, pool_of
from ..support.cases.kernels.kernel_specs import (
    BF16,
    F16,
    F32,
    SOME_SPECS,
    SPECS,
    make_spec,
    parametrize_cpu,
    parametrize_seed,
)
from ..support.harness.selections import few_of, latin_square

NO_LIMIT = 2**31 - 1
# Of each sequence: rows of the step, slots, sinks, slot behind the gap, positions before a row.
DECODES = {
    "short": [(1, 9, 2, 6, 6), (1, 1, 0, 0, 4), (1, 40, 0, 0, None), (1, 30, 5, 28, 9)],
    "long": [(1, 3000, 4, 13, 2990), (1, 700, 33, 95, None), (1, 20, 0, 7, 12)],
    "sinks": [(1, 900, 600, 610, 400), (1, 70, 66, 68, 3), (1, 5, 7, 7, 3)],
}
PREFILLS = {
    "short": [(3, 9, 2, 5, 2), (1, 30, 5, 28, 9), (4, 4, 1, 1, 1), (7, 7, 9, 9, 2)],
    "chunks": [(200, 230, 4, 13, 40), (130, 130, 20, 20, 9), (5, 300, 0, 0, None)],
    "long": [(33, 700, 70, 150, 520), (2, 900, 3, 4, None), (300, 300, 0, 0, 1)],
    # Of the first two, the rows do not see all that is held.
    "singles": [(1, 700, 4, 13, 200), (1, 90, 60, 70, 9), (1, 700, 33, 95, None), (2, 40, 0, 0, 7)],
}
parametrize_specs = pytest.mark.parametrize("spec", few_of(SOME_SPECS.values(), 2), ids=SOME_SPECS)
parametrize_inline = pytest.mark.parametrize("inline", [False, True], ids=["plain", "inline"])


class WindowBatch(PagedBatch):
    """A batch of sequences that have dropped positions; NaN lies in their slots."""

    def __init__(self, spec, sequences, seed: int):
        super().__init__(spec, [sequence[:2] for sequence in sequences], seed)
        self.sinks, self.begins, backs = (
            np.array([NO_LIMIT if x is None else x for x in column], np.int64)
            for column in list(zip(*sequences, strict=True))[2:]
        )
        self.backs = np.minimum(backs, NO_LIMIT - self.sinks)
        # Tables of sequences that keep everything may begin after pages that are shared.
        self.k_offsets[:] = np.where((self.begins == 0) & (backs == NO_LIMIT), 16, 0)
        positions = []
        for b, (num_rows, num_slots) in enumerate(zip(self.num_rows, self.kv_lens, strict=True)):
            table = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
            for slot in range(self.sinks[b], min(self.begins[b], num_slots)):
                self.pages[table[slot // spec.page_size], :, :, slot % spec.page_size] = np.nan
            end = num_slots - (self.begins[b] - self.sinks[b])
            positions.append(self.k_offsets[b] + np.arange(end - num_rows, end))
        self.q_positions = np.concatenate(positions).astype(np.int32)

    def length_rows(self, num_rows: int) -> np.ndarray:
        rows = [self.last_page_len, self.begins, self.sinks, self.backs]
        return np.stack(rows[:num_rows]).astype(np.int32)

    def run(self, name: str, lengths: np.ndarray, inline: bool, causal=None, cpu="native"):
        arrays = (self.page_indptr, self.page_ids, lengths, self.k_offsets, self.q_positions)
        q = [self.tensor(self.q)] + (
            [] if name.startswith("decode") else [self.tensor(self.query_indptr)]
        )
        compiled(name, self.spec, cpu)(
            *q, self.tensor(pool_of(self.spec, self.pages)), *(self.tensor(x) for x in arrays),
            self.o, self.lse,
            *self.scalars(causal=causal, inline=inline),
        )  # fmt: skip

    def expected(self, num_rows: int, inline: bool, causal: bool = True):
        """Return the reference's `(o, lse)`; it reads no hidden slot."""
        rope, slopes = self.spec.rope, self.spec.alibi_slopes
        table = reference.Rope(rope.theta, rope.scale, rope.rotary_dim, dict(rope.scaling or ()))
        return reference_window.paged_attention(
            self.q, self.query_indptr, self.pages, self.page_indptr, self.page_ids,
            self.length_rows(num_rows), self.sm_scale, causal=causal,
            inline=(table, self.q_positions, self.k_offsets) if inline else None,
            softcap=self.spec.logit_softcap,
            alibi=(slopes, self.q_positions, self.k_offsets) if slopes else None,
        )  # fmt: skip


@parametrize_specs
@pytest.mark.parametrize("batch", DECODES)
@parametrize_inline
def test_decode(spec, batch, inline):
    case = WindowBatch(spec, DECODES[batch], 0)
    case.run("decode", case.length_rows(4).reshape(-1), inline)
    case.verify(4, inline)


@latin_square(2, "spec", "batch", "inline")
@parametrize_specs
@pytest.mark.parametrize("batch", PREFILLS)
@parametrize_inline
def test_prefill(spec, batch, inline):
    case = WindowBatch(spec, PREFILLS[batch], 0)
    case.run("prefill", case.length_rows(4).reshape(-1), inline, causal=True)
    case.verify(4, inline)


@parametrize_inline
@parametrize_seed
def test_prefill_over_the_past(inline, seed):
    """causal = 0: the rows follow the pages' positions."""
    sequences = [(20, 90, 4, 13, 40), (3, 60, 20, 30, 31), (5, 300, 0, 0, None), (30, 7, 2, 2, 9)]
    case = WindowBatch(SPECS["32:8x128-f32-p16"], sequences, seed)
    case.q_positions += np.repeat(case.num_rows, case.num_rows).astype(np.int32)
    case.run("prefill", case.length_rows(4).reshape(-1), inline, causal=False)
    case.verify(4, inline, causal=False)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=["f32", "bf16"])
@parametrize_seed
def test_more_rows_than_positions(dtypes, seed):
    """Rows before position 0 see nothing, and the others what they see without these."""
    spec = make_spec((8, 2), 64, dtypes)
    lengths = [(5, 3), (70, 10), (130, 65), (2, 0), (200, 1)]
    case = PagedBatch(spec, lengths, seed)
    case.prefill()
    case.verify()
    assert np.isneginf(case.lse.numpy()).any() and np.isfinite(case.lse.numpy()).any()
    gaps = [(0, 0, None), (2, 2, 4), (4, 13, 40), (0, 0, 3), (0, 0, 1)]
    case = WindowBatch(spec, [(*a, *b) for a, b in zip(lengths, gaps, strict=True)], seed)
    case.run("prefill", case.length_rows(4).reshape(-1), False, causal=True)
    case.verify(4, False)


@pytest.mark.parametrize("name", ["decode", "prefill"])
@parametrize_seed
def test_other_forms_of_the_lengths(name, seed):
    """[B] and [3 * B] for the same kernels, and [3, B] as the stock cache passes it."""
    spec = make_spec((8, 2), 64)
    sequences = (DECODES if name == "decode" else PREFILLS)["short"]
    causal = None if name == "decode" else True
    for form in (3, "matrix"):
        case = WindowBatch(spec, sequences, seed)
        lengths, kernel = case.length_rows(3), name
        if form == 3:
            lengths = lengths.reshape(-1)
        else:
            kernel += "_windowed"
        case.run(kernel, lengths, True, causal)
        case.verify(3, True)
    case = PagedBatch(spec, [sequence[:2] for sequence in sequences], seed)
    getattr(case, name)(inline=True)
    case.verify(inline=True)
    case = WindowBatch(spec, sequences, seed)
    with pytest.raises(ValueError, match="lengths must have 1, 3 or 4 numbers"):
        case.run(name, case.length_rows(2).reshape(-1), True, causal)


@parametrize_seed
def test_alibi(seed):
    """Distances count what a row sees."""
    spec = replace(make_spec((8, 2), 64), alibi_slopes=standard_slopes(8))
    for name, cases in (("decode", DECODES), ("prefill", PREFILLS)):
        for batch in cases.values():
            case = WindowBatch(spec, batch, seed)
            causal = None if name == "decode" else True
            case.run(name, case.length_rows(4).reshape(-1), False, causal)
            case.verify(4, False)


@parametrize_seed
def test_scaled_rotations(seed):
    """longrope chooses its factors by what is held, not by what the pages could hold."""
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_type", "yarn"))
    for spec in (
        make_spec((4, 2), 96, (BF16, BF16), 64, rope=RopeSpec(1e4, 1.0, 96, yarn)),
        make_spec((4, 2), 64, rope=RopeSpec(1e4, 0.5, 32)),
    ):
        for name, cases in (("decode", DECODES), ("prefill", PREFILLS)):
            case = WindowBatch(spec, cases["short"], seed)
            causal = None if name == "decode" else True
            case.run(name, case.length_rows(4).reshape(-1), True, causal)
            case.verify(4, True)


@latin_square(3, "cpu", "dtype")
@parametrize_cpu("x86-64-v3", slow=("x86-64",))
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_other_instruction_sets(cpu, dtype):
    target = vector_target(cpu)
    spec = make_spec((7, 1), 104, (F32, dtype), 8, target=target, logit_softcap=0.5)
    for name, cases in (("decode", DECODES), ("prefill", PREFILLS)):
        case = WindowBatch(spec, cases["short"], 0)
        causal = None if name == "decode" else True
        case.run(name, case.length_rows(4).reshape(-1), True, causal, cpu)
        case.verify(4, True)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
