# SPDX-License-Identifier: Apache-2.0
"""The options of `generate` and `chat` for sampling."""

from __future__ import annotations

import argparse
from typing import Any


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int, per: str) -> None:
    """Add the options.

    Parameters
    ----------
    parser : ArgumentParser
    max_tokens : int
        The default of ``--max-tokens``.
    per : str
        What has this number of tokens, for the help.
    """
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        help="0 takes the most likely token (default: the model's, or 0.7)",
    )
    add("--top-p", type=float, help="default: the model's, or 0.95")
    add(
        "--top-k",
        type=int,
        help="sample from the K most likely tokens; 0: from all (default: the model's, or 0)",
    )
    add("--seed", type=int, default=0)
    add("--max-tokens", type=int, default=max_tokens, help=f"per {per} (default {max_tokens})")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this string; may be repeated",
    )


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the options give.

    Raises
    ------
    ValueError
        If one is out of range, before a model is loaded.
    """
    from ..engine.parameters import SamplingParams

    fields = {
        "n": getattr(options, "n", None),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "stop": tuple(options.stop),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    SamplingParams(**given)
    return given
