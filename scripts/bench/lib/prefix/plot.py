# SPDX-License-Identifier: Apache-2.0
"""Times to first token and hit rates of each workload, with and without the prefix cache."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw(result: dict, path: str) -> None:
    """Draw a panel of times to first token, median and 90th percentile, and one of hit rates.

    Parameters
    ----------
    result : dict
        As bench_prefix.py writes it with --json.
    path : str
        Its ending chooses the format.
    """
    records = result["records"]
    workloads = list(dict.fromkeys(r["workload"] for r in records))
    setups = list(dict.fromkeys(r["setup"] for r in records))
    by_key = {(r["workload"], r["setup"]): r for r in records}
    width = 0.8 / len(setups)
    figure, (times, rates) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True)
    for number, setup in enumerate(setups):
        own = [
            (place + (number - (len(setups) - 1) / 2) * width, by_key[workload, setup])
            for place, workload in enumerate(workloads)
            if (workload, setup) in by_key
        ]
        places, own = [place for place, _ in own], [record for _, record in own]
        medians = [r["ttft_median_s"] * 1e3 for r in own]
        color = "0.6" if "hit_rate" not in own[0] else f"C{number - 1}"
        times.bar(places, medians, width, color=color, label=setup)
        times.plot(places, [r["ttft_p90_s"] * 1e3 for r in own], "k_", markersize=6)
        if "hit_rate" in own[0]:
            rates.bar(places, [100 * r["hit_rate"] for r in own], width, color=color)
            rates.plot(places, [100 * r["oracle_hit_rate"] for r in own], "k_", markersize=6)
    times.set(yscale="log", ylabel="time to first token, ms", title="bars: median; marks: p90")
    rates.set(ylabel="tokens reused, %", title="bars: the cache; marks: the simulation")
    rates.set_xticks(range(len(workloads)), labels=workloads, rotation=15)
    for axis in (times, rates):
        axis.grid(alpha=0.3, axis="y", which="both", linewidth=0.4)
        axis.set_axisbelow(True)
    times.yaxis.set_major_formatter("{x:g}")
    figure.suptitle(result["device"], fontsize=9)
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    figure.legend(*times.get_legend_handles_labels(), loc="center right", frameon=False)
    figure.savefig(path, dpi=120)
