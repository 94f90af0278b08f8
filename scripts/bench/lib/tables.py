# SPDX-License-Identifier: Apache-2.0
"""Measurements of bench_cpu.py as text."""

from __future__ import annotations

from lib.cases import Heads
from lib.selection import EVEN, SKEWED
from lib.shares import reads_text, share_of


def limits_line(limits: dict[str, float]) -> str:
    """The machine's limits: the best ones measured between the cases."""
    return (
        f"limits: read up to {limits['read'] / 1e9:.1f} GB/s, float32 FMA "
        f"{limits['float32'] / 1e9:.0f} GFLOP/s, products of bfloat16 "
        f"{limits['bfloat16'] / 1e9:.0f} GFLOP/s"
    )


def print_attention(
    dtype: str, heads: Heads, records: list[dict], absent: list[dict], limits: dict
) -> None:
    """A line per case and peer, then what was not measured and why."""
    print(f"\n{dtype}, {heads.label}")
    print(
        f"{'case':30} {'peer':16} {'best ms':>9} {'median':>9} {'n':>4} {'rate':>14} "
        f"{'of limit':>8} {'of GB/s':>7} {'to ours':>8}"
    )
    by_key = {(r["case"], r["peer"]): r for r in records}
    for (case, peer), r in by_key.items():
        share, is_read = share_of(r, limits)
        work, unit = (r["bytes"], "GB/s") if is_read else (r["flops"], "GFLOP/s")
        reads = reads_text(r) if is_read else ""
        ours = by_key.get((case, "ours"))
        ratio = f"{r['min_s'] / ours['min_s']:7.2f}x" if ours and peer != "ours" else ""
        print(
            f"{case:30} {peer:16} {r['min_s'] * 1e3:9.3f} {r['median_s'] * 1e3:9.3f} {r['n']:4} "
            f"{work / r['min_s'] / 1e9:6.1f} {unit:7} {share:8.0%} {reads:>7} {ratio:>8}  "
            f"{_notes(r, by_key)}".rstrip()
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in absent:
        reasons.setdefault((r["peer"], r["reason"]), []).append(r["case"])
    for (peer, reason), cases in reasons.items():
        which = "all cases" if len(cases) > 1 and len(cases) == _num_cases(records, absent) else ""
        print(f"not measured: {peer}, {which or '; '.join(cases)}: {reason}")


def _num_cases(records: list[dict], absent: list[dict]) -> int:
    return len({r["case"] for r in records + absent})


def _notes(record: dict, by_key: dict) -> str:
    notes = [f"{record['calls']} calls"] if record["calls"] > 1 else []
    notes += [record["note"]] if record["note"] else []
    even = by_key.get((EVEN.label, record["peer"]))
    if record["case"] == SKEWED.label and even:
        share = even["min_s"] / even["bytes"] * record["bytes"] / record["min_s"]
        notes.append(f"{share:.0%} of the rate of {EVEN.label}")
    if record.get("apart") is not None:
        notes.append(f"threads finish {record['apart']:.1%} apart")
    if record["unsteady"]:
        notes.append(
            f"{record['unsteady']} of {len(record['rounds'])} rounds while reading changed"
        )
    if record["error"] is not None and not record["error"] < 0.03:
        notes.append(f"WRONG RESULT: off by {record['error']:.0%}")
    return ", ".join(notes)


def print_begin_forward(records: list[dict], absent: list[dict]) -> None:
    """One line per batch size and peer: the host's part of a decode step."""
    print("\nbegin_forward (C++: and end_forward): what the host does in a decode step")
    ours = {r["case"]: r for r in records if r["peer"] == "ours"}
    for r in sorted(records, key=lambda r: list(ours).index(r["case"]) if r["case"] in ours else 0):
        reference = ours.get(r["case"])
        ratio = (
            f"{r['min_s'] / reference['min_s']:7.2f}x" if reference and r["peer"] != "ours" else ""
        )
        print(
            f"{r['case']:30} {r['peer']:16} {r['min_s'] * 1e6:7.2f} us best "
            f"{r['median_s'] * 1e6:7.2f} us median {r['n']:5} {ratio}".rstrip()
        )
    for r in absent:
        print(f"not measured: {r['peer']}, {r['case']}: {r['reason']}")
