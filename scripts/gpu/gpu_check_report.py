# SPDX-License-Identifier: Apache-2.0
"""Measurements of a GPU check, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

STOCK = "apache-tvm"
STOCK_TARGET = 5.0


def share(record: dict, limits: dict[str, float]) -> float | None:
    """Return the share of the limit that the record names; None without one."""
    if not record["limit"] or not limits:
        return None
    work = record["num_bytes"] if record["limit"] == "copy" else record["flops"]
    return work / record["seconds"] / limits[record["limit"]]


def verdict(record: dict, limits: dict[str, float]) -> str:
    """Whether a target was reached; it decides nothing."""
    if not record["target"] or (record["limit"] and not limits):
        return ""
    reached = share(record, limits)
    if reached is None:
        met = record["seconds"] * 1e6 <= record["target"]
        return f"target {record['target']:.0f} us: {'met' if met else 'MISSED'}"
    met = reached >= record["target"]
    return f"target {record['target']:.0%}: {'met' if met else 'MISSED'}"


def print_table(records: Sequence[dict], limits: dict[str, float]) -> None:
    """A line for each case and peer."""
    if limits:
        print(
            f"limits: copy {limits['copy'] / 1e9:.0f} GB/s (read and written), products of "
            f"bfloat16 {limits['bfloat16'] / 1e12:.0f} TFLOP/s"
        )
    print(f"{'case':62} {'peer':20} {'us':>9} {'GB/s':>6} {'TFLOP/s':>7} {'share':>6} {'ours':>7}")
    ours = {r["case"]: r for r in records if r["peer"].startswith("ours")}
    for r in records:
        own, of_limit = ours.get(r["case"]), share(r, limits)
        faster = f"{r['seconds'] / own['seconds']:6.2f}x" if own and r is not own else ""
        notes = [verdict(r, limits), r["note"]]
        if r["peer"] == STOCK and own:
            met = r["seconds"] / own["seconds"] >= STOCK_TARGET
            notes.append(f"target {STOCK_TARGET:.0f}x: {'met' if met else 'MISSED'}")
        if r["error"] is not None and not r["error"] <= 1:
            notes.append(f"WRONG RESULT: {r['error']:.1f} tolerances off")
        print(
            f"{r['case']:62} {r['peer']:20} {r['seconds'] * 1e6:9.1f} "
            f"{r['num_bytes'] / r['seconds'] / 1e9:6.0f} {r['flops'] / r['seconds'] / 1e12:7.1f} "
            f"{'' if of_limit is None else f'{of_limit:6.1%}':>6} {faster:>7}  "
            f"{', '.join(filter(None, notes))}".rstrip()
        )


def draw(records: Sequence[dict], limits: dict[str, float], title: str, path: Path) -> None:
    """Shares of the limits: a line for each case, and a mark on it for each peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(r, share(r, limits)) for r in records]
    drawn = [(r, value) for r, value in drawn if value is not None]
    if not drawn:
        return
    cases = list(dict.fromkeys(r["case"] for r, _ in drawn))
    peers = list(dict.fromkeys(r["peer"] for r, _ in drawn))
    styles = zip(peers, ["black", *pyplot.get_cmap("tab10").colors], "osD^vP*X", strict=False)
    figure, axis = pyplot.subplots(figsize=(9, 1.5 + 0.22 * len(cases)))
    for peer, color, marker in styles:
        points = [(100 * value, cases.index(r["case"])) for r, value in drawn if r["peer"] == peer]
        axis.scatter(*zip(*points, strict=True), 28, [color], marker, label=peer, zorder=3)
    for i, case in enumerate(cases):
        for target in {r["target"] for r, _ in drawn if r["case"] == case and r["target"]}:
            axis.plot([100 * target] * 2, [i - 0.4, i + 0.4], color="red", linewidth=1)
    axis.set_yticks(range(len(cases)), cases, fontsize=7)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.grid(color="0.9")
    axis.set_xlabel("% of copy bandwidth, or of the rate of products (causal prefill); red: target")
    axis.set_title(title, fontsize=9)
    axis.legend(loc="lower center", bbox_to_anchor=(0.3, 1.03), ncols=len(peers), fontsize=7)
    figure.savefig(path, dpi=110, bbox_inches="tight")
