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
    """Shares of the limits, a bar for each case and peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(r, share(r, limits)) for r in records]
    drawn = [(r, value) for r, value in drawn if value is not None]
    if not drawn:
        return
    peers = list(dict.fromkeys(r["peer"] for r, _ in drawn))
    colors = dict(zip(peers, ["black", *pyplot.get_cmap("tab10").colors], strict=False))
    figure, axis = pyplot.subplots(figsize=(11, 1.5 + 0.24 * len(drawn)))
    labels = [f"{r['case']}  {r['peer']}" for r, _ in drawn]
    places = range(len(drawn), 0, -1)
    axis.barh(places, [100 * x for _, x in drawn], color=[colors[r["peer"]] for r, _ in drawn])
    axis.set_yticks(places, labels, fontsize=7)
    for place, (r, _) in zip(places, drawn, strict=True):
        if r["target"]:
            axis.plot([100 * r["target"]] * 2, [place - 0.4, place + 0.4], color="red")
    axis.set_xlabel("% of copy bandwidth, or of the rate of products (causal prefill); red: target")
    axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
