# SPDX-License-Identifier: Apache-2.0
"""Decode on GPUs with a mistake in its source fails the comparisons of its tests, emulated."""

from __future__ import annotations

import dataclasses

import pytest

from tir_kernels.gpu.attention import decode
from tir_kernels.gpu.scores.softmax import Logits, OnlineSoftmax
from tir_kernels.gpu.scores.visible_columns import VisibleColumns
from tir_kernels.gpu.work.page_schedule import PageSchedule
from tir_kernels.gpu.work.partial_states import BlockStates, GroupStates

from .. import reference
from ..support.cases.kernels.attention_cases import PagedBatch, altered_kernels
from ..support.cases.kernels.cuda_cases import make_spec
from ..support.emulators.cuda_emulator import is_right, multiprocessors
from ..support.harness.mutated_source import Mistake
from ..support.harness.selections import every_nth

ALIBI = tuple(reference.alibi_slopes(4))
SPEC = dataclasses.replace(make_spec((4, 2), 32, page=8), alibi_slopes=ALIBI)
MANY = [(1, n) for n in (0, 1, 33, 0, 64, 131, 0, 500, 0)]
ONE = [(1, 700)]  # the first KV head begins where a split does


def check() -> None:
    """Compare decode with the reference, with and without a window and a rotation in the kernel."""
    for lengths, inline, window in ((MANY, True, None), (ONE, True, None), (MANY, False, 40)):
        case = PagedBatch(SPEC, lengths, 0)
        with multiprocessors(3):
            case.decode(inline=inline, window=window)
        case.verify(inline=inline, window=window)


MISTAKES = [
    Mistake(
        check,
        decode,
        "attend_to_split",
        "if first + tiling.positions > columns.end:",
        "if first < 0:",
    ),
    Mistake(
        check, decode, "attend_to_split", "first + i < columns.end", "first + i <= columns.end"
    ),
    Mistake(check, decode, "attend_to_split", "softmax.reset(o)", "scores[0, 0, 0] = T.float32(0)"),
    Mistake(check, GroupStates, "store", "if self.is_whole != 0:", "if self.slot >= 0:"),
    Mistake(check, decode, "attend_to_split", "work.first > 0", "work.first == 0"),
    Mistake(check, decode, "attend_to_split", "columns.k_offset + first", "columns.k_offset"),
    Mistake(check, decode, "attend_to_split", "softmax.update(scores, o)", "scores"),
    Mistake(check, decode, "merge_states", "[sequence + 1] == a.", "[sequence + 1] < a."),
    Mistake(check, decode, "head_of", "T.min(row, spec.group_size - 1)", "T.min(row, 0)"),
    Mistake(check, PageSchedule, "advance", ", self.left)\n", ", self.num_kv_tiles)\n"),
    Mistake(check, PageSchedule, "num_splits", "- block + 1", "- block"),
    Mistake(check, PageSchedule, "begins_in_split", ") <= self.split_size", ") < self.split_size"),
    Mistake(check, PageSchedule, "find_head", "number - self.head * self.num_kv_tiles", "0"),
    Mistake(check, BlockStates, "merge", "ONCE + j < count", "ONCE + j <= count"),
    Mistake(check, BlockStates, "merge", "self.isa.exp2(weights[j] - merged_top)", "T.float32(1)"),
    Mistake(
        check, BlockStates, "merge", "total * self.isa.exp2(top - merged_top), op", "total, op"
    ),
    Mistake(check, GroupStates, "merge", "self.weights[i] * inverse", "inverse"),
    Mistake(check, GroupStates, "merge", "total += self.weights[i]", "total = self.weights[i]"),
    Mistake(check, VisibleColumns, "first_seen", "self.kv_len, self.q", "self.kv_len - 1, self.q"),
    Mistake(
        check, OnlineSoftmax, "_update", "self.isa.over_lanes(top[h], T.max, ROW_LANES)", "top[h]"
    ),
    Mistake(check, OnlineSoftmax, "finish", "operator.add, ROW_LANES", "operator.add, 2"),
    Mistake(check, Logits, "scale", "* self.slope[h]", "* T.float32(0)"),
]


def test_without_a_mistake():
    check()


def test_every_mistake_can_be_made(monkeypatch):
    """The sources still have the texts that the mistakes replace."""
    for mistake in MISTAKES:
        with monkeypatch.context() as undone:
            mistake.make(undone)


@pytest.mark.parametrize("mistake", every_nth(MISTAKES, 6), ids=str)
def test_mistakes(mistake, monkeypatch):
    mistake.make(monkeypatch)
    with altered_kernels():
        assert not is_right(check)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
