# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that measures what the tests of attention kernels would notice.

``pytest -p tests.support.harness.faults tests/kernels/test_x.py`` runs the tests of that file
without their kernels. At each comparison with the reference it computes the result of a kernel that
makes a mistake, over the same data, and demands that the comparison refuses it. Of each kind of
mistake it makes the one that changes the softmax least: if that is noticed, the others are.

It replaces names in modules that test files import from, so it must be imported before these.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from ... import reference
from ...reference import dense_attention as reference_attention
from ..cases.kernels import attention_cases
from ..emulators.cuda_emulator.library import runtime

# How much weight a mistake must move to be required to be noticed: that of one position in 4096.
# ALiBi leaves less to distant positions. V does not show in the log-sum-exp. Where rotated Q and K
# are rounded to 16 bits, that alone moves more; the same kernels run without a rotation as well.
MIN_WEIGHT = {"page": 2**-12, "eight positions": 2**-12, "row of K": 2**-12, "rows of V": 2**-10}
MIN_WEIGHT_ROUNDED_QK = 2**-5


@dataclass(frozen=True)
class Fault:
    """Positions with these keys are skipped, or read the K or the V of a neighbour.

    `weight` is how much of the softmax of some row it moves.
    """

    kind: str
    keys: np.ndarray
    weight: float


class FaultyAttention:
    """Stands in for `reference_attention.attention`: the same results, or those of a fault.

    Positions are known by their rows of V, which are random.
    """

    def __init__(self):
        self.fault: Fault | None = None
        self.calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.states: list[tuple[np.ndarray, np.ndarray]] = []  # results without a fault
        self.num_calls = 0

    def begin(self, fault: Fault | None) -> None:
        """Make the calls of a result without a fault, or the same ones with it."""
        self.fault, self.num_calls = fault, 0
        if fault is None:
            self.calls, self.states = [], []

    def __call__(self, q, k, v, *args, **how):
        keys, index = _keys(v), self.num_calls
        self.num_calls += 1
        if self.fault is None:
            self.states.append(self._attend(keys, q, k, v, *args, **how))
        elif np.isin(keys, self.fault.keys).any():
            return self._attend(keys, q, k, v, *args, **how)
        return self.states[index]

    def _attend(self, keys, q, k, v, mask, sm_scale, softcap=None, sinks=None, bias=None):
        mask = np.asarray(mask, bool)
        q, k, v = (np.array(np.swapaxes(x, 0, 1), np.float64, order="C") for x in (q, k, v))
        if self.fault is not None:
            k, v, mask = self._spoiled(keys, k, v, mask)
        k[:, ~mask.any(0)] = v[:, ~mask.any(0)] = 0  # NaN may lie there
        num_heads, num_rows, _ = q.shape
        in_groups = len(k), num_heads // len(k) * num_rows  # rows of heads that share K and V
        scores = q.reshape(*in_groups, q.shape[2]) @ k.swapaxes(1, 2) * sm_scale
        scores = scores.reshape(num_heads, num_rows, len(keys))
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores * math.log2(math.e)
        seen = np.where(mask, scores, -np.inf)
        top = seen.max(-1, keepdims=True, initial=np.finfo(float).min)
        p = np.exp2(seen - top)
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = top + np.log2(total)
        p /= np.where(total > 0, total, 1)
        if self.fault is None:
            self._record(keys, mask, scores - top, total, p)
        o = (p.reshape(*in_groups, len(keys)) @ v).reshape(num_heads, num_rows, v.shape[2])
        o, lse = o.swapaxes(0, 1), lse[..., 0].T
        return (o, lse) if sinks is None else reference_attention.apply_sinks(o, lse, sinks)

    def _spoiled(self, keys, k, v, mask):
        affected = np.isin(keys, self.fault.keys)
        wrong = np.where(affected, _neighbours(len(keys)), np.arange(len(keys)))
        if self.fault.kind == "row of K":
            k = k[:, wrong]
        elif self.fault.kind == "rows of V":
            v = v[:, wrong]
        else:
            mask = mask & ~affected
        return k, v, mask

    def _record(self, keys, mask, scores, total, p) -> None:
        """Keep each position's largest weight, and what another row of K would change of it.

        `scores` are relative to the maximum: where they are huge, the log-sum-exp is the maximum.
        """
        if not mask.any():
            return
        others = scores[..., _neighbours(len(keys))]
        wrong = np.exp2(np.minimum(others, 30)) / np.where(total > 0, total, 1)
        change = np.where(mask, np.abs(wrong - p), 0).max((0, 1))
        self.calls.append((keys, p.max((0, 1)), change))

    def faults(self, page_size: int, rounds_qk: bool) -> Iterator[Fault]:
        """Yield the fault of each kind that moves the least weight above the threshold."""
        if not self.calls:
            return
        columns = (np.concatenate(x) for x in zip(*self.calls, strict=True))
        keys, weights, changes = columns
        unique, index = np.unique(keys, return_inverse=True)
        largest = np.zeros((2, len(unique)))  # over all calls
        for row, values in zip(largest, (weights, changes), strict=True):
            np.maximum.at(row, index, values)
        for kind, min_weight in MIN_WEIGHT.items():
            min_weight = max(min_weight, MIN_WEIGHT_ROUNDED_QK if rounds_qk else 0)
            size = {"page": page_size, "row of K": 1}.get(kind, 8)
            best = None
            for run, _, _ in self.calls:
                if len(run) == 1 and "row" in kind:
                    continue  # it has no neighbour
                places = np.searchsorted(unique, run)
                moved = np.maximum.reduceat(
                    largest[int(kind == "row of K"), places], np.arange(0, len(run), size)
                )
                moved = np.where(moved >= min_weight, moved, np.inf)
                i = int(moved.argmin())
                if moved[i] < (best.weight if best else np.inf):
                    best = Fault(kind, run[i * size : (i + 1) * size], float(moved[i]))
            if best is not None:
                yield best


def _keys(v) -> np.ndarray:
    """``[S]``: a number for each row of V."""
    columns = np.ascontiguousarray(np.asarray(v)[:, 0, :8], np.float64)
    return (columns * np.geomspace(1, 2, columns.shape[1])).sum(-1)


def _neighbours(length: int) -> np.ndarray:
    """``[length]``: the next position, and for the last one the one before."""
    return np.minimum(np.arange(length) + 1, length - 1) - (np.arange(length) == length - 1)


attention = FaultyAttention()
noticed: Counter[str] = Counter()  # faults by their kind
unnoticed: list[str] = []


def verify(case, *args, **how) -> None:
    """Replace `AttentionCase.verify`: the comparison must refuse faulty results."""
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    try:
        for fault in _not_refused(case, args, how):
            unnoticed.append(f"{test}: {fault.kind}, weight {fault.weight:.1e}")
    except Exception as error:
        unnoticed.append(f"{test}: {error!r}")
        raise


def _not_refused(case, args, how) -> Iterator[Fault]:
    attention.begin(None)
    expected = case.expected(*args, **how)
    case.state = lambda: _rounded(case, expected)
    case.compare(expected, *case.dtypes)
    rounds_qk = case.is_inline and reference.coarsest(*case.dtypes) != "float32"
    for fault in list(attention.faults(case.spec.page_size, rounds_qk)):
        attention.begin(fault)
        found = _rounded(case, case.expected(*args, **how))
        case.state = lambda found=found: found
        try:
            case.compare(expected, *case.dtypes)
            yield fault
        except AssertionError:
            noticed[fault.kind] += 1


def _rounded(case, state) -> tuple[np.ndarray, np.ndarray]:
    return state[0].astype(case.spec.dtype), state[1].astype(np.float32)


# --- the plugin ---------------------------------------------------------------------------------


def _refuse(*args, **options):
    raise RuntimeError("nothing is compiled, and no other process is started")


exact_attention = reference_attention.attention
for module in list(sys.modules.values()):
    if getattr(module, "attention", None) is exact_attention:
        module.attention = attention
attention_cases.AttentionCase.verify = verify
attention_cases.compiled = lambda *names, **options: lambda *arguments: None
attention_cases.cuda_text = tvm.tirx.build = _refuse


def pytest_sessionstart() -> None:
    """Let tests ask for an emulated device of some size, which is compiled once per content."""
    runtime()
    subprocess.run = _refuse


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """Without a kernel a test may fail for other reasons, which are of no interest here."""
    report = (yield).get_result()
    if report.failed and report.when == "call":
        report.outcome = "passed"


def pytest_sessionfinish(session) -> None:
    if unnoticed or not noticed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_sep("-", "faults")
    for line in unnoticed:
        terminalreporter.write_line(f"not noticed: {line}")
    counts = ", ".join(f"{count} of {kind}" for kind, count in noticed.items())
    terminalreporter.write_line(f"noticed: {counts}")
