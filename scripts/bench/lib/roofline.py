# SPDX-License-Identifier: Apache-2.0
"""Rooflines: how far each case and peer is from what the machine can do."""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
from bench_peers import PEERS  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from lib.cases import DTYPES, Heads  # noqa: E402
from lib.shares import is_steady  # noqa: E402

MARKERS = "osD^v<>PXphd*"
COLORS = dict(zip(PEERS, ["black", *pyplot.get_cmap("tab10").colors], strict=False))
SPREAD = 1.12  # from peer to peer: all decode cases have nearly the same place


def draw(result: dict, path: str) -> None:
    """Draw a panel for each type: the heads that have most records.

    Parameters
    ----------
    result : dict
        As bench_cpu.py writes it with --json.
    path : str
        Its ending chooses the format.
    """
    records = [r for r in result["records"] if r["kind"] in ("decode", "prefill")]
    if not records:
        raise ValueError("nothing to draw: no attention was measured")
    all_heads = [json.dumps(r["heads"]) for r in records]
    usual = max(dict.fromkeys(all_heads), key=all_heads.count)
    records = [r for r, heads in zip(records, all_heads, strict=True) if heads == usual]
    cases = list(dict.fromkeys(r["case"] for r in records))
    peers = [name for name in PEERS if any(r["peer"] == name for r in records)]
    dtypes = [name for name in DTYPES if any(r["dtype"] == name for r in records)]
    markers = dict(zip(cases, MARKERS * (1 + len(cases) // len(MARKERS)), strict=False))
    size = (4.6 * len(dtypes) + 3.2, 6.2)
    figure, axes = pyplot.subplots(1, len(dtypes), figsize=size, sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        own = [r for r in records if r["dtype"] == dtype]
        _roofs(axis, result["limits"], dtype, own)
        for r in own:
            place = peers.index(r["peer"]) if r["kind"] == "decode" else 0
            x = r["flops"] / r["bytes"] * SPREAD**place
            axis.plot(
                *(x, r["flops"] / r["min_s"] / 1e9, markers[r["case"]]),
                color=COLORS[r["peer"]],
                markersize=9 if r["peer"] == "ours" else 6,
                alpha=0.85,
                markeredgecolor="white",
                markeredgewidth=0.5,
            )
        axis.set(xscale="log", yscale="log", title=dtype)
        axis.set_xlabel("flops per byte (decode: peers are drawn right of ours)")
        axis.grid(alpha=0.3, which="both", linewidth=0.4)
    axes[0][0].set_ylabel("GFLOP/s")
    figure.suptitle(f"{Heads(**json.loads(usual)).label}; {result['device']}")
    entries = [Line2D([], [], marker="s", ls="", color=COLORS[x], label=x) for x in peers]
    entries += [Line2D([], [], ls="", label="")]
    entries += [Line2D([], [], marker=markers[x], ls="", color="gray", label=x) for x in cases]
    figure.legend(handles=entries, loc="center right", frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1 - 2.7 / size[0], 1))
    figure.savefig(path, dpi=120)


def _roofs(axis, limits: dict, dtype: str, records: list[dict]) -> None:
    intensities = [r["flops"] / r["bytes"] for r in records]
    left, right = min(intensities) / 6, max(intensities) * 2
    peaks = {"float32 FMA": limits["float32"]}
    if dtype == "bfloat16" and limits["bfloat16"] > 1.2 * limits["float32"]:
        peaks["products of bfloat16 pairs"] = limits["bfloat16"]
    top, read = max(peaks.values()), limits["read"]
    right = max(right, 3 * top / read)
    slowest = min(r["read"] for r in records)
    for slope in (read,) if is_steady([slowest, read]) else (read, slowest):
        ends = [left * slope / 1e9, top / 1e9]
        axis.plot([left, top / slope], ends, color="dimgray", linewidth=1.2)
        middle = left**0.3 * (top / slope) ** 0.7
        axis.annotate(
            f"read {slope / 1e9:.0f} GB/s",
            (middle, middle * slope / 1e9),
            xytext=(-3, 5) if slope == read else (3, -10),
            textcoords="offset points",
            ha="right" if slope == read else "left",
            color="dimgray",
            fontsize=8,
        )
    for name, peak in peaks.items():
        axis.plot([peak / read, right], [peak / 1e9] * 2, color="dimgray", linewidth=1.2)
        axis.annotate(
            f"{name} {peak / 1e9:.0f}",
            (right, peak / 1e9),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color="dimgray",
            fontsize=8,
        )
    axis.set_xlim(left, right)
