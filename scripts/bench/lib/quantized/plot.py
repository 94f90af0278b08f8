# SPDX-License-Identifier: Apache-2.0
"""Time and bytes of decode steps over the context, a line for each peer."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw(result: dict, path: str) -> None:
    """Draw a panel of times for each batch, and one of bytes.

    Parameters
    ----------
    result : dict
        As bench_quantized.py writes it with --json.
    path : str
        Its ending chooses the format.
    """
    steps = [r for r in result["records"] if r["kind"] == "decode"]
    batches = sorted({_shape(r)[0] for r in steps})
    peers = list(dict.fromkeys(r["peer"] for r in steps))
    figure, axes = pyplot.subplots(1, len(batches) + 1, figsize=(4.6 * (len(batches) + 1), 4.4))
    for peer in peers:
        style = {"marker": "o", "linestyle": "-" if peer.startswith("ours") else "--"}
        style |= {"color": f"C{peers.index(peer)}", "label": peer}
        for axis, batch in zip(axes, batches, strict=False):
            own = [r for r in steps if r["peer"] == peer and _shape(r)[0] == batch]
            axis.plot([_shape(r)[1] for r in own], [r["min_s"] * 1e3 for r in own], **style)
        own = [r for r in steps if r["peer"] == peer and _shape(r)[0] == batches[0]]
        sizes = [r["bytes"] / batches[0] / 1e6 for r in own]
        axes[-1].plot([_shape(r)[1] for r in own], sizes, **style)
    for axis, batch in zip(axes, batches, strict=False):
        axis.set(title=f"decode step, batch {batch}", ylabel="ms")
    axes[-1].set(title="read for a sequence", ylabel="MB")
    contexts = sorted({_shape(r)[1] for r in steps})
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="context")
        axis.set_xticks(contexts, labels=map(str, contexts))
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3, which="both", linewidth=0.4)
    figure.suptitle(result["device"], fontsize=9)
    figure.tight_layout(rect=(0, 0, 0.9, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center right", frameon=False)
    figure.savefig(path, dpi=120)


def _shape(record: dict) -> tuple[int, int]:
    """Batch and context, as the name of a decode case has them."""
    batch, context = record["case"].removeprefix("decode ").split(" x ")
    return int(batch), int(context)
