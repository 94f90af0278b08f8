# SPDX-License-Identifier: Apache-2.0
"""Options that decide how exactly a model computes, and in how much memory."""

from __future__ import annotations

import argparse


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the options for types, weights, scales and the attention budget."""
    parser.add_argument(
        "--dtype",
        help="float32, float16 or bfloat16 (default: the checkpoint's; float16 if it is quantized)",
    )
    parser.add_argument(
        "--weights",
        metavar="HOW",
        default="auto",
        help="how matrices are kept in memory: float (as --dtype says), int8 or int4 (quantized in "
        "groups of 32; with int4 the vocabulary has 8 bits), or auto: what a GGUF file holds in "
        "Q8_0, Q4_0 and Q4_1 stays as it is, its other quantized types become int8, and all else "
        "is float (default auto)",
    )
    parser.add_argument(
        "--kv-dtype",
        help="type of the cache's pages: as for --dtype, or int8, float8_e4m3fn, int5 or "
        "int4, which quantize K and V; two with a comma between them are for K and for V, as in "
        "int5,int4 (default: that of --dtype)",
    )
    parser.add_argument(
        "--attention-budget",
        type=int,
        metavar="N",
        help="attend to N positions of a text when tokens are generated: those of the pages that "
        "may matter most, for each KV head (default: all); faster for long texts, but not exact",
    )
    parser.add_argument(
        "--kv-scales",
        default="row",
        choices=["row", "checkpoint"],
        help="by what --kv-dtype int8 and float8_e4m3fn scale K and V: the largest value of each "
        "row, or the static scales of a calibrated checkpoint (default row)",
    )
    parser.add_argument(
        "--state-dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="type of the states of recurrent layers (default float32); half of their memory, but "
        "rounded after each token",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="give a text the same bits in every batch, with slower linear layers on CPUs with AMX "
        "and slower prompts that begin alike; not with --attention-budget",
    )
