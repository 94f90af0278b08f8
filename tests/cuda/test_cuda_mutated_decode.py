# SPDX-License-Identifier: Apache-2.0
"""Decode on GPUs with a mistake in its source fails the comparisons of its tests, emulated."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from tir_kernels.cuda.attention import decode
from tir_kernels.cuda.builders import BUILDERS

from .. import reference
from ..support.attention_cases import PagedBatch, altered_kernels
from ..support.cuda_cases import make_spec
from ..support.cuda_emulator import multiprocessors
from ..support.mutated_modules import mutated_module
from ..support.selections import every_third

ALIBI = tuple(reference.alibi_slopes(4))
SPEC = dataclasses.replace(make_spec((4, 2), 32, page=8), alibi_slopes=ALIBI)
MANY = [(1, n) for n in (0, 1, 33, 0, 64, 131, 0, 500, 0)]
ONE = [(1, 700)]  # the first pair begins where a split does
# Name of a component in `decode`, or none; what its source has, and the mistake.
MISTAKES = {
    "no column is hidden": ("", "if first + tiling.positions > columns.end:", "if first < 0:"),
    "a column too many": ("", "first + i < columns.end", "first + i <= columns.end"),
    "the softmax goes on": ("", "softmax.reset()", "scores[0, 0, 0] = T.float32(0)"),
    "a part taken for all": ("", "if groups.is_whole != 0:", "if groups.slot >= 0:"),
    "the other slot": ("", "work.first > work.begin", "work.first == work.begin"),
    "one head for all": ("", "T.min(row, spec.group_size - 1)", "T.min(row, 0)"),
    "positions begin anew": ("", "offset = columns.k_offset + first", "offset = columns.k_offset"),
    "no softmax": ("", "softmax.update(scores)", "softmax.rows"),
    "no sequence is cleared": ("", "[sequence + 1] == a.", "[sequence + 1] < a."),
    "splits overlap": (
        "PageSchedule",
        "self.at = T.min(self.end, self.last)",
        "self.at = self.end",
    ),
    "a split too few": ("PageSchedule", "- block + 1", "- block"),
    "a pair at the start of a split": ("PageSchedule", "begin >= self.at -", "begin > self.at -"),
    "a KV tile too early": (
        "PageSchedule",
        "kv_tile - self.begin, I32",
        "kv_tile - self.first, I32",
    ),
    "a state too many": (
        "BlockStates",
        "MERGED_AT_ONCE + j < count",
        "MERGED_AT_ONCE + j <= count",
    ),
    "states weigh the same": ("BlockStates", "exp2(weights[j] - merged_top)", "T.float32(1)"),
    "sums of the last lanes": ("BlockStates", "total * exp2(top - merged_top), op", "total, op"),
    "groups weigh the same": ("GroupStates", "self.weights[i] * inverse", "inverse"),
    "a group is left out": ("GroupStates", "total += self.weights[i]", "total = self.weights[i]"),
    "the window is longer": (
        "VisibleColumns",
        "kv_len - self.a.window",
        "kv_len - 1 - self.a.window",
    ),
    "maxima of lanes": ("OnlineSoftmax", "over_lanes(top[h], T.max, ROW_LANES)", "top[h]"),
    "sums of lanes": ("OnlineSoftmax", "operator.add, ROW_LANES", "operator.add, 2"),
    "no bias": ("Logits", "* self.slope[h]", "* T.float32(0)"),
}


def check() -> None:
    """Compare decode with the reference, with and without a window and a rotation in the kernel."""
    for lengths, inline, window in ((MANY, True, None), (ONE, True, None), (MANY, False, 40)):
        case = PagedBatch(SPEC, lengths, 0)
        with multiprocessors(3):
            case.decode(inline=inline, window=window)
        case.verify(inline=inline, window=window)


def test_without_a_mistake():
    check()


@pytest.mark.parametrize("mistake", every_third(MISTAKES))
def test_mistakes(mistake, monkeypatch, tmp_path):
    component, old, new = MISTAKES[mistake]
    if component:
        module = importlib.import_module(getattr(decode, component).__module__)
        mutated = getattr(mutated_module(module, old, new, tmp_path), component)
        monkeypatch.setattr(decode, component, mutated)
    else:
        mutated = mutated_module(decode, old, new, tmp_path)
        for name in ("decode", "decode_sliding"):
            monkeypatch.setitem(BUILDERS, name, getattr(mutated, name))
    with altered_kernels(), pytest.raises(AssertionError):
        check()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
